"""Pooling over sources by CUDA kernels, for Hopper and later; `few` and `many` are two kinds."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from multigate.ops import cuda, nvrtc
from multigate.ops.cuda import Plan, pointer

from . import few, many
from .few import Few
from .many import Many
from .plan import saved_rows

FOLDER = Path(__file__).with_name("cuda_kernels")
TAKES = f"cuda takes up to {many.MOST} sources, in rows of whole 16 bytes that fit on the chip"


def problem(count: int, width: int, itemsize: int, backward: bool) -> Few | Many:
    made = few.few if count <= few.MOST else Many
    return made(count, width, itemsize, backward)


def takes(sources: Sequence[Tensor]) -> bool:
    """Whether these kernels do this problem, forward and backward; by sizes and dtype alone.

    The backward pass asks again: what was saved is not laid out as Triton's kernels do it.
    """
    first = sources[0]
    if len(sources) > many.MOST or not cuda.suits(first.dtype, first.shape[1]):
        return False
    largest = problem(len(sources), first.shape[1], first.element_size(), True)
    return largest.plan(cuda.shared_memory(first.device)) is not None


def forward(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    scale: float,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """h [tokens, width] and `saved`, from sources [tokens, width] of one dtype and row stride."""
    sources = cuda.readable(sources)
    first = sources[0]
    tokens, width = first.shape
    h = first.new_empty(first.shape)
    saved = first.new_empty((saved_rows(len(sources)), tokens), dtype=torch.float32)
    if tokens == 0:
        return h, saved
    what = problem(len(sources), width, first.element_size(), False)
    cut = cut or what.plan(cuda.shared_memory(first.device))
    assert cut is not None, "takes() has refused what does not fit"
    kernel, _ = _kernels(first.device, what, first.dtype, cut, norm_weight is not None)
    weights = cuda.weights(query, norm_weight)
    arguments = [
        cuda.rows(sources, what.room),
        *what.told(cut),
        *map(pointer, (*weights, h, saved)),
        ctypes.c_int64(tokens),
        ctypes.c_float(scale),
        ctypes.c_float(eps),
    ]
    kernel.launch(cuda.blocks(tokens, first.device), 32 * cut.warps * cut.teams, arguments)
    return h, saved


def backward(
    grad_h: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    scale: float,
    wanted: Sequence[bool],
    query_wanted: bool = True,
    norm_wanted: bool = True,
    cut: Plan | None = None,
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of the sources that are `wanted`, of the query and of the norm weight."""
    first = sources[0]
    tokens, width = first.shape
    grads = [first.new_empty(first.shape) if want else None for want in wanted]
    dquery, dgain = (first.new_zeros(width, dtype=torch.float32) for _ in range(2))
    if tokens:
        _backward(grad_h, sources, query, norm_weight, saved, scale, grads, dquery, dgain, cut)
    dnorm = dgain.to(norm_weight.dtype) if norm_wanted and norm_weight is not None else None
    return grads, dquery.to(query.dtype) if query_wanted else None, dnorm


def _backward(
    grad_h: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    scale: float,
    grads: Sequence[Tensor | None],
    dquery: Tensor,
    dgain: Tensor,
    cut: Plan | None,
) -> None:
    """Fill in the gradients."""
    sources = cuda.readable(sources)
    first = sources[0]
    tokens, width = first.shape
    what = problem(len(sources), width, first.element_size(), True)
    cut = cut or what.plan(cuda.shared_memory(first.device))
    assert cut is not None, "takes() has refused what does not fit"
    kernel, finish = _kernels(first.device, what, first.dtype, cut, norm_weight is not None)
    blocks = cuda.blocks(tokens, first.device)
    pieces = [(dquery, width)] + ([] if norm_weight is None else [(dgain, width)])
    partials = first.new_empty(blocks, len(pieces) * width, dtype=torch.float32)
    # Copies must live until the launch: they have names.
    ready, weights = cuda.ready(grad_h), cuda.weights(query, norm_weight)
    arguments = [
        cuda.rows(sources, what.room),
        *what.told(cut),
        *map(pointer, (ready, *weights, saved)),
        cuda.rows(grads, what.room),
        pointer(partials),
        ctypes.c_int64(tokens),
        ctypes.c_float(scale),
    ]
    kernel.launch(blocks, 32 * cut.warps * cut.teams, arguments)
    cuda.finish(finish, partials, pieces)


def _kernels(
    device: torch.device, what: Few | Many, dtype: torch.dtype, cut: Plan, norm: bool
) -> tuple[nvrtc.Kernel, nvrtc.Kernel]:
    """The kernel of a pass, and the one that adds up its weight gradients."""
    compiled = what.compiled(cut, cuda.shared_memory(device))
    return _compiled(device, what.parts, what.n, what.width, dtype, norm, *compiled)


@functools.cache
def _compiled(
    device: torch.device,
    parts: tuple[str, ...],
    n: int,
    width: int,
    dtype: torch.dtype,
    norm: bool,
    cut: Plan,
    shared: int,
) -> tuple[nvrtc.Kernel, nvrtc.Kernel]:
    text = cuda.source(FOLDER, *parts)
    module = cuda.compiled(device, text, n, width, dtype, cut, {"NORM": norm})
    name = parts[-1].removesuffix("_many")
    kernel = module.kernel(name, shared)
    return kernel, module.kernel("finish", 0) if name == "backward" else kernel
