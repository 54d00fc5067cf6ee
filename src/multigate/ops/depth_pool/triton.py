"""The Triton backend of depth_pool: how the kernels are launched."""

# mypy: disable-error-code="import-untyped"

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from multigate.ops.cuda import multiprocessors

from .plan import Plan, plan, saved_rows
from .triton_kernels import backward_kernel, forward_kernel, table_kernel

INTERPRETED_PROCESSORS = 1


def forward(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    scale: float,
    eps: float,
    chosen: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """h [tokens, width] and `saved`, from sources [tokens, width] of one dtype and row stride."""
    first = sources[0]
    tokens, width = first.shape
    chosen = chosen or plan(len(sources), width, first.element_size(), backward=False)
    h = first.new_empty(first.shape)
    saved = first.new_empty((saved_rows(len(sources)), tokens), dtype=torch.float32)
    if tokens:
        forward_kernel[(triton.cdiv(tokens, chosen.block),)](
            _reachable(sources, first.device, chosen),
            query,
            norm_weight,
            h,
            saved,
            tokens,
            len(sources),
            first.stride(0),
            scale,
            eps,
            **_constants(sources, chosen),
        )
    return h, saved


def backward(
    grad_h: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    scale: float,
    wanted: Sequence[bool],
    query_wanted: bool = True,
    norm_wanted: bool = True,
    chosen: Plan | None = None,
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of the sources that are `wanted`, of the query and of the norm weight."""
    first = sources[0]
    tokens, width = first.shape
    chosen = chosen or plan(len(sources), width, first.element_size(), backward=True)
    grads = [first.new_empty(first.shape) if want else None for want in wanted]
    blocks = triton.cdiv(tokens, chosen.block)
    rows = min(blocks, chosen.programs * _processors(first.device))
    parts = [
        first.new_empty((rows, width), dtype=torch.float32) if want else None
        for want in (query_wanted, norm_wanted and norm_weight is not None)
    ]
    if tokens:
        backward_kernel[(rows,)](
            _reachable(sources, first.device, chosen),
            _reachable(grads, first.device, chosen),
            grad_h.contiguous(),
            query,
            norm_weight,
            saved,
            *parts,
            tokens,
            len(sources),
            first.stride(0),
            scale,
            **_constants(sources, chosen),
        )
    dquery, dnorm = parts
    return (
        grads,
        None if dquery is None else dquery.sum(0).to(query.dtype),
        None if dnorm is None or norm_weight is None else dnorm.sum(0).to(norm_weight.dtype),
    )


def _reachable(
    tensors: Sequence[Tensor | None], device: torch.device, chosen: Plan
) -> tuple[Tensor | None, ...] | Tensor:
    """The tensors as a kernel takes them: a tuple, or a table of their addresses."""
    if chosen.held:
        return tuple(tensors)
    # A power of two, so that a model of any depth needs a handful of these kernels.
    room = triton.next_power_of_2(len(tensors))
    table = torch.empty(room, dtype=torch.int64, device=device)
    table_kernel[(1,)]((*tensors, *[tensors[-1]] * (room - len(tensors))), table, COUNT=room)
    return table


def _constants(sources: Sequence[Tensor], chosen: Plan) -> dict[str, Any]:
    aligned = all(source.data_ptr() % 16 == 0 for source in sources)
    return {
        "WIDTH": sources[0].shape[1],
        "SECTION": chosen.section,
        "BLOCK": chosen.block,
        "GROUP": chosen.group,
        "HELD": chosen.held,
        "ALIGN": 16 if aligned else sources[0].element_size(),
        "num_warps": chosen.warps,
    }


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return multiprocessors(device)
