"""How long something takes on a device: CUDA-graph replay, CUDA events or the wall clock."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

Call = Callable[[int], Any]
"""Does the work on buffer set i, and returns what it made, so that it is not freed too early."""

GRAPH_US = 2000.0
"""About how long one graph shall run: its launch is then lost in it."""
MOST_SETS = 64
"""Buffer sets at most: ever smaller work comes to lie in the L2 cache, as it does when decoding."""
L2_TIMES = 4
"""The working set is at least so many times the L2 cache."""


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sets_needed(bytes_a_call: int, device: torch.device) -> int:
    """Buffer sets to rotate so that no call finds its data in the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_SETS, max(1, math.ceil(L2_TIMES * cache / bytes_a_call)))


def copy_gb_s(device: torch.device, gib: float = 1.0, repeats: int = 100) -> float:
    """Bytes read and written by a copy of `gib` GiB, in GB a second: the roof of everything."""
    size = int(gib * 2**30)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy(_: int) -> torch.Tensor:
        return target.copy_(source)

    cuda = device.type == "cuda"
    us = events(copy, 1, repeats) if cuda else clock(copy, 1, device, repeats)
    return 2 * size / us / 1e3


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream on which graphs can be captured: the default one is not allowed."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)
    return torch.cuda.stream(torch.cuda.Stream(device))


def poison(tensors: list[torch.Tensor]) -> None:
    """Leave NaN in free memory of the sizes of `tensors`: where the next outputs come to lie."""
    made = [torch.full_like(t, math.nan) for t in tensors if t.is_floating_point()]
    del made


def measure(call: Call, sets: int, device: torch.device, repeats: int = 100) -> tuple[float, str]:
    """The median time of one call in microseconds, and how it was taken.

    "graph": replays of a CUDA graph of many calls; "events": CUDA events around calls, for what a
    graph cannot capture; "clock": the wall clock, on a device without events. At least `repeats`
    calls are timed.
    """
    if device.type != "cuda":
        return clock(call, sets, device, repeats), "clock"
    rough = events(call, sets, max(sets, 3))
    calls = sets * max(1, round(GRAPH_US / rough / sets))
    try:
        return replay(call, sets, calls, repeats), "graph"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A failed capture leaves its error behind: it is not that of the next call.
        with suppress(RuntimeError):
            torch.cuda.synchronize()
    return events(call, sets, repeats), "events"


def clock(call: Call, sets: int, device: torch.device, repeats: int) -> float:
    times = []
    call(0)
    for i in range(repeats):
        wait(device)
        begin = time.perf_counter()
        call(i % sets)
        wait(device)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def events(call: Call, sets: int, repeats: int) -> float:
    """Of single calls, each between two events; Python runs ahead of the device."""
    kept: list[Any] = [None] * sets
    for i in range(3):
        kept[i % sets] = call(i % sets)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for i in range(repeats):
        kept[i % sets] = call(i % sets)
        marks[i + 1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(
        a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)
    )


def replay(call: Call, sets: int, calls: int, repeats: int) -> float:
    """Of one call in a captured graph of `calls`; every set has its own outputs in it."""
    graph = torch.cuda.CUDAGraph()
    kept: list[Any] = [None] * sets
    # The current stream is captured: autograd runs a backward pass on the stream of its forward.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(calls):
            kept[i % sets] = call(i % sets)
    for _ in range(3):
        graph.replay()
    replays = max(20, math.ceil(repeats / calls))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]
    return 1e3 * statistics.median(times) / calls
