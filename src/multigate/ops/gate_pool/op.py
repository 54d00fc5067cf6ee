"""The fused gate_pool as torch.library operators, which autograd and torch.compile understand.

The streams come packed, as one tensor [..., n, D] in a list, or as n tensors [..., D]. How many
numbers of a token are saved is an argument, because what torch.compile has kept of an earlier
version is found again by an operator's name and arguments.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigate.ops.backend import instead

from . import cuda, reference
from .saved import saved_gates, saved_numbers


@torch.library.custom_op("multigate::gate_pool", mutates_args=())
def fused(
    y: Tensor,
    streams: list[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    competitive: bool,
    eps: float,
    backend: str,
    numbers: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """h and the new streams as `gate_pool` returns them, and what is saved: `saved_numbers`."""
    rows, streams_of = flat_rows(y), flat_streams(y, streams)
    weights = flat_weights(w_gate, w_pool, bias, norm_weight)
    with torch.cuda.device_of(y):
        kernels = _kernels(backend, rows, streams_of)
        h, new, saved = kernels.forward(rows, streams_of, *weights, competitive, eps)
    return h.view(y.shape), new.view(*y.shape[:-1], *new.shape[1:]), saved


@fused.register_fake
def _(y: Tensor, streams: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, bias, _, competitive, *_, numbers = rest
    packed = (*y.shape[:-1], bias.shape[0] - int(competitive), y.shape[-1])
    saved = y.new_empty((math.prod(y.shape[:-1]), numbers), dtype=torch.float32)
    return streams[0].new_empty(y.shape), streams[0].new_empty(packed), saved


@torch.library.custom_op("multigate::gate_pool_backward", mutates_args=())
def fused_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    streams: list[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    competitive: bool,
    eps: float,
    backend: str,
) -> list[Tensor]:
    """The gradients of y, the streams (packed), w_gate, w_pool, bias and, if given, norm_weight."""
    rows, streams_of = flat_rows(y), flat_streams(y, streams)
    weights = flat_weights(w_gate, w_pool, bias, norm_weight)
    n, width = len(streams_of), y.shape[-1]
    if grad_h is not None:
        grad_h = flat_rows(grad_h)
    if grad_streams is not None:
        grad_streams = grad_streams.reshape(-1, n, width).contiguous()
    with torch.cuda.device_of(y):
        kernels = _kernels(backend, rows, streams_of)
        dy, dstreams, *dweights = kernels.backward(
            grad_h, grad_streams, rows, streams_of, *weights, saved, competitive, eps
        )
    given = (w_gate, w_pool, bias, norm_weight)
    return [
        dy.view(y.shape),
        dstreams.view(*y.shape[:-1], n, width),
        *in_dtypes(dweights, given),
    ]


@fused_backward.register_fake
def _(
    grad_h: Tensor | None, grad_streams: Tensor | None, y: Tensor, streams: list[Tensor], *rest: Any
) -> list[Tensor]:
    *weights, _, competitive, _, _ = rest
    packed = (*y.shape[:-1], weights[2].shape[0] - int(competitive), y.shape[-1])
    given = [w for w in weights if w is not None]
    return [y.new_empty(y.shape), streams[0].new_empty(packed), *map(torch.empty_like, given)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, streams, w_gate, w_pool, bias, norm_weight, *ctx.options, _ = inputs
    ctx.save_for_backward(y, w_gate, w_pool, bias, norm_weight, output[2], *streams)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_h: Tensor | None, grad_streams: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    y, w_gate, w_pool, bias, norm_weight, saved, *streams = ctx.saved_tensors
    if grad_h is None and grad_streams is None:
        return None, [None] * len(streams), *[None] * 8
    dy, dstreams, dw_gate, dw_pool, dbias, *dnorm = fused_backward(
        grad_h, grad_streams, y, streams, w_gate, w_pool, bias, norm_weight, saved, *ctx.options
    )
    per_stream = [dstreams] if _packed(y, streams) else list(dstreams.unbind(-2))
    return dy, per_stream, dw_gate, dw_pool, dbias, dnorm[0] if dnorm else None, *[None] * 4


fused.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("multigate::gate_pool_replay", mutates_args=())
def fused_replay(
    streams: Tensor,
    ys: list[Tensor],
    w_gates: list[Tensor],
    w_pools: list[Tensor],
    biases: list[Tensor],
    norm_weights: list[Tensor | None],
    saved: list[Tensor],
    competitive: bool,
    eps: float,
    backend: str,
) -> list[Tensor]:
    """The streams after each of several steps once more, the same to the bit.

    An operator of its own: torch.compile would merge it with the first time, and keep the streams.
    """
    rows, shape = [flat_rows(y) for y in ys], streams.shape
    packed = streams.reshape(-1, *shape[-2:]).contiguous()
    each = packed.unbind(1)
    # Every output: one of another dtype has been Triton's.
    if backend == "cuda" and all(cuda.takes(y, each) for y in rows):
        with torch.cuda.device_of(streams):
            states = cuda.replay(packed, rows, saved)
        return [state.view(shape) for state in states]
    states, options = [], (competitive, eps, backend, saved_numbers(shape[-2]))
    for y, *weights in zip(ys, w_gates, w_pools, biases, norm_weights, strict=True):
        _, streams, _ = fused(y, [streams], *weights, *options)
        states.append(streams)
    return states


@fused_replay.register_fake
def _(streams: Tensor, ys: list[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(streams, memory_format=torch.contiguous_format) for _ in ys]


@torch.library.custom_op("multigate::gate_pool_keep", mutates_args=())
def fused_keep(streams: Tensor, saved: Tensor, millionths: int) -> tuple[Tensor, Tensor]:
    """Of streams that the CUDA kernels take, those of the largest gates of a step: `cuda.keep`."""
    packed = streams.reshape(-1, *streams.shape[-2:]).contiguous()
    with torch.cuda.device_of(streams):
        return cuda.keep(packed.unbind(1), saved, millionths)


@fused_keep.register_fake
def _(streams: Tensor, saved: Tensor, millionths: int) -> tuple[Tensor, Tensor]:
    n, width = streams.shape[-2:]
    rows = cuda.kept_rows(saved.shape[0], n, millionths)
    places = streams.new_empty((saved.shape[0], n), dtype=torch.int32)
    return streams.new_empty((rows, width)), places


@torch.library.custom_op("multigate::gate_pool_invert_backward", mutates_args=())
def fused_invert_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    kept: Tensor,
    where: Tensor,
    competitive: bool,
    eps: float,
    backend: str,
) -> list[Tensor]:
    """The streams before the step, from those after it, then what `fused_backward` gives.

    `where` is of `fused_keep`, in int32, or of `passes.largest`, in int64.
    """
    given = (w_gate, w_pool, bias, norm_weight)
    n, width = new_streams.shape[-2:]
    if where.dtype != torch.int32:
        beta = saved_gates(saved, n).view(*y.shape[:-1], n)
        old = reference.unlerp(new_streams, y, beta).reshape(-1, width)
        old = old.index_copy_(0, where, kept).view(new_streams.shape)
        options = (saved, competitive, eps, backend)
        return [old, *fused_backward(grad_h, grad_streams, y, [old], *given, *options)]
    with torch.cuda.device_of(y):
        old, (dy, dstreams, *dweights) = cuda.invert_backward(
            None if grad_h is None else flat_rows(grad_h),
            None if grad_streams is None else grad_streams.reshape(-1, n, width).contiguous(),
            flat_rows(y),
            flat_streams(y, [new_streams]),
            flat_weights(*given),
            saved,
            kept,
            where,
            competitive,
            eps,
        )
    found = in_dtypes(dweights, given)
    shape = new_streams.shape
    return [old.view(shape), dy.view(y.shape), dstreams.view(shape), *found]


@fused_invert_backward.register_fake
def inverted_shapes(
    grad_h: Tensor | None, grad_streams: Tensor | None, y: Tensor, new_streams: Tensor, *rest: Any
) -> list[Tensor]:
    """Of the streams before a step, then the gradients of y, the streams and the weights given."""
    given = [w for w in rest[:4] if w is not None]
    packed = [new_streams.new_empty(new_streams.shape) for _ in range(2)]
    return [packed[0], y.new_empty(y.shape), packed[1], *map(torch.empty_like, given)]


def _kernels(backend: str, y: Tensor, streams: Sequence[Tensor]) -> Any:
    """The module whose `forward` and `backward` run; Triton does what CUDA's does not take."""
    if backend == "cuda":
        if cuda.takes(y, streams):
            return cuda
        instead("gate_pool", cuda.TAKES)
    from . import triton

    return triton


def _packed(y: Tensor, streams: Sequence[Tensor]) -> bool:
    return streams[0].ndim > y.ndim


def flat_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def flat_streams(y: Tensor, streams: Sequence[Tensor]) -> Sequence[Tensor]:
    """n tensors [tokens, D] with one row stride."""
    if _packed(y, streams):
        return streams[0].reshape(-1, *streams[0].shape[-2:]).contiguous().unbind(1)
    return [flat_rows(s) for s in streams]


def flat_weights(
    w_gate: Tensor, w_pool: Tensor, bias: Tensor, norm_weight: Tensor | None
) -> cuda.Weights:
    return (
        w_gate.float().contiguous(),
        w_pool.float().contiguous(),
        bias.float().contiguous(),
        None if norm_weight is None else norm_weight.float().contiguous(),
    )


def in_dtypes(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients of the weights that there are, in their dtypes."""
    pairs = zip(found, given, strict=True)
    return [d.to(w.dtype) for d, w in pairs if d is not None and w is not None]
