"""The Multi-Gate step by CUDA kernels, for Hopper and later."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from multigate.ops import cuda, nvrtc
from multigate.ops.backend import at_trace_time
from multigate.ops.cuda import Plan, Problem, pointer

from .plan import backward_plan, forward_plan, problem
from .saved import saved_numbers

FOLDER = Path(__file__).with_name("cuda_kernels")
MOST_STEPS = 8
"""Steps that one launch replays: a thread holds a chunk of the output of each."""
MOST_WARPS = 16
"""Of a block that replays."""
ANY_GATE = {"COMPETITIVE": 0}
"""For kernels that read the gates, and do not make them."""
GROUP = 2048
"""The most pairs of token and stream among which the largest gates are looked for."""
TAKES = "cuda takes y and streams of one dtype, in rows of whole 16 bytes that fit on the chip"


def takes(y: Tensor, streams: Sequence[Tensor], device: torch.device | None = None) -> bool:
    """Whether these kernels do this problem, forward and backward; by sizes and dtypes alone."""
    if y.dtype != streams[0].dtype or not cuda.suits(y.dtype, y.shape[1]):
        return False
    largest = problem(len(streams), y.shape[1], y.element_size(), y, y)
    return cuda.plan_on(device or y.device, largest) is not None


@at_trace_time
def fits(device: str, index: int | None, n: int, width: int, dtype: str) -> bool:
    """`takes`, asked at trace time, so in words and numbers."""
    y = torch.empty(0, width, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return takes(y, [y] * n, torch.device(device, index or 0))


class Codes(ctypes.Structure):
    """codes.cu's: what puts inverted streams right, or nulls."""

    _fields_ = (("at", ctypes.c_uint64 * 4), ("room", ctypes.c_int))


Weights = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""w_gate, w_pool, bias and the norm's weight."""
Exact = tuple[Tensor, Tensor, Tensor]
"""Codes [tokens, n, chunks], places of the groups, and the list."""


def codes_fit(n: int, dtype: torch.dtype) -> bool:
    """Whether the kernels make codes of so many streams: a thread has a bit for each element."""
    return dtype in cuda.DTYPES and n * (16 // dtype.itemsize) <= 64


def forward(
    y: Tensor,
    streams: Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [tokens, C], new streams [tokens, n, C] and what is saved, of flattened inputs."""
    weights = (w_gate, w_pool, bias, norm_weight)
    return _forward(y, streams, weights, competitive, eps, cut, None, None)


def exact_forward(
    y: Tensor,
    streams: Sequence[Tensor],
    weights: Weights,
    competitive: bool,
    eps: float,
    room: int,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Exact, Tensor]:
    """What `forward` gives, what brings the streams back, with a list of `room` elements; the
    number of elements of each block that found no room in it."""
    n, (tokens, width) = len(streams), y.shape
    chunk = 16 // y.element_size()
    bits = torch.uint8 if chunk == 4 else torch.int16
    exact = (
        y.new_empty((tokens, n, width // chunk), dtype=bits),
        y.new_empty((tokens, -(-width // (32 * chunk))), dtype=torch.int32),
        y.new_empty(room),
    )
    lost = torch.zeros(max(1, cuda.blocks(tokens, y.device)), dtype=torch.int32, device=y.device)
    h, new, saved = _forward(y, streams, weights, competitive, eps, cut, exact, lost)
    return h, new, saved, exact, lost


def _forward(
    y: Tensor,
    streams: Sequence[Tensor],
    weights: Weights,
    competitive: bool,
    eps: float,
    cut: Plan | None,
    exact: Exact | None,
    lost: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    y, streams = cuda.ready(y), cuda.readable(streams)
    n, (tokens, width) = len(streams), y.shape
    h = torch.empty_like(y)
    new_streams = y.new_empty(tokens, n, width)
    saved = y.new_empty(tokens, saved_numbers(n), dtype=torch.float32)
    if tokens == 0:
        return h, new_streams, saved
    what = problem(n, width, y.element_size())
    norm = weights[3] is not None
    cut = cut or forward_plan(y.device, what, norm, ring=exact is not None)
    assert cut is not None, "takes() has refused what does not fit"
    switches = (competitive, norm, False, False, False, exact is not None)
    kernel, _ = _kernels(y.device, what, y.dtype, cut, switches)
    ready = cuda.weights(*weights)
    blocks = cuda.blocks(tokens, y.device) if cut.slots else -(-tokens // cut.teams)
    arguments = [
        cuda.rows(streams),
        *map(pointer, (y, *ready, h, new_streams, saved)),
        _codes(exact, lost, blocks),
        ctypes.c_int64(tokens),
        ctypes.c_float(eps),
    ]
    kernel.launch(blocks, 32 * cut.warps * cut.teams, arguments)
    return h, new_streams, saved


def _codes(exact: Exact | None, lost: Tensor | None, blocks: int) -> Codes:
    if exact is None:
        return Codes()
    tensors = (*exact, lost)
    at = (ctypes.c_uint64 * 4)(*(0 if t is None else t.data_ptr() for t in tensors))
    return Codes(at, exact[2].numel() // blocks)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of y, the streams (packed) and, in float32, the weights."""


def backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    streams: Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> Gradients:
    weights = (w_gate, w_pool, bias, norm_weight)
    call = (saved, competitive, eps, cut)
    return _backward(grad_h, grad_streams, y, streams, weights, *call)


def invert_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Sequence[Tensor],
    weights: Weights,
    saved: Tensor,
    kept: Tensor,
    places: Tensor,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Gradients]:
    """The streams before the step (packed), made of those after it, and the gradients.

    places [tokens, n], int32: the row of `kept` that a stream was, or -1 where it is inverted.
    """
    old = y.new_empty(len(y), len(new_streams), y.shape[1])
    kept, call = cuda.ready(kept), (saved, competitive, eps, cut)
    found = _backward(grad_h, grad_streams, y, new_streams, weights, *call, old, kept, places)
    return old, found


def exact_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Sequence[Tensor],
    weights: Weights,
    saved: Tensor,
    exact: Exact,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Gradients]:
    """`invert_backward` with streams that are put right by what `exact_forward` has kept."""
    old = y.new_empty(len(y), len(new_streams), y.shape[1])
    call = (saved, competitive, eps, cut, old, None, None, exact)
    return old, _backward(grad_h, grad_streams, y, new_streams, weights, *call)


