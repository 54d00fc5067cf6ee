"""How good a model is on held-out text: loss, perplexity, bits per byte; and what its gates do."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .data import Split
from .distributed import World
from .gpt import GPT


@dataclass(frozen=True)
class Score:
    loss: float
    """Mean cross entropy of a token, in nats."""
    tokens: int
    """How many were predicted."""
    bits_per_byte: float
    """Of the text behind the tokens: loss / ln 2 * (tokens / bytes of the whole split)."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: GPT,
    split: Split,
    batch: int,
    most: int | None = None,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    world: World | None = None,
) -> Score:
    """The score on windows of the model's context.

    With `most`, on about so many tokens in windows spread evenly over the split, shared out over
    the processes of `world`; without, on every token but the first of each shard.
    """
    world = world or World()
    device, context = model.embed.weight.device, model.config.context
    total = torch.zeros(2, dtype=torch.float64)
    for rows, counts in _batches(split, context, batch, most, world):
        rows = rows.to(device)
        with autocast():
            loss = model(rows[:, :-1], rows[:, 1:])
        predicted = rows[:, 1:].numel() if counts else 0
        total += torch.tensor([loss.item() * predicted, predicted], dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(total)
    loss, tokens = total[0].item() / total[1].item(), int(total[1].item())
    return Score(loss, tokens, loss / math.log(2) * split.tokens / split.bytes)


def _batches(
    split: Split, context: int, batch: int, most: int | None, world: World
) -> Iterator[tuple[Tensor, bool]]:
    """This process's rows, and whether they count: all processes give equally many batches,
    because sharded models have to be called in step, and one may have a row less."""
    available = split.windows(context)
    count = available if most is None else min(available, max(1, most // context))
    chosen = np.linspace(0, available - 1, count).astype(np.int64)
    own = chosen[world.rank :: world.size]
    for begin in range(0, -(-count // world.size), batch):
        indices = own[begin : begin + batch]
        rows = split.rows(indices if len(indices) else chosen[:1], context)
        yield torch.from_numpy(rows.astype(np.int64)), len(indices) > 0
    if most is None and world.first:
        for shard in split.shards:
            rest = shard[(len(shard) - 1) // context * context :]
            if len(rest) > 1:
                yield torch.from_numpy(rest.astype(np.int64))[None], True


@torch.no_grad()
def gates(
    model: GPT,
    split: Split,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[float, float] | None:
    """Mean and maximum of all gates over one held-out window; None for a residual without gates.

    A gate is what a residual records as `beta`.
    """
    rows = torch.from_numpy(split.rows(np.array([0]), model.config.context).astype(np.int64))
    with model.stack.residual.recording() as steps, autocast():
        model(rows[:, :-1].to(model.embed.weight.device))
    found = [step["beta"].float().flatten() for step in steps.values() if "beta" in step]
    if not found:
        return None
    together = torch.cat(found)
    return together.mean().item(), together.max().item()
