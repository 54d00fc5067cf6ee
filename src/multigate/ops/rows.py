"""Arithmetic of rows [..., D] for gradients by hand, all in the precision that it is given.

Nothing here is a product of two matrices, which some settings of torch make less exact, and where
a sum can do without a large tensor in between, it does: on a CPU it is those that take time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multigate.numerics import inverse_rms


def by_hand() -> bool:
    """Whether gradients by hand pay: torch.compile makes better ones, of the reference.

    Nor are they for `torch.func` and forward-mode differentiation, which can take the reference.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not torch.compiler.is_compiling() and not transformed


def mixed(x: Tensor, shares: Tensor) -> Tensor:
    """sum of share * row over all rows [D], of shares [...].

    In groups of rows: a long product adds up row by row, and its error grows with their number.
    """
    rows, shares = x.reshape(-1, x.shape[-1]), shares.reshape(-1)
    group = max(1024, -(-len(rows) // 64))
    parts = zip(rows.split(group), shares.split(group), strict=True)
    return torch.stack([torch.mv(part.t(), share) for part, share in parts]).sum(0)


def scored_backward(
    dz: Tensor,
    z: Tensor,
    root: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of x, where z = scale * weight . x * root and root = 1 / rms(x):

    dx = dz (scale * root * weight - z * root^2 / D * x)
    """
    width = x.shape[-1]
    # Packed, whatever the strides of x.
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    torch.mul(x, (dz * z * root.square() / -width).unsqueeze(-1), out=dx)
    dx.view(-1, width).addr_((dz * root * scale).reshape(-1), weight)
    return dx


def softmax_backward(grad: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the logits [..., m]."""
    return weights * (grad - (weights * grad).sum(-1, keepdim=True))


def normed_backward(grad: Tensor, h: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of h and of the gain."""
    scale = inverse_rms(h, eps).unsqueeze(-1)
    unit = h * scale
    dgain = (grad * unit).reshape(-1, h.shape[-1]).sum(0)
    grad = grad * gain
    return scale * (grad - unit * (grad * unit).mean(-1, keepdim=True)), dgain


def first_gradients(
    outputs: Sequence[tuple[Tensor, Tensor | None]], inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """By autograd, which can differentiate them again: of all `inputs` that want one."""
    used, grads = zip(*(pair for pair in outputs if pair[1] is not None), strict=True)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(used, wanted, grads, create_graph=True, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)
