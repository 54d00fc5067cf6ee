"""Sinkhorn's iteration as torch.library operators, which autograd and torch.compile understand.

Triton is imported when it first runs, so this file does not need it.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("multigate::sinkhorn", mutates_args=())
def fused(logits: Tensor, steps: int, eps: float) -> Tensor:
    """The matrices of logits [..., n, n]."""
    from . import triton

    with torch.cuda.device_of(logits):
        return triton.forward(_flat(logits), steps, eps).view(logits.shape)


@torch.library.custom_op("multigate::sinkhorn_backward", mutates_args=())
def fused_backward(grad: Tensor, logits: Tensor, steps: int, eps: float) -> Tensor:
    """The gradient of the logits."""
    from . import triton

    with torch.cuda.device_of(logits):
        found = triton.backward(_flat(grad), _flat(logits), steps, eps)
    return found.view(logits.shape)


@fused.register_fake
def _(logits: Tensor, steps: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


@fused_backward.register_fake
def _(grad: Tensor, logits: Tensor, steps: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *ctx.options = inputs
    ctx.save_for_backward(logits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return fused_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


fused.register_autograd(_backward, setup_context=_setup_context)


def _flat(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:]).contiguous()
