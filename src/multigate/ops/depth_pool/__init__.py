"""Pooling over a list of sources by attention with a learned query: what AttnRes reads with."""

from collections.abc import Sequence

from torch import Tensor

from multigate.ops.backend import choose
from multigate.ops.checks import check_tensors
from multigate.ops.rows import by_hand

from . import eager, reference
from .op import fused

KERNELS = ("cuda", "triton")


def depth_pool(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    scale: float = 1.0,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Pool `sources`, each [..., D], into one [..., D] by softmax attention with `query` [D].

        alpha = softmax_i( scale * query . rms(source_i) )        h = sum_i alpha_i source_i

    The values are the raw sources; only the keys are normalised, without a weight (a key gain is
    multiplied into `query` by the caller). With `norm_weight` [D] the result is RMSNorm(h) *
    norm_weight. `backend`: "torch" is plain PyTorch, "triton" and "cuda" (up to 128 sources) are
    fused kernels, "auto" takes one that can run; see `multigate.ops.backend`.
    """
    if not sources:
        raise ValueError("depth_pool needs at least one source, and the list is empty.")
    tensors = {f"source {i}": source for i, source in enumerate(sources)}
    tensors["the query"] = query
    if norm_weight is not None:
        tensors["norm_weight"] = norm_weight
    check_tensors("depth_pool", tensors, "source 0")
    for source in sources:
        if source.shape != sources[0].shape:
            raise ValueError(
                f"depth_pool needs sources of one shape, got {tuple(sources[0].shape)} "
                f"and {tuple(source.shape)}."
            )
    if sources[0].ndim == 0 or not sources[0].shape[-1]:
        raise ValueError(
            f"depth_pool needs sources of shape [..., D], got {tuple(sources[0].shape)}."
        )
    width = sources[0].shape[-1]
    for name in ("the query", "norm_weight"):
        if name in tensors and tensors[name].shape != (width,):
            raise ValueError(
                f"depth_pool: {name} must have {width} numbers, got {tuple(tensors[name].shape)}."
            )
    dtypes = {str(source.dtype) for source in sources}
    dtype = dtypes.pop() if len(dtypes) == 1 else "sources of several dtypes"
    kernel = choose("depth_pool", KERNELS, backend, query.device.type, query.device.index, dtype)
    if kernel == "torch":
        if by_hand():
            return eager.Pool.apply(query, norm_weight, scale, eps, *sources)
        return reference.depth_pool(sources, query, scale, norm_weight, eps)
    h, _ = fused(list(sources), query, norm_weight, scale, eps, kernel)
    return h
