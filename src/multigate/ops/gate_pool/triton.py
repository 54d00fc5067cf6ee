"""The Triton backend of the Multi-Gate step: how the kernels are launched."""

# mypy: disable-error-code="import-untyped"

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from multigate.ops.cuda import multiprocessors

from .saved import saved_numbers
from .triton_kernels import backward_kernel, forward_kernel, total_kernel


@dataclass(frozen=True)
class Launch:
    """How a kernel lies on the machine. Only the order of its sums depends on it."""

    warps: int
    """warps a program: those of all its tokens"""
    programs: int
    """programs a multiprocessor"""
    block: int = 1
    """tokens a program handles at once, a power of two"""
    keep: bool = True
    """hold a token in registers between reduction and sweep; if not, it is read again"""
    hoist: bool = False
    """hold the weights in registers; if not, they are read from the cache for every token"""
    stages: int = 1
    """depth of the software pipeline over tokens; 1 is none"""
    max_registers: int | None = None


EVERY_BLOCK = 1 << 20
"""More programs a multiprocessor than there are blocks of tokens, so that each block has its own.

The machine starts them as others end, and their loads overlap better than those of programs that
walk over the tokens."""


def default_launch(n: int, width: int, itemsize: int, backward: bool) -> Launch:
    """The launch for n streams of a width and a size of their numbers, from what the kernels need.

    Forward, a token is read again for the sweep, out of the cache, and a thread holds little but
    its sums. Backward, a thread holds its channels of every stream and of their gradients, and
    float32 sums of the weight gradients, which bounds the channels it can have without spilling
    registers; `programs` is what the registers leave room for at once, each of which writes its
    share of the weight gradients. A token of one warp needs no exchange through shared memory.
    """
    # Registers are 4 bytes: a thread holds half as many channels of float32.
    half = itemsize // 2
    if backward:
        keep = n <= 8 and (n <= 4 or width <= 2048)
        channels = 16 if n <= 4 else 10 if keep and n <= 8 else 16 if n <= 8 else 8
        warps = _warps(width, channels // half)
        return Launch(warps=warps, programs=max(1, 8 // warps), keep=keep)
    channels = 32 if n <= 4 else 24 if n <= 8 else 8
    return Launch(
        warps=_warps(width, channels // half),
        programs=EVERY_BLOCK,
        keep=False,
        max_registers=128 if n <= 4 else None,
    )


def _warps(width: int, channels: int) -> int:
    """The fewest warps, a power of two up to 16, that give a thread at most so many channels."""
    return min(16, triton.next_power_of_2(triton.cdiv(width, 32 * channels)))


def sections(
    width: int, lanes: int, vector: int, most: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the sections start and how wide they are: powers of two, multiples of `lanes`.

    At best a thread has `vector` channels of a section, one access: more at a time need more
    registers. Sections are wider where there would be more than `most` of them. The last one may
    stand over the width: by a sixteenth of it if that saves sections, by more to keep to `most`.
    """
    units = triton.cdiv(width, lanes)
    units = min(range(units, units * 17 // 16 + 1), key=int.bit_count)
    while units.bit_count() > most:
        units += units & -units
    widths = [lanes << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
    narrow = [part for whole in widths for part in _cut(whole, lanes * vector)]
    if len(narrow) <= most:
        widths = narrow
    starts = [sum(widths[:j]) for j in range(len(widths))]
    return tuple(starts), tuple(widths)


def _cut(whole: int, piece: int) -> list[int]:
    return [piece] * (whole // piece) if whole > piece else [whole]


def _settings(plan: Launch, n: int, width: int, itemsize: int) -> dict[str, Any]:
    lanes = max(1, 32 * plan.warps // plan.block)
    vector = 16 // itemsize
    # Triton's time to compile grows with the cube of the number of loads, that is of n * sections.
    starts, widths = sections(width, lanes, vector, max(1, 20 // n))
    settings = {
        "N": n,
        "C": width,
        "AT": starts,
        "WIDTHS": widths,
        "LANES": lanes,
        "VECTOR": vector,
        "BLOCK": plan.block,
        "STAGES": plan.stages,
        "KEEP": plan.keep,
        "HOIST": plan.hoist,
        "num_warps": plan.warps,
    }
    # Triton's AMD backend knows no such bound.
    if plan.max_registers is not None and torch.version.hip is None:
        settings["maxnreg"] = plan.max_registers
    return settings


def _launch(
    streams: Sequence[Tensor], backward: bool, launch: Mapping[str, Any] | None
) -> tuple[int, dict[str, Any]]:
    """The number of programs, and the constants the kernel is compiled for."""
    first = streams[0]
    tokens, width = first.shape
    on_cpu = first.device.type == "cpu"
    if on_cpu:
        # The interpreter: few programs with many tokens each, for its time goes by operations.
        plan = Launch(warps=4, programs=3, block=16)
    else:
        plan = default_launch(len(streams), width, first.element_size(), backward)
    plan = replace(plan, **(launch or {}))
    programs = plan.programs * (1 if on_cpu else multiprocessors(first.device))
    blocks = triton.cdiv(tokens, plan.block)
    return min(blocks, programs), _settings(plan, len(streams), width, first.element_size())


def forward(
    y: Tensor,
    streams: Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    competitive: bool,
    eps: float,
    launch: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [tokens, C], new streams [tokens, n, C] and `saved` of flattened inputs.

    `streams` are n tensors [tokens, C] with one row stride, their last dimension contiguous.
    `launch` changes fields of the `Launch`.
    """
    first = streams[0]
    n, (tokens, width) = len(streams), first.shape
    h = torch.empty((tokens, width), dtype=first.dtype, device=first.device)
    new_streams = torch.empty((tokens, n, width), dtype=first.dtype, device=first.device)
    saved = torch.empty((tokens, saved_numbers(n)), dtype=torch.float32, device=first.device)
    if tokens == 0:
        return h, new_streams, saved
    y = _rows(y)
    programs, settings = _launch(streams, False, launch)
    forward_kernel[(programs,)](
        y,
        tuple(streams),
        w_gate.contiguous(),
        w_pool.contiguous(),
        bias.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
        h,
        new_streams,
        saved,
        tokens,
        y.stride(0),
        first.stride(0),
        eps,
        COMPETITIVE=competitive,
        NORM=norm_weight is not None,
        SAVED=saved_numbers(n),
        COLUMNS=triton.next_power_of_2(saved_numbers(n)),
        **settings,
    )
    return h, new_streams, saved


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
    launch: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of y, streams (packed), w_gate, w_pool, bias and norm_weight, in their dtypes.

    A gradient of the outputs that is None counts as zeros and is not read.
    """
    first = streams[0]
    n, (tokens, width) = len(streams), first.shape
    weights = [w_gate, w_pool, bias] if norm_weight is None else [w_gate, w_pool, bias, norm_weight]
    if tokens == 0 or (grad_h is None and grad_streams is None):
        dw_gate, dw_pool, dbias, *dnorm = [torch.zeros_like(weight) for weight in weights]
        dstreams = first.new_zeros((tokens, n, width))
        return torch.zeros_like(y), dstreams, dw_gate, dw_pool, dbias, dnorm[0] if dnorm else None
    y = _rows(y)
    dy = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    dstreams = torch.empty((tokens, n, width), dtype=first.dtype, device=first.device)
    programs, settings = _launch(streams, True, launch)
    norm = norm_weight is not None
    size = (2 + norm) * width + bias.numel()
    partials = torch.empty((programs, size), dtype=torch.float32, device=y.device)
    backward_kernel[(programs,)](
        None if grad_h is None else grad_h.contiguous(),
        None if grad_streams is None else grad_streams.contiguous(),
        y,
        tuple(streams),
        w_gate.contiguous(),
        w_pool.contiguous(),
        bias.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
        saved,
        dy,
        dstreams,
        partials,
        tokens,
        y.stride(0),
        first.stride(0),
        eps,
        COMPETITIVE=competitive,
        NORM=norm,
        GRAD_H=grad_h is not None,
        GRAD_STREAMS=grad_streams is not None,
        SAVED=saved_numbers(n),
        **settings,
    )
    dw_gate, dw_pool, dbias, *dnorm = [
        torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights
    ]
    columns = 32
    total_kernel[(triton.cdiv(size, columns),)](
        partials,
        dw_gate,
        dw_pool,
        dnorm[0] if dnorm else None,
        dbias,
        programs,
        C=width,
        BIASES=bias.numel(),
        NORM=norm,
        ROWS=128,
        WIDTH=columns,
        num_warps=8,
    )
    return dy, dstreams, dw_gate, dw_pool, dbias, dnorm[0] if dnorm else None


def _rows(x: Tensor) -> Tensor:
    """`x` with its last dimension contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
