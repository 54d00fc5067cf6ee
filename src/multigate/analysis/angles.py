"""How far block inputs turn with depth: the paper's angular distance."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from .chart import Chart, Heat, Panel
from .probe import BLOCK, Step, watch
from .running import Array, Arrays, Mean, exact

CLAIM = (
    "PreNorm's inputs turn less and less in deep blocks; every stream of MGR turns sharply at "
    "depths of its own, and one stays nearly as it was throughout."
)


SHOWS = (
    "How far the last token's vector turns from the input of block l to that of block l + n (the "
    "model's output after the last block), 0.5 being a right angle."
)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """arccos(a . b / (|a| |b|)) / pi over the last dimension: 0 same, 0.5 orthogonal, 1 opposite.

    By the arc tangent of two lengths, which is exact where the arc cosine loses half the digits.
    """
    a, b = (exact(x) for x in (a, b))
    a, b = (torch.nn.functional.normalize(x, dim=-1) for x in (a, b))
    return 2 / torch.pi * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


class Angles:
    """Mean over samples of the distance between the inputs of blocks l and l + n, last token.

        d(x^l, x^{l+n}) = arccos( x_T^l . x_T^{l+n} / (|x_T^l| |x_T^{l+n}|) ) / pi

    Recorded: `hidden` [L + 1, L + 1], of what the blocks read, row l and column l + n, the last
    one being the model's output; and `streams` [n, L + 1, L + 1], the same of every stream, where
    there are several. What does not exist is NaN.
    """

    def __init__(self) -> None:
        self._points: list[Tensor] = []
        self._means: dict[int, Mean] = {}

    def see(self, step: Step) -> None:
        if (step.i + 1) % BLOCK:
            return
        if step.i == -1:
            self._points = []
        point = step.hidden[..., -1, :].unsqueeze(-2)
        if step.after is not None:
            point = torch.cat([point, step.after[..., -1, :, :]], dim=-2)
        if self._points:
            here = len(self._points)
            rows = [self._row(before, point) for before in self._points]
            self._means.setdefault(here, Mean()).add(torch.stack(rows, dim=1))
        self._points.append(point.flatten(0, -3))

    def _row(self, before: Tensor, point: Tensor) -> Tensor:
        """Distances of what exists at both places; NaN for streams that came later."""
        count = before.shape[-2]
        there = distance(before, point.flatten(0, -3)[:, :count])
        return torch.nn.functional.pad(there, (0, point.shape[-2] - count), value=torch.nan)

    def result(self) -> Arrays:
        places = max(self._means) + 1
        most = max(mean.result().shape[-1] for mean in self._means.values())
        found = np.full((most, places, places), np.nan)
        for place, mean in self._means.items():
            row = mean.result()
            found[: row.shape[-1], : row.shape[0], place] = row.T
        return {"hidden": found[0]} | ({"streams": found[1:]} if most > 2 else {})


def angular_distance(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Angles` over `tokens` [samples, T]."""
    angles = Angles()
    watch(model, tokens, angles, batch=batch)
    return angles.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """A heat map for each run, of n over l; and one for each stream of those that have several."""
    drawn = []
    for label, arrays in runs.items():
        title = f"Angular distance, {label}"
        if "hidden" not in arrays:
            absent = f"{label} has no angular distances on record."
            drawn.append(Chart(f"angles-{label}", title, SHOWS, claim=CLAIM, absent=[absent]))
            continue
        panels = [_panel("block input", arrays["hidden"])]
        for k, stream in enumerate(arrays.get("streams", ())):
            panels.append(_panel(f"stream {k}", stream))
        several = " Then each stream by itself." if len(panels) > 1 else ""
        drawn.append(
            Chart(
                name=f"angles-{label}",
                title=title,
                shows=f"{SHOWS}{several}",
                panels=panels,
                claim=CLAIM,
                seen=_seen(label, arrays),
            )
        )
    return drawn


def _panel(title: str, distances: Array) -> Panel:
    places = len(distances)
    by_step = np.full((places - 1, places - 1), np.nan)
    for n in range(1, places):
        by_step[n - 1, : places - n] = np.diagonal(distances, n)
    numbers = np.arange(1, places)
    far = max(0.6, float(np.nanmax(by_step, initial=0.0)))
    heat = Heat(by_step, numbers, numbers, "angular distance", 0.0, far)
    return Panel(title, "block l", "n blocks later", [heat])


def _seen(label: str, arrays: Arrays) -> str:
    steps = np.diagonal(arrays["hidden"], 1)
    half = len(steps) // 2
    text = f"From one block to the next the input of {label} turns by "
    if half > 1:
        # Block 1 reads the embedding, and turns more than all others.
        text += (
            f"{steps[0]:.3f} at block 1, by {np.mean(steps[1:half]):.3f} on average in the rest of "
            f"the first half and by {np.mean(steps[half:]):.3f} in the second."
        )
    else:
        text += f"{np.mean(steps):.2f}."
    # A stream that is there at the end alone has no step to turn by.
    found = [np.diagonal(stream, 1) for stream in arrays.get("streams", ())]
    far = {k: np.nanmean(steps) for k, steps in enumerate(found) if np.isfinite(steps).any()}
    if far:
        least, most = min(far, key=far.__getitem__), max(far, key=far.__getitem__)
        turned = f"{far[least]:.3f} (stream {least})"
        if least != most:
            turned += f" to {far[most]:.3f} (stream {most})"
        text += f" Its streams turn by {turned} a block."
    return text
