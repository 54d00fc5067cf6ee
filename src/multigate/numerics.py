"""The arithmetic every method shares: precision, the weight-free RMSNorm score, weighted sums."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """`x` in the precision of all mixing: float32, or float64 if it is that already."""
    return rounded(x, torch.float64 if x.dtype == torch.float64 else torch.float32)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype; itself if it has it already.

    So does `to`, but torch.compile then sees a second tensor, and in torch 2.11 the outputs of an
    autograd.Function that have such a double lose their gradients.
    """
    return x if x.dtype == dtype else x.to(dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension."""
    return torch.rsqrt(wide(x).square().mean(-1) + eps)


def dot(x: Tensor, weight: Tensor) -> Tensor:
    """weight . x over the last dimension."""
    x = wide(x)
    return (x * weight.to(x.dtype)).sum(-1)


def score(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight . rms(x) over the last dimension, with rms(x) = x / sqrt(mean(x^2) + eps).

    The norm multiplies the finished dot product, so that autograd keeps wide(x) and no normalised
    copy of it.
    """
    x = wide(x)
    return dot(x, weight) * inverse_rms(x, eps)


def weighted_sum(rows: Sequence[Tensor], shares: Tensor) -> Tensor:
    """sum_i shares_i row_i, of m rows [..., D] and shares [..., m], not yet rounded."""
    shares = shares.to(wide(rows[0]).dtype)
    total = shares[..., :1] * wide(rows[0])
    for i, row in enumerate(rows[1:], start=1):
        total = torch.addcmul(total, shares[..., i : i + 1], wide(row))
    return total


def normed(h: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """RMSNorm(h) * gain; h itself without a gain."""
    return h if gain is None else F.rms_norm(h, h.shape[-1:], gain.to(h.dtype), eps)


def autocast_is_on(device: str) -> bool:
    """Whether autocast applies on this kind of device; shapes alone ("meta") know no autocast."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """A region in which matrix products keep the dtype of their inputs."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
