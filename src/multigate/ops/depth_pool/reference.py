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
    """sum_i alpha_i source_i, in the precision of alpha."""
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
    h = weighted_sum(sources, depth_weights(sources, query, scale, eps))
    if norm_weight is not None:
        h = torch.nn.functional.rms_norm(h, h.shape[-1:], wide(norm_weight), eps)
    return h.to(sources[0].dtype)
