"""Tensors that are one rank's part of a sharded one (FSDP2's DTensor); a plain one is its own part.

A *stack* here is [k, r, c]: one rank's parts of k equal matrices that are sharded alike.
"""

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_sharded(x: Tensor) -> "TypeGuard[DTensor]":
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's part, sharing memory with `x`."""
    return x.to_local() if is_sharded(x) else x


def layout(x: Tensor) -> Hashable:
    """Equal for tensors that are spread over the same ranks in the same way."""
    return (x.device_mesh, x.placements) if is_sharded(x) else None


def gather(stack: Tensor, like: Tensor) -> Tensor:
    """The whole matrices of a stack whose matrices are sharded as `like` is: one collective."""
    if not is_sharded(like):
        return stack
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(stack), *like.shape))
    rows, columns = like.shape
    parts = DTensor.from_local(
        stack,
        like.device_mesh,
        _stacked(like),
        run_check=False,
        shape=shape,
        stride=(rows * columns, columns, 1),
    )
    return parts.full_tensor()


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's parts of whole matrices [k, r, c] that every rank has: no communication."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    copies = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return copies.redistribute(placements=_stacked(like)).to_local()


def assign(target: Tensor, value: Tensor) -> None:
    """Copy `value`, whole or sharded, into `target`, which keeps its layout."""
    if is_sharded(value) and layout(value) != layout(target):
        value = value.full_tensor()
    if is_sharded(target) and not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(target.device)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    local(target).copy_(local(value))


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all numbers of all tensors, whole even where the tensors are sharded."""
    alike: dict[Hashable, list[Tensor]] = {}
    for x in tensors:
        alike.setdefault(layout(x), []).append(x)
    squares = []
    for xs in alike.values():
        norms = torch.stack(torch._foreach_norm([local(x) for x in xs]))
        squares.append(_sum_of_parts(norms.square().sum(), xs[0]))
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _sum_of_parts(number: Tensor, like: Tensor) -> Tensor:
    if not is_sharded(like):
        return number
    from torch.distributed.tensor import DTensor, Partial, Replicate

    kinds = [Partial() if p.is_shard() else Replicate() for p in like.placements]
    return DTensor.from_local(number, like.device_mesh, kinds, run_check=False).full_tensor()


def _stacked(like: "DTensor") -> "list[Placement]":
    """How a stack is sharded whose matrices are sharded as `like` is."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Placement] = []
    for p in like.placements:
        if type(p) is Shard:
            placements.append(Shard(p.dim + 1))
        elif type(p) is Replicate:
            placements.append(p)
        else:
            raise ValueError(
                f"Muon cannot train a matrix that is sharded as {p}: shard it with fully_shard "
                "alone."
            )
    return placements
