"""Measure whole training steps, forward and backward without the optimizer, beside PreNorm's."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multigate.device import Compute
from multigate.gpt import GPT, PRESETS, GPTConfig, preset
from multigate.nn import MLP, Attention, rotary_table
from multigate.norm import RMSNorm
from multigate.ops.backend import VARIABLE
from multigate.residuals import Stack, build_residual, residual_names

from .ops import Row, sentence

BASELINE = "prenorm"
SCALES = ("s", "m", "l", "wide")
BATCH = {"s": 32, "m": 32, "l": 32, "wide": 8}
"""Sequences a step."""
WIDE = {"blocks": 4, "width": 4096, "heads": 32, "length": 1024}
WARM = 3
BLOCK = 4
"""Steps of one model in a row before the other has its turn."""


class WideStack(nn.Module):
    """Blocks alone, without embedding and head: what a wide model's steps are made of.

    The loss is a fixed random projection of the output. With n streams, the first n - 1 of the
    2 * blocks steps grow the streams and the others are gated.
    """

    def __init__(
        self,
        residual: str,
        streams: int | None,
        options: dict[str, Any],
        blocks: int,
        width: int,
        heads: int,
        length: int,
    ) -> None:
        super().__init__()
        sublayers = [
            kind(width, heads, 2 * block + i, 1e-6)
            for block in range(blocks)
            for i, kind in enumerate((Attention, MLP))
        ]
        norm = RMSNorm(width)
        self.stack = Stack(sublayers, residual, width, streams, out_norm=norm, **options)
        cos, sin = rotary_table(length, width // heads, 10000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, direction: Tensor) -> Tensor:
        return (self.stack(x, (self.cos, self.sin)) * direction).float().sum()


@dataclass
class Candidate:
    """A model with its data, ready to step."""

    model: nn.Module
    call: Callable[..., Any]
    data: tuple[Tensor, ...]
    compute: Compute

    def step(self) -> None:
        with self.compute.autocast():
            loss = self.call(*self.data)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        for tensor in self.data:
            tensor.grad = None

    def own_bytes(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.data]
        return sum(t.numel() * t.element_size() for t in tensors)


def takes(residual: str, **options: Any) -> bool:
    """Whether a residual has such options: a number of streams (or blocks), a memory mode."""
    try:
        with torch.device("meta"):
            build_residual(residual, dim=8, depth=8, **options)
    except ValueError:
        return False
    return True


def candidate(
    scale: str,
    residual: str,
    streams: int | None,
    batch: int,
    compute: Compute,
    memory: str = "store",
    backend: str | Callable[..., Any] = "inductor",
) -> Candidate:
    """`backend` is that of torch.compile."""
    device = compute.device
    options = {} if memory == "store" else {"memory": memory}
    if scale == "wide":
        torch.manual_seed(0)
        with device:
            model = WideStack(residual, streams, options, **WIDE).to(device)
        shape = (batch, WIDE["length"], WIDE["width"])
        dtype = torch.float32 if compute.precision == "fp32" else torch.bfloat16
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        data = (x, torch.randn(shape, device=device, dtype=dtype))
        return ready(model, data, compute, backend)
    config = preset(scale, residual=residual, streams=streams, residual_options=options)
    return of_gpt(config, batch, compute, backend)


def of_gpt(
    config: GPTConfig,
    batch: int,
    compute: Compute,
    backend: str | Callable[..., Any] = "inductor",
    checkpointing: bool = False,
) -> Candidate:
    torch.manual_seed(0)
    with compute.device:
        model = GPT(config)
    model.stack.checkpointing = checkpointing
    ids = torch.randint(config.vocab_size, (2, batch, config.context), device=compute.device)
    return ready(model, (ids[0], ids[1]), compute, backend)


def ready(
    model: nn.Module,
    data: tuple[Tensor, ...],
    compute: Compute,
    backend: str | Callable[..., Any],
) -> Candidate:
    call = torch.compile(model, dynamic=False, backend=backend) if compute.compile else model
    return Candidate(model, call, data, compute)


class Work(Protocol):
    """A model to be measured beside PreNorm's."""

    @property
    def compute(self) -> Compute: ...

    @property
    def rounds(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def is_baseline(self) -> bool:
        """Then there is nothing to be measured beside."""

    def row(self) -> Row:
        """What is known of it before it is measured."""

    def baseline(self, backend: str | Callable[..., Any] = "inductor") -> Candidate: ...

    def candidate(self, backend: str | Callable[..., Any] = "inductor") -> Candidate: ...


@dataclass(frozen=True)
class Job:
    """What a row is about: a residual at a scale."""

    scale: str
    residual: str
    streams: int | None
    memory: str
    batch: int
    rounds: int
    compute: Compute

    @property
    def tokens(self) -> int:
        return self.batch * (
            WIDE["length"] if self.scale == "wide" else PRESETS[self.scale].context
        )

    @property
    def is_baseline(self) -> bool:
        return self.residual == BASELINE

    def row(self) -> Row:
        return {
            "case": "step",
            "scale": self.scale,
            "backend": os.environ.get(VARIABLE, "auto"),
            "tokens": self.tokens,
            "dtype": self.compute.precision,
            "compile": self.compute.compile,
            "memory": self.memory,
            "residual": self.residual,
            "n": self.streams or 1,
        }

    def baseline(self, backend: str | Callable[..., Any] = "inductor") -> Candidate:
        return candidate(self.scale, BASELINE, None, self.batch, self.compute, backend=backend)

    def candidate(self, backend: str | Callable[..., Any] = "inductor") -> Candidate:
        whose = (self.residual, self.streams, self.batch, self.compute, self.memory)
        return candidate(self.scale, *whose, backend)


def planned(
    scale: str,
    residuals: Sequence[str],
    streams: Sequence[int],
    compute: Compute,
    batch: int | None = None,
    rounds: int = 5,
    memories: Sequence[str] = ("store",),
) -> Iterator[Job]:
    """A job for every residual, number of streams and memory mode that it takes."""
    if scale != "wide" and scale not in PRESETS:
        raise ValueError(f"there is no scale {scale!r}: use wide or one of {', '.join(PRESETS)}.")
    batch = batch or BATCH.get(scale, 8)
    for residual in residuals:
        counts = streams if takes(residual, streams=2) else (None,)
        modes = [m for m in memories if m == "store" or takes(residual, memory=m)]
        for n, memory in product(counts, modes):
            yield Job(scale, residual, n, memory, batch, rounds, compute)


def measure_steps(jobs: Iterable[Job]) -> Iterator[Row]:
    """A row for each job. PreNorm is measured again beside each: A B B A, `rounds` times over, so
    that drift cancels.
    """
    baseline, of = None, None
    # One model more than the limit and the next one would silently run uncompiled.
    with torch._dynamo.config.patch(recompile_limit=256):
        for job in jobs:
            model: Candidate | None = None
            row = job.row()
            try:
                if baseline is None or of != job.scale:
                    # First the old one goes: there may not be room for both.
                    baseline = None
                    release(job.compute.device)
                    baseline, of = job.baseline(), job.scale
                if not job.is_baseline:
                    model = job.candidate()
                row |= measured(job, baseline, model)
            except Exception as error:
                row["error"] = sentence(error)
            model = None
            release(job.compute.device)
            yield row


def measured(job: Work, baseline: Candidate, model: Candidate | None) -> Row:
    """The figures of `model` beside PreNorm's; of PreNorm alone without one."""
    if job.compute.device.type == "cuda":
        torch.cuda.set_device(job.compute.device)
    if model is None:
        return alone(baseline, job.rounds, job.tokens)
    return beside(baseline, model, job.rounds, job.tokens)


def alone(model: Candidate, rounds: int, tokens: int) -> Row:
    peak = warm_up(model)
    times = [t for _ in range(2 * rounds) for t in timed(model)]
    return figures(statistics.median(times), statistics.median(times), peak, tokens)


def beside(baseline: Candidate, model: Candidate, rounds: int, tokens: int) -> Row:
    warm_up(baseline)
    peak = warm_up(model)
    times: dict[int, list[float]] = {id(baseline): [], id(model): []}
    for _ in range(rounds):
        for turn in (baseline, model, model, baseline):
            times[id(turn)] += timed(turn)
    before, after = (statistics.median(times[id(x)]) for x in (baseline, model))
    return figures(after, before, peak, tokens)


def figures(ms: float, baseline_ms: float, peak: float | None, tokens: int) -> Row:
    return {
        "ms": ms,
        "tokens_per_s": tokens / ms * 1e3,
        "peak_gib": peak,
        "overhead": ms / baseline_ms - 1,
        "baseline_ms": baseline_ms,
    }


def warm_up(model: Candidate) -> float | None:
    """Compile, and find the most memory in GiB of a step, the other model's not counted."""
    for _ in range(WARM):
        model.step()
    if model.compute.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    there = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - there + model.own_bytes()) / 2**30


def timed(model: Candidate) -> list[float]:
    """Milliseconds of each of `BLOCK` steps; a first one is not counted, it follows the other."""
    model.step()
    if model.compute.device.type != "cuda":
        times = []
        for _ in range(BLOCK):
            begin = time.perf_counter()
            model.step()
            times.append(1e3 * (time.perf_counter() - begin))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(BLOCK + 1)]
    marks[0].record()
    for mark in marks[1:]:
        model.step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def all_residuals() -> list[str]:
    """PreNorm first: the others are read against it."""
    return [BASELINE, *(name for name in residual_names() if name != BASELINE)]
