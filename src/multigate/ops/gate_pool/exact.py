"""Steps that are inverted to the last bit, as torch.library operators.

`forward` and `backward` are whole steps by the CUDA kernels; `coded` and `uncoded` go with a step
by any backend. How long their lists are is an argument (one element in so many), for the reason
that `op` gives.
"""

import math
from typing import Any

import torch
from torch import Tensor

from multigate.ops.backend import at_trace_time

from . import codes, cuda, reference
from .op import flat_rows, flat_streams, flat_weights, in_dtypes, inverted_shapes


@at_trace_time
def fits(device: str, index: int | None, n: int, width: int, dtype: str) -> bool:
    """Whether the kernels make codes of the problem; see `cuda.fits`."""
    coded = cuda.codes_fit(n, getattr(torch, dtype.removeprefix("torch.")))
    return coded and cuda.fits(device, index, n, width, dtype)


@torch.library.custom_op("multigate::gate_pool_exact", mutates_args=())
def forward(
    y: Tensor,
    streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    competitive: bool,
    eps: float,
    one_in: int,
    numbers: int,
) -> list[Tensor]:
    """h, the new streams, `saved`, the three tensors of `cuda.Exact`, and how much was lost."""
    with torch.cuda.device_of(y):
        h, new, saved, exact, lost = cuda.exact_forward(
            flat_rows(y),
            flat_streams(y, [streams]),
            flat_weights(w_gate, w_pool, bias, norm_weight),
            competitive,
            eps,
            _room(streams, one_in),
        )
    return [h.view(y.shape), new.view(streams.shape), saved, *exact, lost.sum()]


@forward.register_fake
def _(y: Tensor, streams: Tensor, *rest: Any) -> list[Tensor]:
    *_, one_in, numbers = rest
    tokens = math.prod(y.shape[:-1])
    n, width = streams.shape[-2:]
    chunk = 16 // y.element_size()
    bits = torch.uint8 if chunk == 4 else torch.int16
    return [
        y.new_empty(y.shape),
        streams.new_empty(streams.shape),
        y.new_empty((tokens, numbers), dtype=torch.float32),
        y.new_empty((tokens, n, width // chunk), dtype=bits),
        y.new_empty((tokens, -(-width // (32 * chunk))), dtype=torch.int32),
        y.new_empty((_room(streams, one_in),)),
        y.new_empty((), dtype=torch.int64),
    ]


@torch.library.custom_op("multigate::gate_pool_exact_backward", mutates_args=())
def backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    new_streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    exact: list[Tensor],
    competitive: bool,
    eps: float,
) -> list[Tensor]:
    """The streams before the step; the gradients of y, the streams and the weights there are."""
    given = (w_gate, w_pool, bias, norm_weight)
    shape = new_streams.shape
    with torch.cuda.device_of(y):
        old, (dy, dstreams, *dweights) = cuda.exact_backward(
            None if grad_h is None else flat_rows(grad_h),
            None if grad_streams is None else grad_streams.reshape(-1, *shape[-2:]).contiguous(),
            flat_rows(y),
            flat_streams(y, [new_streams]),
            flat_weights(*given),
            saved,
            (exact[0], exact[1], exact[2]),
            competitive,
            eps,
        )
    found = in_dtypes(dweights, given)
    return [old.view(shape), dy.view(y.shape), dstreams.view(shape), *found]


backward.register_fake(inverted_shapes)


def coded_in_full(
    streams: Tensor, new: Tensor, y: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and a list that bring back `streams` from those after the step; and a loss of 0."""
    return codes.encode(streams, reference.unlerp(new, y, beta))


@torch.library.custom_op("multigate::gate_pool_coded", mutates_args=())
def coded(
    streams: Tensor, new: Tensor, y: Tensor, beta: Tensor, one_in: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`coded_in_full` with a list of a length that is known before; how much was lost."""
    return codes.encode(streams, reference.unlerp(new, y, beta), codes.room_for(streams, one_in))


@coded.register_fake
def _(
    streams: Tensor, new: Tensor, y: Tensor, beta: Tensor, one_in: int
) -> tuple[Tensor, Tensor, Tensor]:
    packed = streams.new_empty((-(-streams.numel() // 4),), dtype=torch.uint8)
    listed = streams.new_empty((codes.room_for(streams, one_in),))
    return packed, listed, streams.new_empty((), dtype=torch.int64)


@torch.library.custom_op("multigate::gate_pool_uncoded", mutates_args=())
def uncoded(new: Tensor, y: Tensor, beta: Tensor, packed: Tensor, listed: Tensor) -> Tensor:
    """The streams before the step."""
    return codes.decode(packed, listed, reference.unlerp(new, y, beta)).contiguous()


@uncoded.register_fake
def _(new: Tensor, y: Tensor, beta: Tensor, packed: Tensor, listed: Tensor) -> Tensor:
    return new.new_empty(new.shape)


def _room(streams: Tensor, one_in: int) -> int:
    """Elements of the list: every block has a part of it, and some more than others to list."""
    return streams.numel() // one_in + 4096
