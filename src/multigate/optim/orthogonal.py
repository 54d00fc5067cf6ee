"""Orthogonalisation by a few matrix products: U S V^T becomes U f(S) V^T with f(s) near 1.

    X <- X / (safety |X|_F + eps),    then five times    X <- a X + (b A + c A^2) X,  A = X X^T

The singular vectors stay what they are; each singular value goes through the odd polynomial
a s + b s^3 + c s^5 of every step. Newton-Schulz uses one triple (a, b, c) throughout. Polar Express
(2505.16932) has one for each step, the best for singular values from 1e-3 up: of a matrix whose
Frobenius norm is 1, those end between 0.85 and 1.15.
"""

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from multigate.names import unknown
from multigate.numerics import wide, without_autocast

from .config import Method


class Iteration(NamedTuple):
    coefficients: tuple[tuple[float, float, float], ...]
    safety: float
    eps: float


ITERATIONS: dict[str, Iteration] = {
    "polar-express": Iteration(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.01,
        eps=1e-6,
    ),
    "newton-schulz": Iteration(((3.4445, -4.7750, 2.0315),) * 5, safety=1.0, eps=1e-7),
}


@torch.no_grad()
def orthogonalise(
    x: Tensor, method: Method = "polar-express", dtype: torch.dtype | None = None
) -> Tensor:
    """Each matrix of x [..., r, c] with singular values near 1, computed and returned in `dtype`.

    By default that is bfloat16 on a CUDA device, float32 elsewhere, float64 if x is float64.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"orthogonalise needs matrices [..., r, c] of floating point, got {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )
    if method not in ITERATIONS:
        raise ValueError(unknown("method", method, get_args(Method)))
    iteration = ITERATIONS[method]
    rows, columns = x.shape[-2:]
    flat = x.reshape(math.prod(x.shape[:-2]), rows, columns)
    norm = torch.linalg.vector_norm(wide(flat), dim=(-2, -1), keepdim=True)
    y = torch.empty_like(flat, dtype=dtype or default_dtype(x))
    torch.div(flat, norm.mul_(iteration.safety).add_(iteration.eps), out=y)
    with without_autocast(x.device.type):
        for coefficients in iteration.coefficients:
            y = _polynomial(y, *coefficients)
    return y.view(x.shape)


def default_dtype(x: Tensor) -> torch.dtype:
    if x.dtype == torch.float64:
        return x.dtype
    return torch.bfloat16 if x.device.type == "cuda" else torch.float32


def _polynomial(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """a X + (b A + c A^2) X; for a tall X the same as a X + X (b A + c A^2) with A = X^T X."""
    tall = x.shape[-2] > x.shape[-1]
    gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
    inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return torch.baddbmm(x, x, inner, beta=a) if tall else torch.baddbmm(x, inner, x, beta=a)
