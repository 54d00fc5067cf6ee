"""RMSNorm with a learned weight: the norm of every sublayer and of the output."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .numerics import wide


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (float64 if x is), returned as x came."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        v = wide(x)
        weight = self.weight.to(v.dtype)
        return F.rms_norm(v, weight.shape, weight, self.eps).to(x.dtype)