def _backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    streams: Sequence[Tensor],
    weights: Weights,
    saved: Tensor,
    competitive: bool,
    eps: float,
    cut: Plan | None,
    old: Tensor | None = None,
    kept: Tensor | None = None,
    places: Tensor | None = None,
    exact: Exact | None = None,
) -> Gradients:
    """The gradients; with `old`, from streams after the step, and those before it go there."""
    y, streams = cuda.ready(y), cuda.readable(streams)
    *_, bias, norm_weight = weights
    n, (tokens, width) = len(streams), y.shape
    dy = torch.empty_like(y)
    dstreams = y.new_empty(tokens, n, width)
    sums = [y.new_empty(k, dtype=torch.float32) for k in (width, width, len(bias), width)]
    dw_gate, dw_pool, dbias = sums[:3]
    dnorm = None if norm_weight is None else sums[3]
    if tokens == 0:
        torch._foreach_zero_(sums)
        return dy, dstreams, dw_gate, dw_pool, dbias, dnorm
    what = problem(n, width, y.element_size(), grad_h, grad_streams)
    cut = cut or backward_plan(y.device, what, norm_weight is not None)
    assert cut is not None, "takes() has refused what does not fit"
    given = (norm_weight is not None, grad_streams is not None, grad_h is not None)
    switches = (competitive, *given, old is not None, exact is not None)
    kernel, finish = _kernels(y.device, what, y.dtype, cut, switches)
    blocks = cuda.blocks(tokens, y.device)
    pieces = [(dw_gate, width), (dw_pool, width), (dbias, len(bias))]
    if dnorm is not None:
        pieces.append((dnorm, width))
    columns = sum(size for _, size in pieces)
    partials = y.new_empty(blocks, columns, dtype=torch.float32)
    # Copies must live until the launch: they have names.
    grads = [None if g is None else cuda.ready(g) for g in (grad_streams, grad_h)]
    ready = cuda.weights(weights[0], weights[1], norm_weight)
    outputs = (dstreams, dy, partials)
    arguments = [
        cuda.rows(streams),
        *map(pointer, (y, *grads, *ready, saved, *outputs, kept, places)),
        _codes(exact, None, blocks),
        pointer(old),
        ctypes.c_int64(tokens),
        ctypes.c_float(eps),
    ]
    kernel.launch(blocks, 32 * cut.warps * cut.teams, arguments)
    cuda.finish(finish, partials, pieces)
    return dy, dstreams, dw_gate, dw_pool, dbias, dnorm


