"""Statistics of more numbers than fit into memory: they are seen once, batch by batch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
"""What was recorded of one model, by name."""

BINS = 3840
"""So that 0.1 is an edge between two, and merging twelve at a time leaves it one."""


def exact(values: Tensor) -> Tensor:
    """As float64, where the device has it, and without a way back for gradients."""
    values = values.detach()
    return values.float() if values.device.type == "mps" else values.double()


class Mean:
    """The mean over the first dimension of everything added, of any one shape."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, values: Tensor) -> None:
        total = exact(values).sum(0)
        self.total = total if self.total is None else self.total + total
        self.count += len(values)

    def result(self) -> Array:
        assert self.total is not None, "nothing was added"
        return (self.total / self.count).cpu().numpy()


class Table:
    """Means over tokens, a row for each step; rows may differ in shape, NaN fills them up."""

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def add(self, row: int, values: Tensor) -> None:
        """values [tokens, ...]"""
        self._means.setdefault(row, Mean()).add(values)

    def rows(self) -> list[int]:
        """Those to which something was added."""
        return sorted(self._means)

    def result(self, rows: int) -> Array:
        found = {row: mean.result() for row, mean in self._means.items()}
        shape = np.max([values.shape for values in found.values()], axis=0)
        table = np.full((rows, *shape), np.nan)
        for row, values in found.items():
            table[row][tuple(slice(size) for size in values.shape)] = values
        return table


class Largest:
    """The k largest of all numbers added, largest first; fewer if there were fewer."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.values: Tensor | None = None

    def add(self, values: Tensor) -> None:
        values = values.flatten()
        values = values.topk(min(self.k, len(values))).values
        if self.values is not None:
            values = torch.cat([self.values, values])
        self.values = values.topk(min(self.k, len(values))).values

    def result(self) -> Array:
        found = np.full(self.k, np.nan)
        if self.values is not None:
            found[: len(self.values)] = self.values.double().cpu().numpy()
        return found


class Histogram:
    """Numbers from 0 to 1 counted in `BINS` equal bins, and their mean, least and largest.

    What is not finite is left out.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.mean = Mean()
        self.ends: Tensor | None = None

    def add(self, values: Tensor) -> None:
        values = values.detach().flatten().float()
        values = values[values.isfinite()]
        if not len(values):
            return
        self.mean.add(values)
        bins = (exact(values) * BINS).long().clamp(0, BINS - 1)
        counts = torch.bincount(bins, minlength=BINS)
        self.counts = counts if self.counts is None else self.counts + counts
        ends = torch.stack([values.min(), values.max()])
        if self.ends is not None:
            both = torch.stack([self.ends, ends])
            ends = torch.stack([both[:, 0].min(), both[:, 1].max()])
        self.ends = ends

    def result(self) -> Array:
        """How many there were in each bin."""
        return np.zeros(BINS, np.int64) if self.counts is None else self.counts.cpu().numpy()

    def box(self) -> Array:
        """Least, lower quartile, median, upper quartile, largest and mean.

        The quartiles are those of the histogram, right to one bin. NaN where there was nothing.
        """
        if self.ends is None:
            return np.full(6, np.nan)
        least, largest = self.ends.double().cpu().numpy()
        below = np.cumsum(self.result())
        quartiles = [
            np.clip((np.searchsorted(below, share * below[-1]) + 0.5) / BINS, least, largest)
            for share in (0.25, 0.5, 0.75)
        ]
        return np.array([least, *quartiles, largest, float(self.mean.result())])
