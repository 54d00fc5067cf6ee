"""Attention pooling written for reading: float32 (or float64) inside, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multigate.numerics import normed, score, weighted_sum, wide


def depth_weights(sources: Sequence[Tensor], query: Tensor, scale: float, eps: float) -> Tensor:
    """alpha [..., m]: softmax over the m sources of scale * query . rms(source)."""
    logits = torch.stack([score(source, query, eps) for source in sources], dim=-1)
    return (logits * scale).softmax(dim=-1)


def depth_pool(
    sources: Sequence[Tensor],
    query: Tensor,
    scale: float,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    widened = [wide(source) for source in sources]
    h = weighted_sum(widened, depth_weights(widened, query, scale, eps))
    return normed(h, norm_weight, eps).to(sources[0].dtype)
