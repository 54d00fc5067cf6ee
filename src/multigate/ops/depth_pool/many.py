"""How the CUDA kernels for any number of sources cut up their work; many.cu explains the words."""

import functools
from dataclasses import dataclass

from multigate.ops.cuda import SHARED, Plan

GROUP = 8
MOST = 128
STATIC = 1024
"""Bytes of shared memory of a block beside what its teams have, from above."""


@dataclass(frozen=True)
class Many:
    """What a kernel does: the numbers that decide how its work is cut."""

    count: int
    width: int
    itemsize: int
    backward: bool
    n: int = GROUP
    """Rows that a kernel is compiled for: a group, and not all sources."""

    @property
    def groups(self) -> int:
        return -(-self.count // self.n)

    def team_bytes(self, warps: int, slots: int) -> int:
        """Shared memory of a team: its ring with the barriers, two sums and a term of each row."""
        extra = 16 + 8 * self.n if self.backward else 0
        rows = self.count if slots == self.groups else slots * self.n
        ring = slots * (extra + 8) + rows * self.width * self.itemsize
        return ring + self.groups * self.n * (8 * warps + (16 if self.backward else 4))

    def dynamic_bytes(self, cut: Plan) -> int:
        """Of a block, in which the teams of a backward pass end by adding up two rows."""
        teams = cut.teams * self.team_bytes(cut.warps, cut.slots)
        return max(teams, cut.teams * 8 * self.width) if self.backward else teams


@functools.cache
def plan(what: Many, shared: int = SHARED) -> Plan | None:
    """Teams for twelve warps, or as many as have room for a token; None where none has."""
    if what.count > MOST:
        return None
    chunks = -(-what.width * what.itemsize // 512)
    slabs = -(-chunks // 16)
    warps = -(-chunks // slabs)
    for teams in range(max(12 // warps, 1), 0, -1):
        for slots in range(2 * what.groups, what.groups - 1, -1):
            cut = Plan(warps, teams, slots, hold=slabs == 1)
            if what.dynamic_bytes(cut) <= shared - STATIC:
                return cut
    return None
