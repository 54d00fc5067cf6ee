"""The two passes of a Multi-Gate step as plain functions, by any backend and without autograd.

`saved` is what a backend keeps of a token beside y: the reference beta [..., n], a kernel its dot
products. `kernel` is what `kernel_for` chose.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from multigate.numerics import without_autocast

from . import exact, reference
from .codes import LISTED
from .cuda import Weights
from .op import fused, fused_backward, fused_invert_backward, fused_replay


def forward(
    y: Tensor, streams: Tensor, weights: Weights, variant: str, eps: float, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """h, the new streams and `saved`, of streams [..., n, D]."""
    if kernel == "torch":
        w_gate, w_pool, bias, norm_weight = weights
        return reference.step(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)
    return fused(y, [streams], *weights, variant == "competitive", eps, kernel)


def replay(
    streams: Tensor,
    ys: Sequence[Tensor],
    weights: Sequence[Weights],
    saved: Sequence[Tensor],
    variant: str,
    eps: float,
    kernel: str,
) -> list[Tensor]:
    """The streams after each of several steps, bit for bit as `forward` has made them."""
    if kernel != "torch":
        columns = [list(column) for column in zip(*weights, strict=True)]
        options = (variant == "competitive", eps, kernel)
        return fused_replay(streams, list(ys), *columns, list(saved), *options)
    states = [streams]
    for y, beta in zip(ys, saved, strict=True):
        states.append(reference.lerp(y, states[-1], beta).to(streams.dtype))
    return states[1:]


def backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    streams: Tensor,
    weights: Weights,
    saved: Tensor,
    variant: str,
    eps: float,
    kernel: str,
) -> tuple[Tensor | None, ...]:
    """The gradients of y, the old streams and the four weights."""
    if kernel != "torch":
        found = fused_backward(
            grad_h,
            grad_streams,
            y,
            [streams],
            *weights,
            saved,
            variant == "competitive",
            eps,
            kernel,
        )
        return (*found, None)[:6]

    def step(
        y: Tensor,
        streams: Tensor,
        w_gate: Tensor,
        w_pool: Tensor,
        bias: Tensor,
        norm_weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return reference.gate_pool(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)

    given = [w for w in weights if w is not None]
    with without_autocast(y.device.type):
        outputs, pull_back, *_ = torch.func.vjp(step, y, streams, *given)
        grads = [
            torch.zeros_like(output) if grad is None else grad
            for output, grad in zip(outputs, (grad_h, grad_streams), strict=True)
        ]
        found = pull_back(tuple(grads))
    return (*found, None)[:6]


def invert_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Tensor,
    weights: Weights,
    saved: Tensor,
    kept: Tensor,
    index: Tensor,
    variant: str,
    eps: float,
    kernel: str,
) -> tuple[Tensor | None, ...]:
    """The streams before the step from those after it, then what `backward` gives.

    The rows `kept` of the old streams, at `index` of [tokens * n], need no inversion.
    """
    if kernel != "torch":
        found = fused_invert_backward(
            grad_h,
            grad_streams,
            y,
            new_streams,
            *weights,
            saved,
            kept,
            index,
            variant == "competitive",
            eps,
            kernel,
        )
        return (*found, None)[:7]
    streams = reference.unlerp(new_streams, y, saved)
    rows = streams.reshape(-1, y.shape[-1]).index_copy(0, index, kept)
    streams = rows.view(new_streams.shape)
    options = (variant, eps, kernel)
    return streams, *backward(grad_h, grad_streams, y, streams, weights, saved, *options)


def exact_forward(
    y: Tensor, streams: Tensor, weights: Weights, variant: str, eps: float, kernel: str
) -> tuple[Tensor, ...]:
    """h, the new streams, how much could not be kept, `saved`, and what brings the streams back."""
    if kernel == "cuda" and _codes_by_kernel(y, streams):
        options = (variant == "competitive", eps, LISTED)
        h, new, saved, *kept, lost = exact.forward(y, streams, *weights, *options)
        return h, new, lost, saved, *kept
    h, new, saved = forward(y, streams, weights, variant, eps, kernel)
    beta = gates(saved, weights[2], streams, variant, eps)
    if torch.compiler.is_compiling():
        packed, listed, lost = exact.coded(streams, new, y, beta, LISTED)
    else:
        packed, listed, lost = exact.coded_in_full(streams, new, y, beta)
    return h, new, lost, saved, beta, packed, listed


def exact_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Tensor,
    weights: Weights,
    saved: Tensor,
    kept: Sequence[Tensor],
    variant: str,
    eps: float,
    kernel: str,
) -> tuple[Tensor | None, ...]:
    """What `invert_backward` gives, of streams that are the old ones to the last bit."""
    grads = (grad_h, grad_streams)
    if len(kept) == 4:
        options = (variant == "competitive", eps)
        found = exact.backward(*grads, y, new_streams, *weights, saved, list(kept), *options)
        return (*found, None)[:7]
    streams = exact.uncoded(new_streams, y, *kept)
    return streams, *backward(*grads, y, streams, weights, saved, variant, eps, kernel)


def _codes_by_kernel(y: Tensor, streams: Tensor) -> bool:
    device, sizes = y.device, (streams.shape[-2], streams.shape[-1])
    return y.dtype == streams.dtype and exact.fits(
        device.type, device.index, *sizes, str(streams.dtype)
    )


def gates(saved: Tensor, bias: Tensor, streams: Tensor, variant: str, eps: float) -> Tensor:
    """beta [..., n] of a step on streams of this shape, from what it has saved."""
    n, width = streams.shape[-2], streams.shape[-1]
    if saved.shape[-1] == n:
        return saved
    return reference.gate_from(saved, bias, n, width, variant, eps).view(streams.shape[:-1])
