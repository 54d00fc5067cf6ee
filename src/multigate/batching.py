"""From tokens a step, which the user sets, to windows a micro-batch and how many of those."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .gpt import GPT

MOST_TOKENS = {"cuda": 65536, "cpu": 8192, "mps": 8192}
"""Larger micro-batches than this gain no speed."""
USABLE_MEMORY = 0.85
"""Share of the device that a chosen micro-batch may fill."""


@dataclass(frozen=True)
class Batching:
    """windows = processes * micro_batch * accumulation."""

    windows: int
    """A step's windows over all processes."""
    micro_batch: int
    accumulation: int


def plan(
    tokens_per_step: int,
    context: int,
    processes: int,
    micro_batch: int | None,
    most: Callable[[], int],
) -> Batching:
    """Check the sizes, choose the micro-batch if there is none: the largest up to `most()`."""
    if tokens_per_step % (context * processes):
        unit = context * processes
        lower = tokens_per_step // unit * unit
        near = f"{lower} or {lower + unit}" if lower else str(unit)
        raise ValueError(
            f"tokens_per_step {tokens_per_step} is no multiple of {context} tokens of context "
            f"times {processes} processes: use {near}."
        )
    windows = tokens_per_step // context
    share = windows // processes
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    if micro_batch is None:
        limit = max(1, most())
        micro_batch = max(d for d in divisors if d <= limit)
    elif micro_batch not in divisors:
        raise ValueError(
            f"micro_batch {micro_batch} does not divide the {share} windows of a process's step: "
            f"use one of {', '.join(map(str, divisors))}."
        )
    return Batching(windows, micro_batch, share // micro_batch)


def most_windows(model: GPT, autocast: Callable[[], object], shards: int = 1) -> int:
    """The most windows that fit a micro-batch on the model's device.

    On a GPU from two small passes without compilation, whose memory grows in proportion to the
    windows; compiled, the model needs less. Gradients, two optimizer states and a copy of the
    parameters in the compute dtype have to fit beside it, spread over `shards` devices.
    """
    device, context = model.embed.weight.device, model.config.context
    useful = max(1, MOST_TOKENS[device.type] // context)
    if device.type != "cuda":
        return useful
    too_large = ValueError(
        f"one window of {context} tokens does not fit this GPU: choose a smaller scale or "
        "context, --checkpoint-activations True, or --parallel fsdp on several GPUs."
    )
    try:
        one = _peak(model, autocast, 1)
    except torch.OutOfMemoryError:
        raise too_large from None
    try:
        two = _peak(model, autocast, 2)
    except torch.OutOfMemoryError:
        return 1
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = USABLE_MEMORY * (torch.cuda.mem_get_info(device)[0] + cached)
    room = free - model.parameter_count() * (4 + 8 + 2) / shards
    if room < one:
        raise too_large
    return min(1 + int((room - one) / max(two - one, 1)), useful)


def _peak(model: GPT, autocast: Callable[[], object], windows: int) -> int:
    """Bytes that a forward and backward pass adds to what is allocated already."""
    device = model.embed.weight.device
    tokens = torch.zeros(windows, model.config.context, dtype=torch.long, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with autocast():  # type: ignore[attr-defined]
        loss = model(tokens, tokens)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(device) - before
