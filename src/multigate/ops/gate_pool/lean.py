"""Multi-Gate steps that keep no streams for the backward pass, which hands them on instead.

A *stand-in* is a tensor of the shape of some streams that takes no memory: its gradient is the
streams themselves. A step that needs streams in its backward pass gives out a stand-in for them;
whoever receives it puts them in as its gradient. All of it is functional, so autograd orders the
work and torch.compile sees through it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import passes
from .cuda import Weights

ENTRY = 6
"""Tensors of a step in a block: y, the four weights, and what was saved."""


def stand_in(streams: Tensor) -> Tensor:
    return streams.new_zeros(()).expand(streams.shape)


def handed(streams: Tensor | None, memory: str) -> Tensor:
    """The streams that a stand-in has brought, or one sentence if it has not."""
    if streams is None:
        raise RuntimeError(
            f"memory={memory!r}: a step's backward pass was not given its streams, because the "
            "steps after it were not run or the loss does not depend on them: let it depend on "
            "the last step, or use memory='store'."
        )
    return streams


class Inverted(torch.autograd.Function):
    """A step whose backward pass gets the streams after it and hands on those before it.

    The inputs of the largest gate values, which invert worst, are kept as they are: `keep` in a
    million pairs of token and stream.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        streams: Tensor,
        w_gate: Tensor,
        w_pool: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        before: Tensor | None,
        keep: int,
        variant: str,
        eps: float,
        kernel: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (w_gate, w_pool, bias, norm_weight)
        h, new, saved = passes.forward(y, streams, weights, variant, eps, kernel)
        rows, where = passes.keep(streams, y, saved, keep, kernel)
        ctx.set_materialize_grads(False)
        ctx.options = (variant, eps, kernel)
        ctx.linked = before is not None
        ctx.save_for_backward(y, *weights, saved, rows, where)
        return h, new, stand_in(new)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_h: Tensor | None, grad_new: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        y, *weights, saved, rows, where = ctx.saved_tensors
        after = handed(after, "invert")
        streams, *grads = passes.invert_backward(
            grad_h, grad_new, y, after, tuple(weights), saved, rows, where, *ctx.options
        )
        return (*grads, streams if ctx.linked else None, *[None] * 4)


class Exact(torch.autograd.Function):
    """`Inverted`, with what the inversion loses kept as codes; also returns how much was lost."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        streams: Tensor,
        w_gate: Tensor,
        w_pool: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        before: Tensor | None,
        variant: str,
        eps: float,
        kernel: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights = (w_gate, w_pool, bias, norm_weight)
        options = (variant, eps, kernel)
        h, new, lost, saved, *kept = passes.exact_forward(y, streams, weights, *options)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lost)
        ctx.options = options
        ctx.linked = before is not None
        ctx.save_for_backward(y, *weights, saved, *kept)
        return h, new, stand_in(new), lost

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_h: Tensor | None,
        grad_new: Tensor | None,
        after: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        y, w_gate, w_pool, bias, norm_weight, saved, *kept = ctx.saved_tensors
        after = handed(after, "exact")
        weights = (w_gate, w_pool, bias, norm_weight)
        streams, *grads = passes.exact_backward(
            grad_h, grad_new, y, after, weights, saved, kept, *ctx.options
        )
        return (*grads, streams if ctx.linked else None, *[None] * 3)


class Replayed(torch.autograd.Function):
    """A step of a block whose first streams are kept, and the others made once more.

    The `first` step keeps the streams before it itself, the others give out a stand-in for theirs.
    The last one is given `block`: the kept streams, then y, the four weights and what was saved of
    each of the `steps` before it, then the stand-ins of those but the first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        streams: Tensor,
        w_gate: Tensor,
        w_pool: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None,
        first: bool,
        steps: int,
        variant: str,
        eps: float,
        kernel: str,
        *block: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weights = (w_gate, w_pool, bias, norm_weight)
        h, new, saved = passes.forward(y, streams, weights, variant, eps, kernel)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(saved)
        ctx.options = (variant, eps, kernel)
        ctx.steps, ctx.unused = steps, [None] * (len(block) - max(steps - 1, 0))
        kept = streams if first else None
        ctx.save_for_backward(y, *weights, saved, kept, *block[: 1 + ENTRY * steps])
        return h, new, stand_in(new), saved

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_h: Tensor | None,
        grad_new: Tensor | None,
        before: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        y, w_gate, w_pool, bias, norm_weight, saved, kept, *block = ctx.saved_tensors
        states = replayed(block, ctx.steps, ctx.options)
        if states:
            *states, kept = states
        streams = handed(before if kept is None else kept, "recompute")
        weights = (w_gate, w_pool, bias, norm_weight)
        grads = _gradients(grad_h, grad_new, y, streams, weights, saved, ctx.options)
        return (*grads, *[None] * 5, *ctx.unused, *states)


def replayed(block: list[Tensor], steps: int, options: tuple[str, float, str]) -> list[Tensor]:
    """The streams after each of the first steps of a block."""
    if not steps:
        return []
    streams, *rest = block
    ys, *weights, saved = (rest[i : ENTRY * steps : ENTRY] for i in range(ENTRY))
    return passes.replay(streams, ys, list(zip(*weights, strict=True)), saved, *options)


class Kept(torch.autograd.Function):
    """The streams as they are, kept to be handed to the step before: the end of a chain."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, before: Tensor) -> Tensor:
        ctx.save_for_backward(streams)
        return streams.view_as(streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.saved_tensors[0]


class KeptBlock(torch.autograd.Function):
    """The streams as they are, and the end of a block (see `Replayed`) after its last step."""

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        steps: int,
        variant: str,
        eps: float,
        kernel: str,
        *block: Tensor | None,
    ) -> Tensor:
        ctx.options, ctx.steps = (variant, eps, kernel), steps
        ctx.save_for_backward(*block[: 1 + ENTRY * steps])
        return streams.view_as(streams)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states = replayed(list(ctx.saved_tensors), ctx.steps - 1, ctx.options)
        return (grad, *[None] * (5 + ENTRY * ctx.steps), *states)


def _gradients(
    grad_h: Tensor | None,
    grad_new: Tensor | None,
    y: Tensor,
    streams: Tensor,
    weights: Weights,
    saved: Tensor,
    options: tuple[str, float, str],
) -> tuple[Tensor | None, ...]:
    if grad_h is None and grad_new is None:
        return (None,) * 6
    return passes.backward(grad_h, grad_new, y, streams, weights, saved, *options)
