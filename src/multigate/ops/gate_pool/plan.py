"""How the CUDA kernels of the Multi-Gate step cut up their work."""

import functools

import torch
from torch import Tensor

from multigate.ops.cuda import Plan, Problem, plan_on

from .saved import saved_numbers

REGISTERS = 65536
"""Of a multiprocessor."""
MOST_HELD = 8
"""Streams of which a thread holds its chunks in registers."""
ENOUGH = 52 * 1024
"""Bytes a multiprocessor should wait for."""


def problem(n: int, width: int, itemsize: int, *gradients: Tensor | None) -> Problem:
    """Of the forward pass, or, with the two gradients of its outputs, of the backward pass."""
    if not gradients:
        return Problem(n, width, itemsize, n + 1, 4 * n + 2, False)
    grad_h, grad_streams = (g is not None for g in gradients)
    rows = n + 1 + n * grad_streams + grad_h
    return Problem(n, width, itemsize, rows, 4 * n + 2, True, saved=saved_numbers(n))


@functools.cache
def ringless(n: int, width: int, itemsize: int) -> Plan | None:
    """A cut of the forward pass that was fast on an H200; None where a ring is better.

    The fewest chunks of a row a thread with which a multiprocessor, that has at least two blocks,
    waits for enough bytes; else those with which it waits for the most.
    """
    if n > MOST_HELD:
        return None
    needed = -(-width * itemsize // 512)
    best, most = None, 0
    for chunks in range(1, min(needed, 3) + 1):
        warps = -(-needed // chunks)
        teams = 2 if warps == 1 else 1
        # So many a thread needs, by eights; with fewer than it would like, some numbers go to the
        # cache. A quarter of all of them belongs to each scheduler.
        registers = min(-(-(32 + 10 * n + (chunks - 1) * (22 + 6 * n)) // 8) * 8, 168)
        fitting = 4 * (REGISTERS // 4 // (32 * registers))
        resident = fitting // (warps * teams)
        waiting = resident * teams * (n + 1) * width * itemsize
        if resident > 1 and waiting > most:
            best, most = Plan(warps, teams, 0, hold=False, registers=registers), waiting
        if most >= ENOUGH:
            break
    return best


def forward_plan(device: torch.device, what: Problem, ring: bool) -> Plan | None:
    """Teams have the same size with a ring and without: their results have the same bits."""
    free = ringless(what.n, what.width, what.itemsize)
    if free is None:
        return plan_on(device, what)
    return plan_on(device, what, free.warps) if ring else free
