"""What every sublayer reads and writes with: the coefficients of the steps as maps."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from .chart import Chart, Heat, Line, Panel
from .probe import Step, watch
from .running import Array, Arrays, Table

DIMENSIONS = {"alpha": 1, "weights": 1, "pre": 1, "post": 1, "mix": 2}
"""Of one token's coefficients, by name."""
MATRICES = 6
"""The most sublayers of which the mixing matrix is drawn."""


class Mixing:
    """Mean over tokens of what the steps mix with, by the name of the coefficient.

        h = sum_j alpha_j s_j            over streams, or over all that was written before
        h = sum_j weights_j x_j          over block outputs, the same for every token
        h = sum_j pre_j s_j,             s_k <- post_k y + sum_j mix[j, k] s_j

    Recorded where a step has them: `alpha` [depth, m], row i being what is read after sublayer i;
    `weights` [steps that have them, m] and `weights.steps`, which those are; `mix` [depth, n, n],
    source stream first; `post` [depth, n]; and `pre` [depth, n], row i being what sublayer i
    reads with. What does not exist is NaN.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._tables: dict[str, Table] = {}

    def see(self, step: Step) -> None:
        self._depth = max(self._depth, step.i + 1)
        for name, dimensions in DIMENSIONS.items():
            row = step.i + (name == "pre")
            if name in step.coefficients and row >= 0:
                values = step.coefficients[name]
                values = values.reshape(-1, *values.shape[-dimensions:])
                self._tables.setdefault(name, Table()).add(row, values)

    def result(self) -> Arrays:
        found = {name: table.result(self._depth) for name, table in self._tables.items()}
        if "weights" in found:
            steps = np.array(self._tables["weights"].rows())
            found |= {"weights": found["weights"][steps], "weights.steps": steps}
        return found


def mixing_maps(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Mixing` over `tokens` [samples, T]."""
    mixing = Mixing()
    watch(model, tokens, mixing, batch=batch)
    return mixing.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """The maps that any of the runs has; one chart without panels if none has any."""
    drawn = [*_alpha(runs), *_weights(runs), *_mix(runs), *_change(runs), *_ends(runs)]
    if drawn:
        return drawn
    return [
        Chart(
            "mixing",
            "Mixing",
            "What every sublayer reads and writes with.",
            absent=[f"{label} has no coefficients to read or write with." for label in runs],
        )
    ]


def _alpha(runs: Mapping[str, Arrays]) -> list[Chart]:
    found = _having(runs, "alpha")
    high = _most(found.values())
    panels, seen = [], []
    for label, alpha in found.items():
        readers, sources = np.arange(len(alpha)) + 2, np.arange(alpha.shape[1])
        heat = Heat(alpha, sources, readers, "mean weight", 0.0, high)
        panels.append(
            Panel(label, "stream or source", "reading sublayer, the last is the output", [heat])
        )
        last = alpha[-1]
        if not np.isfinite(last).any():
            seen.append(f"The weights of {label} are not all finite.")
            continue
        seen.append(
            f"The output of {label} is read mostly from source {int(np.nanargmax(last))} "
            f"({np.nanmax(last):.2f}); source 0, which starts as the embedding, has "
            f"{np.nanmean(alpha[:, 0]):.2f} of what is read on average."
        )
    return _chart(
        "mixing-alpha",
        "Weights over depth",
        "How much of each stream, or of what earlier sublayers wrote, every sublayer reads (mean "
        "over tokens).",
        panels,
        seen,
        _absent(runs, found, "has no weights (alpha) to read by"),
    )


def _weights(runs: Mapping[str, Arrays]) -> list[Chart]:
    found = _having(runs, "weights")
    most = _most(found.values())
    panels, seen = [], []
    for label, weights in found.items():
        steps = runs[label]["weights.steps"] + 1
        heat = Heat(weights, np.arange(weights.shape[1]), steps, "weight", -most, most, 0.0)
        panels.append(Panel(label, "averaged output", "after sublayer", [heat]))
        rows = [row[np.isfinite(row)] for row in weights]
        earlier = np.concatenate([row[:-1] for row in rows])
        seen.append(
            f"{label} weighs the newest output by {np.mean([row[-1] for row in rows]):.2f} on "
            f"average and earlier ones by {np.mean(np.abs(earlier)):.3f} in absolute value."
        )
    return _chart(
        "mixing-weights",
        "Depth-weighted average",
        "The learned weights, the same for every token, by which outputs of blocks are averaged.",
        panels,
        seen,
        _absent(runs, found, "averages no outputs of blocks"),
    )


