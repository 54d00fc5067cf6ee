"""How the CUDA kernels for any number of sources cut up their work; many.cu explains the words."""

import ctypes
import functools
from dataclasses import dataclass, replace

from multigate.ops.cuda import SHARED, Plan

GROUP = 8
MOST = 128
STATIC = 1024
"""Bytes of shared memory of a block beside what its teams have, from above."""


def _barriers(slots: int) -> int:
    """Bytes, in whole 16."""
    return -(-slots // 2) * 16


@dataclass(frozen=True)
class Many:
    """What a kernel does: the numbers that decide how its work is cut."""

    count: int
    width: int
    itemsize: int
    backward: bool
    n = GROUP
    """Rows that a kernel is compiled for: a group, and not all sources."""
    room = MOST
    """Addresses in a list of sources."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The files of the kernel."""
        return ("many", "gradients", "backward_many") if self.backward else ("many", "forward_many")

    @property
    def groups(self) -> int:
        return -(-self.count // self.n)

    def team_bytes(self, warps: int, slots: int) -> int:
        """Shared memory of a team: barriers, its ring, two sums and a term of each row."""
        extra = 16 + 8 * self.n if self.backward else 0
        rows = self.count if slots == self.groups else slots * self.n
        ring = _barriers(slots) + slots * extra + rows * self.width * self.itemsize
        return ring + self.groups * self.n * (8 * warps + (16 if self.backward else 4))

    def dynamic_bytes(self, cut: Plan) -> int:
        """Of a block, in which the teams of a backward pass end by adding up two rows."""
        added = _barriers(cut.slots) + 8 * self.width if self.backward else 0
        return cut.teams * max(self.team_bytes(cut.warps, cut.slots), added)

    def plan(self, shared: int = SHARED) -> Plan | None:
        """A cut; None where a token does not fit into `shared` bytes."""
        return plan(self, shared)

    def told(self, cut: Plan) -> list[ctypes.c_int]:
        """What a kernel was not compiled for."""
        return [ctypes.c_int(self.count), ctypes.c_int(cut.slots)]

    def compiled(self, cut: Plan, shared: int) -> tuple[Plan, int]:
        """The cut that a kernel is compiled for, and its shared memory: all that there is.

        It is the same for any number of sources and slots.
        """
        needed, there = self.dynamic_bytes(cut), shared - STATIC
        assert needed <= there, f"a cut needs {needed} bytes of shared memory, there are {there}"
        assert cut.slots >= self.groups, "a ring must have room for a token"
        return replace(cut, slots=-(-self.width * self.itemsize // (512 * cut.warps))), there


@functools.cache
def plan(what: Many, shared: int) -> Plan | None:
    """As many teams as have room for a token, which was fast on an H200; None where none has."""
    if what.count > MOST:
        return None
    chunks = -(-what.width * what.itemsize // 512)
    slabs = -(-chunks // 16)
    warps = -(-chunks // slabs)
    for teams in range(min((16 if what.backward else 24) // warps, 15), 0, -1):
        for slots in range(2 * what.groups, what.groups - 1, -1):
            cut = Plan(warps, teams, slots, hold=slabs == 1)
            if what.dynamic_bytes(cut) <= shared - STATIC:
                return cut
    return None