def keep(streams: Sequence[Tensor], saved: Tensor, millionths: int) -> tuple[Tensor, Tensor]:
    """Streams before a step, those of the largest gates of every group, as rows; for each token and
    stream [tokens, n] its row, or -1; see keep.cu."""
    streams = cuda.readable(streams)
    n, (tokens, width) = len(streams), streams[0].shape
    groups, count = _groups(tokens, n, millionths)
    kept = streams[0].new_empty(groups * count, width)
    places = streams[0].new_empty((tokens, n), dtype=torch.int32)
    if tokens:
        what = problem(n, width, kept.element_size())
        kernel, threads = _keeping(kept.device, what, kept.dtype)
        arguments = [
            cuda.rows(streams),
            *map(pointer, (saved, kept, places)),
            ctypes.c_int64(tokens),
            ctypes.c_int(count),
        ]
        kernel.launch(groups, threads, arguments)
    return kept, places


def kept_rows(tokens: int, n: int, millionths: int) -> int:
    groups, count = _groups(tokens, n, millionths)
    return groups * count


def _groups(tokens: int, n: int, millionths: int) -> tuple[int, int]:
    """How many groups there are, of whole tokens, and how many streams each of them keeps."""
    group = GROUP // n
    return -(-tokens // group), -(-group * n * millionths // 1_000_000)


@functools.cache
def _keeping(device: torch.device, what: Problem, dtype: torch.dtype) -> tuple[nvrtc.Kernel, int]:
    """The kernel that finds the largest gates, and the threads of a block."""
    cut = Plan(8, 1, -(-what.width * what.itemsize // (8 * 512)), hold=False)
    text = cuda.source(FOLDER, "step", "keep")
    module = cuda.compiled(device, text, what.n, what.width, dtype, cut, ANY_GATE)
    return module.kernel("keep", 0), 32 * cut.warps


def replay(streams: Tensor, ys: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor]:
    """The streams [tokens, n, C] after each step, from those before the first; see replay.cu."""
    if len(ys) > MOST_STEPS:
        states = replay(streams, ys[:MOST_STEPS], saved[:MOST_STEPS])
        return states + replay(states[-1], ys[MOST_STEPS:], saved[MOST_STEPS:])
    (tokens, n, width), steps = streams.shape, len(ys)
    states = [streams.new_empty(streams.shape) for _ in ys]
    if tokens == 0:
        return states
    what = problem(n, width, streams.element_size())
    kernel, threads = _replaying(streams.device, what, streams.dtype, steps)
    # Copies must live until the launch: they have names.
    streams, ys = cuda.ready(streams), [cuda.ready(y) for y in ys]
    at = [t.data_ptr() for t in (*ys, *saved, *states)]
    chain = (ctypes.c_uint64 * len(at))(*at)
    kernel.launch(tokens, threads, [cuda.rows(streams.unbind(1)), chain])
    return states


@functools.cache
def _replaying(
    device: torch.device, what: Problem, dtype: torch.dtype, steps: int
) -> tuple[nvrtc.Kernel, int]:
    """The kernel that goes through so many steps, and the threads of a block."""
    needed = -(-what.width * what.itemsize // 512)
    slabs = -(-needed // MOST_WARPS)
    cut = Plan(-(-needed // slabs), 1, slabs, hold=False)
    text = cuda.source(FOLDER, "step", "replay")
    switches = {**ANY_GATE, "STEPS": steps}
    module = cuda.compiled(device, text, what.n, what.width, dtype, cut, switches)
    return module.kernel("replay", 0), 32 * cut.warps


@functools.cache
def _kernels(
    device: torch.device,
    what: Problem,
    dtype: torch.dtype,
    cut: Plan,
    switches: tuple[bool, ...],
) -> tuple[nvrtc.Kernel, nvrtc.Kernel]:
    """The kernel of a pass, and the one that adds up its weight gradients."""
    name = "backward" if what.backward else "forward"
    names = ("COMPETITIVE", "NORM", "GRAD_STREAMS", "GRAD_H", "INVERT", "EXACT")
    text = cuda.source(FOLDER, "step", "codes", name)
    module = cuda.compiled(
        device, text, what.n, what.width, dtype, cut, dict(zip(names, switches, strict=True))
    )
    kernel = module.kernel(name, what.dynamic_bytes(cut))
    return kernel, module.kernel("finish", 0) if what.backward else kernel
