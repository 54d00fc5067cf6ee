"""How the CUDA kernels for few sources, which are compiled for their number, cut up their work."""

import ctypes
from dataclasses import dataclass

from multigate.ops import cuda
from multigate.ops.cuda import Plan, Problem

from .plan import saved_rows

MOST = 16


@dataclass(frozen=True)
class Few(Problem):
    """All rows of a token are in one slot of a ring. Has what `Many` has."""

    room = 0

    @property
    def parts(self) -> tuple[str, ...]:
        return ("gradients", "backward") if self.backward else ("forward",)

    def plan(self, shared: int) -> Plan | None:
        return cuda.plan(self, shared)

    def told(self, cut: Plan) -> list[ctypes.c_int]:
        return []

    def compiled(self, cut: Plan, shared: int) -> tuple[Plan, int]:
        return cut, self.dynamic_bytes(cut)


def few(count: int, width: int, itemsize: int, backward: bool) -> Few:
    if not backward:
        return Few(count, width, itemsize, count, 2 * count, False)
    return Few(count, width, itemsize, count + 1, 2 * count, True, saved_rows(count))
