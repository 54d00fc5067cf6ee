"""Many devices under torchrun: joining, replicating (DDP) or sharding (FSDP2), agreeing.

A process that torchrun did not start is a world of one, and every function here then does nothing.
"""

import atexit
import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gpt import GPT
from .optim.sharded import is_sharded


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int = 0
    size: int = 1
    launched: bool = False
    """Whether torchrun started this process; true also for one alone."""

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def join(device: str) -> Iterator[World]:
    """The world torchrun describes in the environment, joined for the length of the context."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World()
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"torchrun started process {local} of this machine, which has "
                f"{torch.cuda.device_count()} GPUs: use --nproc-per-node "
                f"{torch.cuda.device_count()} or fewer."
            )
        torch.cuda.set_device(local)
    # Functions of torch that are imported later have the group as a default argument, and would
    # keep it for good.
    importlib.import_module("torch._dynamo")
    # gloo beside nccl: checkpoints and agreements travel between CPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    atexit.register(_end_groups, [dist.group.WORLD])
    try:
        yield World(rank, size, launched=True)
    finally:
        dist.destroy_process_group()


def parallelise(model: GPT, world: World, kind: str) -> nn.Module:
    """What to call in place of `model`, whose parameters are sharded in place by "fsdp"."""
    if not world.launched:
        return model
    if kind == "fsdp":
        shard(model)
        return model
    device = model.embed.weight.device
    ids = [device.index] if device.type == "cuda" else None
    # Buffers are tables, the same everywhere, and counts, which are every process's own.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


def shard(model: GPT) -> None:
    """FSDP2: the matrices of each sublayer are one group, everything else belongs to the root.

    A sublayer's norm is applied by the residual before the sublayer is called, so that it cannot
    be in the sublayer's group. Single numbers, which FSDP2 does not take, stay whole on every
    device; `accumulating` averages their gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.embed.weight.device.type, (dist.get_world_size(),))
    for sublayer in model.stack.sublayers:
        matrices: list[nn.Module] = [m for m in sublayer.modules() if isinstance(m, nn.Linear)]
        fully_shard(matrices, mesh=mesh)
    numbers = {p for p in model.parameters() if p.ndim == 0}
    fully_shard(model, mesh=mesh, ignored_params=numbers)
    atexit.register(_end_groups, getattr(mesh, "_pg_registry", {}))


def _end_groups(groups: Any) -> None:
    """Let go of process groups, and so of their threads, when all is done and Python still runs.

    Earlier, the reducer of a DDP model could be the last to hold one: it waits for the group's
    threads without letting go of Python, and one that lets a tensor go waits for Python. Later,
    such a thread ends the process with SIGABRT; DTensor's caches would keep every mesh that long.
    """
    gc.collect()
    groups.clear()
    gc.collect()


@contextmanager
def accumulating(module: nn.Module, last: bool) -> Iterator[None]:
    """A backward pass whose gradients travel between devices only if it is the `last` of a step."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        with nullcontext() if last else module.no_sync():
            yield
        return
    sharded = hasattr(module, "set_requires_gradient_sync")
    if sharded:
        cast(Any, module).set_requires_gradient_sync(last)
    yield
    if sharded and last:
        _average_whole_gradients(module)


def _average_whole_gradients(module: nn.Module) -> None:
    whole = [p.grad for p in module.parameters() if p.grad is not None and not is_sharded(p)]
    if whole:
        together = torch.stack(whole)
        dist.all_reduce(together)
        torch._foreach_copy_(whole, list((together / dist.get_world_size()).unbind()))


def mean_over(world: World, values: Tensor) -> Tensor:
    """The mean of `values` over all processes, on all of them."""
    if world.size > 1:
        dist.all_reduce(values)
        values /= world.size
    return values


def least_over(world: World, number: int) -> int:
    """The least of all processes' numbers, on all of them."""
    if world.size > 1:
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)
    return number


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()
