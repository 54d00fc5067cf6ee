"""How the CUDA kernels of the Multi-Gate step cut up their work."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from multigate.ops.cuda import Plan, Problem, plan_on, shared_memory

from .saved import saved_numbers

REGISTERS = 65536
"""Of a multiprocessor."""
MOST_HELD = 8
"""Streams of which a thread holds its chunks in registers."""
MOST_BLOCKS = 32
"""On a multiprocessor."""
ENOUGH = 64 * 1024
"""Bytes a multiprocessor should wait for."""
BETTER = {
    (2, 384): (1, 72),
    (2, 768): (1, 168),
    (2, 1024): (1, 168),
    (2, 1280): (3, 80),
    (2, 2048): (2, 168),
    (2, 4096): (4, 168),
    (4, 384): (2, 72),
    (4, 1280): (2, 128),
    (8, 1280): (3, 168),
}
"""Warps and registers of a thread that `benchmarks/launches.py` found, by streams and width."""
PLAIN = {(4, 1024): (4, 80), (4, 1280): (3, 96)}
"""The same where h is not normed, if that makes a difference."""
BACKWARD = {
    (4, 768, False): (4, 2),
    (4, 768, True): (4, 2),
    (4, 1024, False): (2, 2),
    (4, 1024, True): (3, 3),
    (4, 1280, False): (2, 2),
    (4, 2048, False): (1, 3),
    (8, 1024, True): (2, 2),
}
"""Teams of a block and tokens in the ring of each, found likewise, by streams, width and norm."""


def problem(n: int, width: int, itemsize: int, *gradients: Tensor | None) -> Problem:
    """Of the forward pass, or, with the two gradients of its outputs, of the backward pass."""
    if not gradients:
        return Problem(n, width, itemsize, n + 1, 4 * n + 2, False)
    grad_h, grad_streams = (g is not None for g in gradients)
    rows = n + 1 + n * grad_streams + grad_h
    return Problem(n, width, itemsize, rows, 4 * n + 2, True, saved=saved_numbers(n))


@functools.cache
def ringless(n: int, width: int, itemsize: int, norm: bool) -> Plan | None:
    """A cut of the forward pass that was fast on an H200; None where a ring is better.

    A thread has one or two chunks of a row, three where a multiprocessor would have one block only:
    the fewest with which it waits for enough bytes, else those with which it waits for the most.
    """
    if n > MOST_HELD:
        return None
    better = BETTER if norm else BETTER | PLAIN
    if itemsize == 2 and (n, width) in better:
        warps, registers = better[n, width]
        return Plan(warps, 1, 0, hold=False, registers=registers)
    needed = -(-width * itemsize // 512)
    best, most = None, 0
    for chunks in range(1, min(needed, 3) + 1):
        if most >= ENOUGH or (best and chunks == 3):
            break
        warps = -(-needed // chunks)
        # So many registers a thread likes, by eights; beyond 168 some numbers go to the cache. The
        # warps of a scheduler share a quarter of all of them, and what is over.
        liked = -(-(40 + 10 * n + (chunks - 1) * (24 + 6 * n)) // 8) * 8
        fitting = max(REGISTERS // 4 // (32 * liked), 3)
        registers = REGISTERS // 4 // (32 * fitting) // 8 * 8
        resident = min(4 * fitting // warps, MOST_BLOCKS)
        waiting = resident * (n + 1) * width * itemsize
        if resident > 1 and waiting > most:
            best, most = Plan(warps, 1, 0, hold=False, registers=registers), waiting
    return best


def forward_plan(device: torch.device, what: Problem, norm: bool, ring: bool) -> Plan | None:
    """Teams have the same size with a ring and without: their results have the same bits."""
    free = ringless(what.n, what.width, what.itemsize, norm)
    if free is None:
        return plan_on(device, what)
    return plan_on(device, what, free.warps) if ring else free


def backward_plan(device: torch.device, what: Problem, norm: bool) -> Plan | None:
    """For all modes of memory, whose gradients then have the same bits."""
    cut = plan_on(device, what)
    found = BACKWARD.get((what.n, what.width, norm))
    if cut is None or found is None or what.itemsize != 2:
        return cut
    better = replace(cut, teams=found[0], slots=found[1])
    taken = what.static_bytes(better.warps, better.teams) + what.dynamic_bytes(better)
    return better if taken <= shared_memory(device) else cut
