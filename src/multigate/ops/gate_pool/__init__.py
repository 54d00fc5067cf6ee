"""One Multi-Gate step: gate, lerp and attention pool."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multigate.names import unknown
from multigate.ops.backend import choose
from multigate.ops.checks import check_tensors
from multigate.ops.rows import by_hand

from . import eager, reference
from .op import fused
from .reference import VARIANTS
from .saved import saved_numbers

KERNELS = ("cuda", "triton")
MOST_STREAMS = 16
"""That the kernels take."""


def gate_pool(
    y: Tensor,
    streams: Tensor | Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str = "competitive",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Write the sublayer output `y` [..., D] into `streams` [..., n, D] and pool the next input.

        z_i  = w_gate . rms(s_i) / sqrt(D) + b_i
        beta = sigmoid(z)  (independent)   or   softmax([b_0, z_1 .. z_n])[1:]  (competitive)
        s_i <- s_i + beta_i (y - s_i)
        h    = sum_i softmax_i( w_pool . rms(s_i) / sqrt(D) ) s_i

    Returns (h, new streams), both in the dtype of `streams`. `bias` has n entries for the
    independent gate and n + 1 for the competitive one, whose entry 0 is the carry logit b_0. With
    `norm_weight` [D] h comes back as RMSNorm(h) * norm_weight.

    The streams may also come as n tensors [..., D]; the new ones are always one tensor. `backend`:
    "torch" is plain PyTorch, "triton" and "cuda" are one-pass kernels, "auto" takes the first of
    cuda, triton and torch that can run (on a CPU torch); see `multigate.ops.backend`.
    """
    packed = isinstance(streams, Tensor)
    given = [streams] if isinstance(streams, Tensor) else list(streams)
    check(y, given, packed, w_gate, w_pool, bias, variant, norm_weight)
    kernel = kernel_for(y, given, backend)
    if kernel == "torch":
        whole = given[0] if packed else torch.stack(given, dim=-2)
        if by_hand():
            return eager.Step.apply(y, whole, w_gate, w_pool, bias, norm_weight, variant, eps)
        return reference.gate_pool(y, whole, w_gate, w_pool, bias, variant, norm_weight, eps)
    competitive = variant == "competitive"
    # int: torch 2.11 cannot take a boolean from a size that is left open.
    options = (competitive, eps, kernel, saved_numbers(len(bias) - int(competitive)))
    h, new, _ = fused(y, given, w_gate, w_pool, bias, norm_weight, *options)
    return h, new


def kernel_for(y: Tensor, streams: Sequence[Tensor], backend: str = "auto") -> str:
    """Which backend does the step on streams that come packed or one by one."""
    n = streams[0].shape[-2] if streams[0].ndim > y.ndim else len(streams)
    # As an unknown dtype would: no kernel has room for more.
    kind = str(streams[0].dtype) if n <= MOST_STREAMS else f"more than {MOST_STREAMS} streams"
    return choose("gate_pool", KERNELS, backend, y.device.type, y.device.index, kind)


def check(
    y: Tensor,
    streams: Sequence[Tensor],
    packed: bool,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str,
    norm_weight: Tensor | None,
) -> None:
    """One clear sentence for arguments that do not belong together."""
    if variant not in VARIANTS:
        raise ValueError(unknown("gate variant", variant, VARIANTS))
    if not streams:
        raise ValueError("gate_pool needs at least one stream, and the list is empty.")
    first = streams[0]
    if first.ndim < 1 + packed:
        shape = "[..., n, D]" if packed else "[..., D] each"
        raise ValueError(f"gate_pool needs streams of shape {shape}, got {tuple(first.shape)}.")
    batch, n, width = first.shape[:-1], len(streams), first.shape[-1]
    if packed:
        batch, n = batch[:-1], batch[-1]
    if not n * width:
        raise ValueError(f"gate_pool needs streams with numbers, got {tuple(first.shape)}.")
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        **{f"stream {i}": (stream, tuple(first.shape)) for i, stream in enumerate(streams)},
        "y": (y, (*batch, width)),
        "w_gate": (w_gate, (width,)),
        "w_pool": (w_pool, (width,)),
        "bias": (bias, (n + int(variant == "competitive"),)),
    }
    if norm_weight is not None:
        wanted["norm_weight"] = (norm_weight, (width,))
    tensors = {"streams": first, **{name: tensor for name, (tensor, _) in wanted.items()}}
    check_tensors("gate_pool", tensors, "streams")
    for name, (tensor, needed) in wanted.items():
        if tensor.shape != needed:
            raise ValueError(
                f"gate_pool with {n} streams of width {width} and the {variant} gate needs {name} "
                f"of shape {tuple(needed)}, got {tuple(tensor.shape)}."
            )
    for stream in streams:
        if stream.dtype != first.dtype:
            raise ValueError(
                f"gate_pool needs streams of one dtype, got {first.dtype} and {stream.dtype}."
            )
