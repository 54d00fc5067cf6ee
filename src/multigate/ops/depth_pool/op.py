"""The fused depth_pool as torch.library operators, which autograd and torch.compile understand.

Triton is imported when it first runs, so this file does not need it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigate.ops.backend import instead

from . import cuda
from .plan import saved_rows


@torch.library.custom_op("multigate::depth_pool", mutates_args=())
def fused(
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    scale: float,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """h as `depth_pool` returns it, and what the backward pass needs of each token."""
    rows = _rows(sources)
    with torch.cuda.device_of(sources[0]):
        kernels = _kernels(backend, rows)
        h, saved = kernels.forward(rows, *_weights(query, norm_weight), scale, eps)
    return h.view(sources[0].shape), saved


@fused.register_fake
def _(
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    scale: float,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    first = sources[0]
    tokens = math.prod(first.shape[:-1])
    saved = first.new_empty((saved_rows(len(sources)), tokens), dtype=torch.float32)
    return first.new_empty(first.shape), saved


@torch.library.custom_op("multigate::depth_pool_backward", mutates_args=())
def fused_backward(
    grad_h: Tensor,
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    scale: float,
    wanted: list[bool],
    backend: str,
) -> list[Tensor]:
    """The gradients that are `wanted` of (*sources, query, norm_weight), without gaps."""
    rows, weights = _rows(sources), _weights(query, norm_weight)
    with torch.cuda.device_of(grad_h):
        grads, dquery, dnorm = _kernels(backend, rows).backward(
            grad_h.reshape(-1, grad_h.shape[-1]),
            rows,
            *weights,
            saved,
            scale,
            wanted[:-2],
            query_wanted=wanted[-2],
            norm_wanted=wanted[-1],
        )
    dsources = [grad.view(grad_h.shape) for grad in grads if grad is not None]
    return [*dsources, *(grad for grad in (dquery, dnorm) if grad is not None)]


@fused_backward.register_fake
def _(
    grad_h: Tensor,
    sources: list[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    scale: float,
    wanted: list[bool],
    backend: str,
) -> list[Tensor]:
    inputs = [*sources, query, norm_weight]
    return [
        tensor.new_empty(tensor.shape)
        for tensor, want in zip(inputs, wanted, strict=True)
        if want and tensor is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    sources, query, norm_weight, ctx.scale, _, ctx.backend = inputs
    ctx.save_for_backward(*sources, query, norm_weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_h: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *sources, query, norm_weight, saved = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[1:3]]
    if grad_h is None:
        return [None] * len(sources), None, None, None, None, None
    found = iter(
        fused_backward(grad_h, sources, query, norm_weight, saved, ctx.scale, wanted, ctx.backend)
    )
    *dsources, dquery, dnorm = [next(found) if want else None for want in wanted]
    return dsources, dquery, dnorm, None, None, None


fused.register_autograd(_backward, setup_context=_setup_context)


def _kernels(backend: str, sources: Sequence[Tensor]) -> Any:
    """The module whose `forward` and `backward` run; Triton does what CUDA's does not take."""
    if backend == "cuda":
        if cuda.takes(sources):
            return cuda
        instead("depth_pool", cuda.TAKES)
    from . import triton

    return triton


def _rows(sources: Sequence[Tensor]) -> list[Tensor]:
    """The sources as [tokens, width], all with the same row stride."""
    rows = [source.reshape(-1, source.shape[-1]) for source in sources]
    if all(row.stride() == (rows[0].stride(0), 1) for row in rows):
        return rows
    return [row.contiguous() for row in rows]


def _weights(query: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return query.contiguous(), None if norm_weight is None else norm_weight.contiguous()
