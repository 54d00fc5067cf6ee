"""Pooling where no kernel runs and nothing is compiled: the gradient by hand.

Shapes: sources, query gradients and h [..., D]; what is measured [..., m] for m sources.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multigate.numerics import (
    dot,
    inverse_rms,
    normed,
    rounded,
    weighted_sum,
    wide,
    without_autocast,
)
from multigate.ops.rows import (
    first_gradients,
    mixed,
    normed_backward,
    scored_backward,
    softmax_backward,
)

from . import reference

Found = tuple[Tensor | None, ...]


class Pool(torch.autograd.Function):
    """`reference.depth_pool`; its gradients have other roundings than autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        norm_weight: Tensor | None,
        scale: float,
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        ctx.options = (scale, eps)
        with without_autocast(query.device.type):
            w, gain, rows = widened(query, norm_weight, sources)
            roots = torch.stack([inverse_rms(x, eps) for x in rows], dim=-1)
            scores = torch.stack([dot(x, w) for x in rows], dim=-1) * roots * scale
            alpha = scores.softmax(dim=-1)
            h = weighted_sum(rows, alpha)
            ctx.save_for_backward(query, norm_weight, h, roots, scores, alpha, *sources)
            return rounded(normed(h, gain, eps), sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Found:
        query, norm_weight, h, roots, scores, alpha, *sources = ctx.saved_tensors
        scale, eps = ctx.options
        if torch.is_grad_enabled():
            # Somebody wants the gradients of these gradients: autograd knows them.
            found = through_reference(grad, sources, query, norm_weight, scale, eps)
            return (*found[:2], None, None, *found[2:])
        with without_autocast(query.device.type):
            w, gain, rows = widened(query, norm_weight, sources)
            dh, dgain = grad.to(h.dtype), None
            if gain is not None:
                dh, dgain = normed_backward(dh, h, gain, eps)
            dalpha = torch.stack([(dh * x).sum(-1) for x in rows], dim=-1)
            dz = softmax_backward(dalpha, alpha)
            dquery = torch.zeros_like(w)
            dsources = list[Tensor | None]()
            for i, x in enumerate(rows):
                dquery += mixed(x, scale * dz[..., i] * roots[..., i])
                if not ctx.needs_input_grad[4 + i]:
                    dsources.append(None)
                    continue
                dx = scored_backward(dz[..., i], scores[..., i], roots[..., i], x, w, scale)
                dx.addcmul_(alpha[..., i : i + 1], dh)
                dsources.append(rounded(dx, sources[i].dtype))
        if dgain is not None:
            dgain = rounded(dgain, norm_weight.dtype)
        return rounded(dquery, query.dtype), dgain, None, None, *dsources


def widened(
    query: Tensor, norm_weight: Tensor | None, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Everything in the precision of the widest source."""
    dtype = wide(max(sources, key=lambda source: source.dtype.itemsize)).dtype
    gain = None if norm_weight is None else norm_weight.to(dtype)
    return query.to(dtype), gain, [source.to(dtype) for source in sources]


def through_reference(
    grad: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    scale: float,
    eps: float,
) -> Found:
    """The gradients by autograd, which can differentiate them again."""
    with without_autocast(query.device.type):
        h = reference.depth_pool(sources, query, scale, norm_weight, eps)
    return first_gradients([(h, grad)], (query, norm_weight, *sources))