def _mix(runs: Mapping[str, Arrays]) -> list[Chart]:
    """A chart for each run."""
    drawn = []
    for label, mix in _having(runs, "mix").items():
        there = np.flatnonzero(np.isfinite(mix).all((1, 2)))
        places = np.linspace(0, len(there) - 1, min(MATRICES, len(there)))
        scale, streams = _scale([mix]), np.arange(mix.shape[1])
        panels = []
        for i in there[places.round().astype(int)]:
            heat = Heat(mix[i], streams, streams, "coefficient", *scale)
            panels.append(Panel(f"sublayer {i + 1}", "to stream", "from stream", [heat]))
        kept = np.diagonal(mix[there], axis1=1, axis2=2).mean()
        drawn += _chart(
            f"mixing-mix-{label}",
            f"Mixing matrices, {label}",
            "How much of each stream goes on into each stream (mean over tokens), at sublayers "
            "spread over the depth.",
            panels,
            [f"A stream of {label} keeps {kept:.2f} of itself at a sublayer on average."],
        )
    return drawn


def _change(runs: Mapping[str, Arrays]) -> list[Chart]:
    found = _having(runs, "mix")
    away = {label: np.abs(mix - np.eye(mix.shape[1])).mean(1) for label, mix in found.items()}
    high = _most(away.values())
    lines, panels, seen = [], [], []
    for label, by_stream in away.items():
        numbers, streams = np.arange(len(by_stream)) + 1, np.arange(by_stream.shape[1])
        mean = by_stream.mean(1)
        lines.append(Line(label, numbers, mean, list(runs).index(label)))
        heat = Heat(by_stream.T, numbers, streams, "mean |mix - identity|", 0.0, high)
        panels.append(Panel(label, "sublayer", "to stream", [heat]))
        seen.append(
            f"The mean matrix of {label} is {np.nanmean(mean):.3f} from the identity on average "
            f"and most at sublayer {int(np.nanargmax(mean)) + 1} ({np.nanmax(mean):.3f})."
        )
    return _chart(
        "mixing-change",
        "Mixing matrices, distance from the identity",
        "Mean of |mix - identity| over the entries of each sublayer's mean matrix: over all of "
        "them, then over those of each receiving stream.",
        [Panel("all streams", "sublayer", "mean |mix - identity|", lines), *panels],
        seen,
        _absent(runs, found, "mixes its streams by no matrix"),
    )


def _ends(runs: Mapping[str, Arrays]) -> list[Chart]:
    what = {"pre": "read with (pre)", "post": "written with (post)"}
    found = {name: _having(runs, name) for name in what}
    scale = _scale([values for each in found.values() for values in each.values()])
    panels, seen = [], []
    for label in runs:
        for name, title in what.items():
            if label not in found[name]:
                continue
            values = found[name][label]
            numbers, streams = np.arange(len(values)) + 1, np.arange(values.shape[1])
            heat = Heat(values.T, numbers, streams, "coefficient", *scale)
            panels.append(Panel(f"{label}: {title}", "sublayer", "stream", [heat]))
            mean = np.nanmean(values, axis=0)
            seen.append(
                f"Streams of {label} are {title} {mean.min():.2f} (stream "
                f"{int(np.argmin(mean))}) to {mean.max():.2f} (stream {int(np.argmax(mean))})."
            )
    return _chart(
        "mixing-ends",
        "Reading and writing the streams",
        "The coefficients by which each sublayer sums the streams to its input and adds its output "
        "to them (mean over tokens).",
        panels,
        seen,
        _absent(runs, found["pre"] | found["post"], "reads and writes by no such coefficients"),
    )


def _chart(
    name: str,
    title: str,
    shows: str,
    panels: Sequence[Panel],
    seen: Sequence[str],
    absent: Sequence[str] = (),
) -> list[Chart]:
    """One chart, or none where no run has anything to show."""
    return [Chart(name, title, shows, panels, "", " ".join(seen), absent)] if seen else []


def _having(runs: Mapping[str, Arrays], name: str) -> dict[str, Array]:
    return {
        label: arrays[name]
        for label, arrays in runs.items()
        if name in arrays and np.isfinite(arrays[name]).any()
    }


def _absent(runs: Mapping[str, Arrays], found: Mapping[str, Array], why: str) -> list[str]:
    return [f"{label} {why}." for label in runs if label not in found]


def _most(maps: Iterable[Array]) -> float:
    return max((float(np.nanmax(np.abs(values))) for values in maps), default=0.0)


def _scale(maps: Sequence[Array]) -> tuple[float, float, float | None]:
    """Low, high and middle of the colours of several maps: around 0 where any has both signs."""
    most = _most(maps)
    if any(np.nanmin(values) < 0 for values in maps):
        return -most, most, 0.0
    return 0.0, most, None
