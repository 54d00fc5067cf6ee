"""The Multi-Gate step written for reading: float32 (or float64) inside, rounded once at the end.

Shapes: y [..., D], streams [..., n, D], beta and alpha [..., n].
"""

import torch
from torch import Tensor

from multigate.numerics import normed, rounded, score, weighted_sum, wide

VARIANTS = ("independent", "competitive")


def gate(streams: Tensor, weight: Tensor, bias: Tensor, variant: str, eps: float) -> Tensor:
    """beta: how far each stream moves towards the sublayer's output.

    z_i = weight . rms(s_i) / sqrt(D) + b_i;  independent: beta_i = sigmoid(z_i);
    competitive: beta = softmax([b_0, z_1 .. z_n]) without its entry 0, the carry logit.
    """
    z = score(streams, weight, eps) * streams.shape[-1] ** -0.5
    return opened(z, bias, variant)[..., -streams.shape[-2] :]


def opened(z: Tensor, bias: Tensor, variant: str) -> Tensor:
    """beta from the scores of the streams, to which the bias is still to be added; before it the
    competitive gate's carry."""
    if variant == "independent":
        return (z + bias.to(z.dtype)).sigmoid()
    carry = torch.zeros_like(z[..., :1])
    return (torch.cat([carry, z], dim=-1) + bias.to(z.dtype)).softmax(dim=-1)


def lerp(y: Tensor, streams: Tensor, beta: Tensor) -> Tensor:
    """s_i + beta_i (y - s_i), not yet rounded to the dtype of the streams."""
    old = wide(streams)
    return torch.lerp(old, y.to(old.dtype).unsqueeze(-2), beta.unsqueeze(-1))


def unlerp(new_streams: Tensor, y: Tensor, beta: Tensor) -> Tensor:
    """The streams before a lerp, (s' - beta y) / (1 - beta), rounded to the dtype of the streams.

    Where 1 - beta is no more than the rounding of s', nothing of s is left in it but noise, and s'
    stands in its place.
    """
    beta = beta.unsqueeze(-1)
    rest = 1 - beta
    mixed = wide(new_streams) - beta * y.to(beta.dtype).unsqueeze(-2)
    nothing = rest <= torch.finfo(new_streams.dtype).eps
    return torch.where(nothing, wide(new_streams), mixed / rest).to(new_streams.dtype)


def pool_weights(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """alpha = softmax_i( weight . rms(s_i) / sqrt(D) )."""
    return (score(streams, weight, eps) * streams.shape[-1] ** -0.5).softmax(dim=-1)


def pool(
    streams: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """h = sum_i alpha_i s_i (then RMSNorm(h) * norm_weight if one is given), and alpha."""
    streams = wide(streams)
    alpha = pool_weights(streams, weight, eps)
    h = weighted_sum(streams.unbind(-2), alpha)
    return normed(h, norm_weight, eps), alpha


def step(
    y: Tensor,
    streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """h, the new streams and beta.

    The pool reads the new streams before they are rounded: one definition for every backend.
    """
    beta = gate(streams, w_gate, bias, variant, eps)
    new_streams = lerp(y, streams, beta)
    h, _ = pool(new_streams, w_pool, norm_weight, eps)
    return rounded(h, streams.dtype), rounded(new_streams, streams.dtype), beta


def gate_pool(
    y: Tensor,
    streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """h and the new streams."""
    h, new_streams, _ = step(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)
    return h, new_streams
