"""The operations that an exported model brings along: their references, and no kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multigate.ops.depth_pool.reference import depth_pool as depth_pool_reference
from multigate.ops.gate_pool.reference import gate_pool as gate_pool_reference


def gate_pool(
    y: Tensor,
    streams: Tensor | Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str = "competitive",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Write y [..., D] into streams [..., n, D] (or n of [..., D]), pool the next input."""
    whole = streams if isinstance(streams, Tensor) else torch.stack(list(streams), dim=-2)
    return gate_pool_reference(y, whole, w_gate, w_pool, bias, variant, norm_weight, eps)


def depth_pool(
    sources: Sequence[Tensor],
    query: Tensor,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """sum_i alpha_i source_i with alpha = softmax_i(scale * query . rms(source_i))."""
    return depth_pool_reference(sources, query, scale, norm_weight, eps)
