"""Attention pooling written for reading: float32 (or float64) inside, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multigate.numerics import score, wide


def depth_weights(sources: Sequence[Tensor], query: Tensor, scale: float, eps: float) -> Tensor:
    """alpha [..., m]: softmax over the m sources of scale * query . rms(source)."""
    logits = torch.stack([score(source, query, eps) for source in sources], dim=-1)
    return (logits * scale).softmax(dim=-1)


def weighted_sum(sources: Sequence[Tensor], alpha: Tensor) -> Tensor:
    """sum_i alpha_i source_i, not yet rounded to the dtype of the sources."""
    alpha = alpha.to(wide(sources[0]).dtype)
    total = alpha[..., :1] * wide(sources[0])
    for i, source in enumerate(sources[1:], start=1):
        total = total + alpha[..., i : i + 1] * wide(source)
    return total


def depth_pool(
    sources: Sequence[Tensor],
    query: Tensor,
    scale: float,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    widened = [wide(source) for source in sources]
    h = weighted_sum(widened, depth_weights(widened, query, scale, eps))
    if norm_weight is not None:
        h = torch.nn.functional.rms_norm(h, h.shape[-1:], norm_weight.to(h.dtype), eps)
    return h.to(sources[0].dtype)
