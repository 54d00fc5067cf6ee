"""How the depth_pool kernels cut up their work: plain numbers, chosen without looking at data."""

from dataclasses import dataclass

LANES = 32
MOST_HELD = 8
"""A kernel that holds its sources is compiled for their number: not for each depth of a model."""


@dataclass(frozen=True)
class Plan:
    """How a kernel is laid out on the machine; apart from rounding, results do not depend on it."""

    section: int
    """columns handled at once; a power of two"""
    block: int
    """tokens a program handles at once; a power of two"""
    warps: int
    group: int
    """sources handled at once"""
    held: bool
    """all sources are one group, and stay in registers"""
    programs: int = 3
    """programs a multiprocessor; backward only"""


def saved_rows(count: int) -> int:
    """Numbers that the forward pass keeps of a token: 2 a source and 3 more, in whole 16 bytes."""
    return (2 * count + 6) // 4 * 4


def plan(count: int, width: int, itemsize: int, backward: bool) -> Plan:
    """One warp a token while a lane then has few numbers of a row, otherwise more warps.

    A warp that has a token for itself adds up without a barrier. A section is one 16-byte load a
    lane. Rows wait in registers in their own dtype, in at most `budget` of them a lane; where not
    all sources fit, two groups do, one of which is still on its way.
    """
    warps = 1
    while width > (24 if backward else 40) * LANES * warps:
        warps *= 2
    section = min(_power_of_two(width), warps * LANES * max(16 // itemsize, 1))
    block = 4 if warps == 1 else 1
    registers = max(1, -(-width // section) * section * itemsize // (4 * LANES * warps))
    budget = 48 if backward else 64
    held = count == 1 or (count <= MOST_HELD and count * registers <= budget)
    group = count if held else max(1, min(4, count // 2, budget // (2 * registers)))
    return Plan(section, block, block * warps, group, held, programs=max(1, 12 // (block * warps)))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
