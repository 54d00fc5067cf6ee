"""One Multi-Gate step: gate, lerp and attention pool."""

from torch import Tensor

from multigate.names import unknown
from multigate.ops.checks import check_tensors

from . import reference

VARIANTS = ("independent", "competitive")


def gate_pool(
    y: Tensor,
    streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str = "competitive",
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Write the sublayer output `y` [..., D] into `streams` [..., n, D] and pool the next input.

        z_i  = w_gate . rms(s_i) / sqrt(D) + b_i
        beta = sigmoid(z)  (independent)   or   softmax([b_0, z_1 .. z_n])[1:]  (competitive)
        s_i <- s_i + beta_i (y - s_i)
        h    = sum_i softmax_i( w_pool . rms(s_i) / sqrt(D) ) s_i

    Returns (h, new streams), both in the dtype of `streams`. `bias` has n entries for the
    independent gate and n + 1 for the competitive one, whose entry 0 is the carry logit b_0. With
    `norm_weight` [D] h comes back as RMSNorm(h) * norm_weight.
    """
    check(y, streams, w_gate, w_pool, bias, variant, norm_weight)
    return reference.gate_pool(y, streams, w_gate, w_pool, bias, variant, norm_weight, eps)


def check(
    y: Tensor,
    streams: Tensor,
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    variant: str,
    norm_weight: Tensor | None,
) -> None:
    """One clear sentence for arguments that do not belong together."""
    if variant not in VARIANTS:
        raise ValueError(unknown("gate variant", variant, VARIANTS))
    if streams.ndim < 2:
        raise ValueError(
            f"gate_pool needs streams of shape [..., n, D], got {tuple(streams.shape)}."
        )
    *batch, n, width = streams.shape
    wanted = {
        "y": (y, (*batch, width)),
        "w_gate": (w_gate, (width,)),
        "w_pool": (w_pool, (width,)),
        "bias": (bias, (n + (variant == "competitive"),)),
    }
    if norm_weight is not None:
        wanted["norm_weight"] = (norm_weight, (width,))
    tensors = {"streams": streams, **{name: tensor for name, (tensor, _) in wanted.items()}}
    check_tensors("gate_pool", tensors, "streams")
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise ValueError(
                f"gate_pool with {n} streams of width {width} and the {variant} gate needs {name} "
                f"of shape {tuple(shape)}, got {tuple(tensor.shape)}."
            )
