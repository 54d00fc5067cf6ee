"""`multigate bench`: choose what to measure, measure it, keep the rows, show them."""

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from multigate.device import DTYPES, Compute, choose
from multigate.gpt import PRESETS
from multigate.names import unknown
from multigate.residuals import residual_names
from multigate.residuals.memory import MODES

from .apart import measure_apart
from .arms import Absent, arms, load_rivals
from .cases import CASES, PASSES, Size
from .figure import draw
from .ops import Row, measure_arm
from .results import Results
from .steps import SCALES, Job, all_residuals, measure_steps, planned
from .table import line, show
from .timing import copy_gb_s


@dataclass(frozen=True)
class Sizes:
    """The problems measured where the command line names none."""

    streams: tuple[int, ...]
    sources: tuple[int, ...]
    widths: tuple[int, ...]
    tokens: tuple[int, ...]


FULL = Sizes((2, 4, 8), (5, 9, 25), (768, 1024, 1280, 2048, 4096), (32768,))
# From decoding one token to where a GPU is full.
SWEEP = Sizes((4,), (5,), (768, 1024, 1280), (1, 4, 16, 64, 256, 1024, 4096))
STEP_STREAMS = (4, 8)


@dataclass(frozen=True)
class BenchConfig:
    """Measure the operations and whole training steps, each beside what it is compared with.

    Rows are kept in OUT/MACHINE.json; a run replaces the rows it measures again and leaves the
    others.
    """

    what: Literal["ops", "sweep", "steps", "all"] = "ops"
    """ops: the operations; sweep: the same from 1 to 4096 tokens; steps: training steps; all."""
    cases: tuple[str, ...] = tuple(CASES)
    """gate_pool, depth_pool."""
    passes: tuple[str, ...] = PASSES
    """forward, backward."""
    backends: tuple[str, ...] = ()
    """Such as reference, torch, compile, paper, triton, cuda; none given takes all."""
    streams: tuple[int, ...] = ()
    """Of gate_pool (2 4 8; 4 in the sweep), and of steps with such residuals (4 8)."""
    sources: tuple[int, ...] = ()
    """Of depth_pool (5 9 25; 5 in the sweep)."""
    widths: tuple[int, ...] = ()
    """(768 1024 1280 2048 4096; 768 1024 1280 in the sweep)"""
    tokens: tuple[int, ...] = ()
    """(32768; 1 4 16 64 256 1024 4096 in the sweep)"""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    variant: Literal["competitive", "independent"] = "competitive"
    """The gate of gate_pool."""
    norm: bool = False
    """Also RMSNorm the pooled vector, as the sublayers of a model do."""
    repeats: int = 100
    """Calls timed at least, of which the median is taken."""
    scales: tuple[str, ...] = SCALES
    """Of the steps: presets of the GPT, and wide, four blocks of width 4096."""
    residuals: tuple[str, ...] = ()
    """Of the steps; none given takes all."""
    memory: tuple[str, ...] = ("store",)
    """Of the steps: store, recompute, invert, exact, for residuals that have them."""
    batch: int | None = None
    """Sequences a step; None takes the scale's own."""
    rounds: int = 5
    """Of PreNorm, residual, residual, PreNorm, four steps each."""
    jobs: int = 1
    """Of the steps: so many are compiled at once, in processes of their own, and then measured one
    by one with nothing beside them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the steps; auto: on a GPU."""
    out: Path = Path("benchmarks/results")
    machine: str | None = None
    """The name of the file; None takes the GPU's."""
    rivals: Path = Path("benchmarks")
    """A folder with paper_fusion.py and peers.py, which bring further arms."""

    def __post_init__(self) -> None:
        known = {
            "cases": ("case", list(CASES)),
            "passes": ("pass", list(PASSES)),
            "scales": ("scale", [*PRESETS, "wide"]),
            "residuals": ("residual", residual_names()),
            "memory": ("memory", list(MODES)),
        }
        for name, (what, allowed) in known.items():
            for value in getattr(self, name):
                if value not in allowed:
                    raise ValueError(unknown(what, value, allowed))
        for name in ("streams", "sources", "widths", "tokens"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"{name} must be at least 1 each, got {getattr(self, name)}.")
        for name in ("repeats", "rounds", "batch", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")


def bench(config: BenchConfig, console: Console | None = None) -> Results:
    """Measure, and write every row as soon as it is there."""
    console = console or Console()
    compute = choose(config.device, config.dtype, config.compile)
    cuda = compute.device.type == "cuda"
    load_rivals(config.rivals, console.print)
    names = [arm.name for case in CASES for arm in arms(case)]
    for name in config.backends:
        if name not in names:
            raise ValueError(unknown("backend", name, list(dict.fromkeys(names))))
    machine = torch.cuda.get_device_name(compute.device) if cuda else platform.machine()
    copy = copy_gb_s(compute.device) if cuda else copy_gb_s(compute.device, 1 / 64, 10)
    path = config.out / f"{config.machine or file_name(machine)}.json"
    results = Results(path, machine, copy, **versions())
    console.print(f"{machine}: a copy moves {copy:.0f} GB/s", highlight=False)
    fresh = list[Row]()
    for row in measured(config, compute, copy, console):
        fresh.append(results.add(row))
        console.print(line(row), highlight=False, markup=False, soft_wrap=True)
    show(fresh, console)
    if path.exists():
        console.print(f"kept in {path}", highlight=False, soft_wrap=True)
        try:
            draw(results.rows, path.with_suffix(".png"), machine)
        except ValueError as error:
            # The measurements are worth more than their picture.
            console.print(str(error), highlight=False)
    return results


def measured(config: BenchConfig, compute: Compute, copy: float, console: Console) -> Iterator[Row]:
    for what, sizes in (("ops", FULL), ("sweep", SWEEP)):
        if config.what in (what, "all"):
            yield from measured_ops(config, sizes, compute, copy, console)
    if config.what in ("steps", "all"):
        jobs = [job for scale in config.scales for job in planned_steps(config, scale, compute)]
        if config.jobs == 1:
            yield from measure_steps(jobs)
        else:
            many = f"{len(jobs)} steps, {config.jobs} at a time"
            console.print(f"{many}: first they are compiled, then measured one by one")
            yield from measure_apart(jobs, config.jobs)


def planned_steps(config: BenchConfig, scale: str, compute: Compute) -> Iterator[Job]:
    residuals = config.residuals or all_residuals()
    streams = config.streams or STEP_STREAMS
    sizes = (config.batch, config.rounds, config.memory)
    return planned(scale, residuals, streams, compute, *sizes)


def measured_ops(
    config: BenchConfig, sizes: Sizes, compute: Compute, copy: float, console: Console
) -> Iterator[Row]:
    dtype = DTYPES[compute.precision]
    for case in config.cases:
        counts = config.streams or sizes.streams
        if case == "depth_pool":
            counts = config.sources or sizes.sources
        cuda = compute.device.type == "cuda"
        chosen = [
            arm
            for arm in arms(case)
            if arm.name in config.backends or (not config.backends and (cuda or not arm.kernel))
        ]
        absent = set[str]()
        problems = product(config.tokens or sizes.tokens, counts, config.widths or sizes.widths)
        for tokens, n, width in problems:
            size = Size(n, width, tokens, dtype, config.variant, config.norm)
            for arm in chosen:
                if arm.name in absent:
                    continue
                try:
                    yield from measure_arm(
                        arm, size, config.passes, compute.device, copy, config.repeats
                    )
                except Absent as error:
                    absent.add(arm.name)
                    console.print(f"{case}, {arm.name}: {error}", highlight=False)


def file_name(machine: str) -> str:
    """NVIDIA H200 -> h200."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-").removeprefix("nvidia-")


def versions() -> dict[str, str | None]:
    try:
        triton: str | None = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"torch": str(torch.__version__), "triton": triton}
