"""Nearly doubly stochastic matrices from logits: how mHC mixes its streams."""

from torch import Tensor

from multigate.ops.backend import choose

from . import reference
from .op import fused


def sinkhorn(logits: Tensor, steps: int = 20, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """A nearly doubly stochastic matrix from logits [..., n, n]: softmax over the rows, then rows
    and columns normalised in turn.

    `steps` row and `steps` column normalisations, columns last: columns sum to 1 up to eps, rows
    up to what the iteration has not yet converged. `backend`: "torch" is the reference, "triton"
    one kernel for all steps, "auto" takes it where it can run: torch.compile makes a hundred
    kernels of the reference, in minutes where there are many sublayers.
    """
    device = logits.device
    kernel = choose("sinkhorn", ("triton",), backend, device.type, device.index, str(logits.dtype))
    if kernel == "torch":
        return reference.sinkhorn(logits, steps, eps)
    return fused(logits, steps, eps)
