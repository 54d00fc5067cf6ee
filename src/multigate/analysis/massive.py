"""The largest numbers a token carries: massive activations."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from multigate.numerics import wide

from .chart import Chart, Line, Panel
from .probe import BLOCK, Step, watch
from .running import Array, Arrays, Largest, Mean

TOP = 3
KINDS = (("attention", "attention"), ("FFN", "ffn"))
"""What the sublayers of a block are called, and their chart's file."""
CLAIMS = (
    "MGR's values after attention are smaller than those of Full AttnRes; the two are of similar "
    "size overall.",
    "PreNorm has massive values from early blocks on, sustained and rising to the output; in Full "
    "AttnRes and competitive MGR they are considerably smaller, slightly larger in MGR, and there "
    "is no such plateau.",
)
STREAMS_CLAIM = (
    "For both MGR variants every stream stays in a stable range; where certain streams peak, the "
    "hidden state does."
)


class Massive:
    """The largest |value| over all tokens, samples and channels after every sublayer's step.

    The hidden state is what the next sublayer reads: PreNorm's sum, the pooled h of AttnRes and
    of Multi-Gate Residuals. Recorded: `hidden` [depth, 3], its three largest |value|, and `mean`
    [depth], its mean |value|, for scale; where there are several streams also `streams` [depth, n],
    the largest |value| of each, NaN as long as it does not exist.
    """

    def __init__(self) -> None:
        self._largest: dict[int, Largest] = {}
        self._means: dict[int, Mean] = {}
        self._streams: dict[int, Tensor] = {}

    def see(self, step: Step) -> None:
        if step.i == -1:
            return
        values = wide(step.hidden.detach()).abs().flatten(0, -2) / step.summed
        # The three largest are in the three tokens with the largest maxima, and a maximum a token
        # is found much faster than the three of all numbers.
        tokens = values.amax(-1).topk(min(TOP, len(values))).indices
        self._largest.setdefault(step.i, Largest(TOP)).add(values[tokens])
        self._means.setdefault(step.i, Mean()).add(values.mean(-1))
        if step.after is not None:
            found = step.after.detach().abs().flatten(0, -3).amax((0, -1))
            before = self._streams.get(step.i, found)
            self._streams[step.i] = torch.maximum(before, found)

    def result(self) -> Arrays:
        found = {
            "hidden": np.stack([largest.result() for largest in self._largest.values()]),
            "mean": np.stack([mean.result() for mean in self._means.values()]),
        }
        most = max((len(largest) for largest in self._streams.values()), default=0)
        if most > 1:
            streams = np.full((len(self._streams), most), np.nan)
            for i, largest in self._streams.items():
                streams[i, : len(largest)] = largest.double().cpu().numpy()
            found["streams"] = streams
        return found


def massive_activations(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Massive` over `tokens` [samples, T]."""
    massive = Massive()
    watch(model, tokens, massive, batch=batch)
    return massive.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """The three largest after attention and after FFN, and the largest of each stream.

    All on logarithmic axes: a massive value is hundreds of times the mean beside it.
    """
    found = [_kind_chart(runs, kind, *KINDS[kind]) for kind in range(BLOCK)]
    return [*found, _streams_chart(runs)]


def _kind_chart(runs: Mapping[str, Arrays], kind: int, name: str, file: str) -> Chart:
    panels, seen, absent = [], [], []
    for label, arrays in runs.items():
        if "hidden" not in arrays or "mean" not in arrays:
            absent.append(f"{label} has no largest activations on record.")
            continue
        hidden, mean = arrays["hidden"][kind::BLOCK], arrays["mean"][kind::BLOCK]
        numbers = 1 + kind + BLOCK * np.arange(len(hidden))
        # The largest on top of the others, which often are the same.
        lines = [Line(f"top {k + 1}", numbers, hidden[:, k], k) for k in reversed(range(TOP))]
        lines.append(Line("mean", numbers, mean, TOP, dashed=True))
        panels.append(_panel(label, lines))
        seen.append(f"{label} {_peak(hidden[:, 0], mean, numbers)}")
    return Chart(
        name=f"massive-{file}",
        title=f"Massive activations after {name}",
        shows=f"The three largest absolute values of the hidden state after every {name} sublayer, "
        "over all tokens and channels, and the mean absolute value.",
        panels=panels,
        claim=CLAIMS[kind],
        seen=_sentence("The largest value", seen) + _alike(runs, kind),
        absent=absent,
    )


def _streams_chart(runs: Mapping[str, Arrays]) -> Chart:
    panels, seen, absent = [], [], []
    for label, arrays in runs.items():
        if "streams" not in arrays:
            absent.append(f"{label} does not carry several streams.")
            continue
        streams = arrays["streams"]
        numbers = 1 + np.arange(len(streams))
        lines = [Line(f"stream {k}", numbers, s, k) for k, s in enumerate(streams.T)]
        panels.append(_panel(label, lines))
        far = np.max(np.nan_to_num(streams, nan=-np.inf), axis=0)
        k = int(np.argmax(far))
        seen.append(f"{label} {far[k]:.3g} (stream {k}), {far.min():.3g} in the smallest stream")
    return Chart(
        name="massive-streams",
        title="Largest value of each stream",
        shows="The largest absolute value in each stream after every sublayer, over all tokens and "
        "channels.",
        panels=panels,
        claim=STREAMS_CLAIM,
        seen=_sentence("The largest value in any stream", seen),
        absent=absent,
    )


def _panel(label: str, lines: Sequence[Line]) -> Panel:
    return Panel(label, "sublayer", "absolute value", lines, log_y=True)


def _peak(top: Array, mean: Array, numbers: Array) -> str:
    k = int(np.argmax(np.nan_to_num(top, nan=np.inf)))
    times = top[k] / mean[k] if mean[k] else np.nan
    return f"{top[k]:.3g} after sublayer {numbers[k]}, {times:.3g} times the mean there"


def _alike(runs: Mapping[str, Arrays], kind: int) -> str:
    """Which runs have one value three times, as of the same first token of several samples."""
    found = [arrays.get("hidden", np.empty((0, TOP)))[kind::BLOCK] for arrays in runs.values()]
    named = [
        label
        for label, top in zip(runs, found, strict=True)
        if len(top) and np.allclose(top, top[:, :1], rtol=1e-6)
    ]
    return f" The three largest are one value in {', '.join(named)}." if named else ""


def _sentence(start: str, seen: Sequence[str]) -> str:
    return f"{start}: {'; '.join(seen)}." if seen else ""
