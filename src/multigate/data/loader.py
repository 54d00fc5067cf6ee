"""Batches of windows in an order that follows from the seed alone.

The endless sequence of windows is one random permutation of all of them after another, each drawn
from (seed, epoch). Step s takes windows s * batch to (s + 1) * batch of it, and of these rank r of
`world` takes the r-th part: neither the order nor the content of a step depends on `world`.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .shards import Split


class Order:
    """The endless sequence of windows; the permutation in use is kept."""

    def __init__(self, windows: int, seed: int) -> None:
        self.windows, self.seed = windows, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, positions: slice) -> np.ndarray[Any, np.dtype[np.int64]]:
        parts, position = [], positions.start
        while position < positions.stop:
            epoch, begin = divmod(position, self.windows)
            end = min(self.windows, begin + positions.stop - position)
            parts.append(self._of(epoch)[begin:end])
            position += end - begin
        return np.concatenate(parts)

    def _of(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch != self._epoch:
            # Raw bits are the same in every version of numpy, its shuffling need not be.
            bits = np.random.PCG64([self.seed, epoch]).random_raw(self.windows)
            self._permutation = np.argsort(bits, kind="stable")
            self._epoch = epoch
        return self._permutation


class Loader:
    """`next(loader)` gives x and y, both int64 [batch / world, context] on `device`.

    `batch` is the number of windows a step takes in all processes together. A thread prepares
    `prefetch` batches ahead; `position` and the state count what was handed out.
    """

    def __init__(
        self,
        split: Split,
        context: int,
        batch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
    ) -> None:
        if batch < 1 or batch % world:
            raise ValueError(
                f"a batch of {batch} windows cannot be shared equally by {world} processes: make "
                f"it a multiple of {world}."
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} does not exist among {world} processes.")
        if seed < 0:
            raise ValueError(f"the seed of a loader must not be negative, got {seed}.")
        self.split, self.context, self.batch, self.seed = split, context, batch, seed
        self.position = 0
        """Windows handed out so far, by all processes together."""
        self.windows = split.windows(context)
        self._first, self._count = rank * (batch // world), batch // world
        self._device = torch.device(device)
        self._order = Order(self.windows, seed)
        self._ahead: deque[Future[Tensor]] = deque()
        self._prefetch = prefetch
        self._pool = ThreadPoolExecutor(1, "loader") if prefetch else None

    @property
    def epoch(self) -> int:
        """The epoch of the next window."""
        return self.position // self.windows

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        rows = self._next_rows()
        self.position += self.batch
        if self._device.type == "cuda":
            # The small dtype crosses; torch reuses pinned memory only after the copy out of it.
            rows = rows.to(self._device, non_blocking=True)
        x, y = rows[:, :-1].to(torch.int64), rows[:, 1:].to(torch.int64)
        # Last, because the thread that this wakes takes turns with the caller's.
        self._look_ahead()
        return x.to(self._device), y.to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as JSON: the windows handed out, and what they are windows of."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of a loader over the same data; its batch may have been another."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                what = "other data" if name == "fingerprint" else f"another {name}"
                raise ValueError(
                    f"this was begun with {what} ({state.get(name)!r}, now {value!r}): go on with "
                    "what it was begun with, or begin anew under another name."
                )
        self._drop_ahead()
        self.position = state["position"]

    def close(self) -> None:
        """End the thread; a closed loader gives no more batches."""
        self._drop_ahead()
        if self._pool is not None:
            self._pool.shutdown()

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "context": self.context,
            "split": self.split.name,
            "fingerprint": self.split.fingerprint,
        }

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _next_rows(self) -> Tensor:
        self._look_ahead()
        if not self._ahead:
            return self._rows(self.position)
        try:
            return self._ahead.popleft().result()
        except BaseException:
            # Those that follow belong to later positions than the one that is tried next.
            self._drop_ahead()
            raise

    def _look_ahead(self) -> None:
        """Have the next `prefetch` batches from `position` on prepared."""
        while self._pool is not None and len(self._ahead) < self._prefetch:
            position = self.position + len(self._ahead) * self.batch
            self._ahead.append(self._pool.submit(self._rows, position))

    def _rows(self, position: int) -> Tensor:
        """This process's windows of the step at `position`, in the dtype on disk."""
        first = position + self._first
        windows = self._order[first : first + self._count]
        rows = torch.from_numpy(self.split.rows(windows, self.context))
        if self._device.type != "cuda":
            return rows
        # A thread starts on device 0, where pinning would open a context that nobody uses.
        with torch.cuda.device(self._device):
            return rows.pin_memory()
