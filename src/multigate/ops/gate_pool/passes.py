"""The two passes of a Multi-Gate step as plain functions, by any backend and without autograd.

`saved` is what a backend keeps of a token beside y: the reference beta [..., n], a kernel what
saved.py says. `kernel` is what `kernel_for` chose.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from multigate.numerics import without_autocast
from multigate.ops.rows import by_hand

from . import cuda, eager, exact, reference
from .codes import LISTED
from .cuda import GROUP, Weights
from .op import fused, fused_backward, fused_invert_backward, fused_keep, fused_replay
from .saved import saved_gates, saved_numbers


def forward(
    y: Tensor, streams: Tensor, weights: Weights, variant: str, eps: float, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """h, the new streams and `saved`, of streams [..., n, D]."""
    if kernel == "torch":
        if by_hand():
            h, new, measured = eager.step((y, streams, *weights), variant, eps)
            return h, new, measured.beta.reshape(streams.shape[:-1])
        w_gate, w_pool, bias, norm_weight = weights
        return reference.step(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)
    numbers = saved_numbers(streams.shape[-2])
    return fused(y, [streams], *weights, variant == "competitive", eps, kernel, numbers)


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
    if by_hand():
        inputs = (y, streams, *weights)
        _, new, measured = eager.step(inputs, variant, eps)
        return eager.gradients(grad_h, grad_streams, inputs, new, measured, eps)

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


def keep(
    streams: Tensor,
    y: Tensor,
    saved: Tensor,
    millionths: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """The streams of a step's largest gate values, `millionths` of all, as rows; where they belong.

    The largest of every group, that is: all at once are sought by a dozen kernels.
    """
    if kernel == "cuda" and _fits(cuda.fits, y, streams):
        return fused_keep(streams, saved, millionths)
    return largest(streams, gates(saved, streams), millionths)


def largest(streams: Tensor, beta: Tensor, millionths: int) -> tuple[Tensor, Tensor]:
    """The streams of the largest gate values of every group, as rows; their places among all."""
    total = beta.numel()
    groups = max(1, -(-total // GROUP))
    group = -(-total // groups)
    count = (group * millionths + 999_999) // 1_000_000
    # Gates are positive, so that what fills up the last group comes last.
    values = F.pad(beta.reshape(-1), (0, groups * group - total), value=-1.0).view(groups, group)
    first = group * torch.arange(groups, device=beta.device)
    index = values.topk(count, sorted=False).indices + first[:, None]
    # Where it has too few, a row is kept twice.
    index = index.reshape(-1).clamp(max=total - 1)
    return streams.reshape(total, streams.shape[-1])[index], index


def invert_backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Tensor,
    weights: Weights,
    saved: Tensor,
    kept: Tensor,
    where: Tensor,
    variant: str,
    eps: float,
    kernel: str,
) -> tuple[Tensor | None, ...]:
    """The streams before the step from those after it, then what `backward` gives.

    Those that `keep` has kept need no inversion.
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
            where,
            variant == "competitive",
            eps,
            kernel,
        )
        return (*found, None)[:7]
    streams = reference.unlerp(new_streams, y, saved)
    rows = streams.reshape(-1, y.shape[-1]).index_copy(0, where, kept)
    streams = rows.view(new_streams.shape)
    options = (variant, eps, kernel)
    return streams, *backward(grad_h, grad_streams, y, streams, weights, saved, *options)


def exact_forward(
    y: Tensor, streams: Tensor, weights: Weights, variant: str, eps: float, kernel: str
) -> tuple[Tensor, ...]:
    """h, the new streams, how much could not be kept, `saved`, and what brings the streams back."""
    if kernel == "cuda" and _fits(exact.fits, y, streams):
        options = (variant == "competitive", eps, LISTED, saved_numbers(streams.shape[-2]))
        h, new, saved, *kept, lost = exact.forward(y, streams, *weights, *options)
        return h, new, lost, saved, *kept
    h, new, saved = forward(y, streams, weights, variant, eps, kernel)
    beta = gates(saved, streams)
    if torch.compiler.is_compiling():
        packed, listed, lost = exact.coded(streams, new, y, beta, LISTED)
    else:
        packed, listed, lost = exact.coded_in_full(streams, new, y, beta)
    return h, new, lost, saved, packed, listed


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
    if len(kept) == 3:
        options = (variant == "competitive", eps)
        found = exact.backward(*grads, y, new_streams, *weights, saved, list(kept), *options)
        return (*found, None)[:7]
    streams = exact.uncoded(new_streams, y, gates(saved, new_streams), *kept)
    return streams, *backward(*grads, y, streams, weights, saved, variant, eps, kernel)


def _fits(question: Callable[..., bool], y: Tensor, streams: Tensor) -> bool:
    """Whether a kernel takes the problem, which `question` answers from words and numbers."""
    device, sizes = y.device, (streams.shape[-2], streams.shape[-1])
    known = (device.type, device.index, *sizes, str(streams.dtype))
    return y.dtype == streams.dtype and question(*known)


def gates(saved: Tensor, streams: Tensor) -> Tensor:
    """beta [..., n] of a step on streams of this shape, from what it has saved."""
    n = streams.shape[-2]
    return saved if saved.shape[-1] == n else saved_gates(saved, n).view(streams.shape[:-1])
