"""`multigate analyze` and `multigate report`: from runs to a page, figures and numbers."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from multigate.batching import MOST_TOKENS
from multigate.checkpoint import checkpoints, open_run
from multigate.data import open_data
from multigate.device import Compute, choose
from multigate.evaluate import load_model
from multigate.gpt import GPT

from . import logs
from .chart import Report, Section
from .draw import draw
from .measure import Measured, measure, sections
from .page import page
from .store import save


@dataclass(frozen=True)
class AnalyzeConfig:
    """Look into trained runs: every figure of the paper, side by side, as a page and as files."""

    runs: tuple[Path, ...]
    """Folders of runs, or of several runs, or single checkpoints."""
    data: Path | None = None
    """A prepared folder; None takes the one that each run was trained on."""
    split: str = "val"
    samples: int = 512
    """Windows of text, spread evenly over the split."""
    prune_samples: int = 64
    """How many of them are read once more for each block that is pruned."""
    out: Path = Path("analysis")
    """Where report.html, figures/ and numbers/ go."""
    figures: bool = True
    """Whether to write every figure as a PNG and a PDF too."""
    checkpoint: Literal["best", "last"] = "best"
    """best: of the checkpoints that were kept, the one with the lowest val loss."""
    batch: int | None = None
    """Windows computed at once; None chooses."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        for name in ("samples", "prune_samples", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class ReportConfig:
    """Compare training runs by their logs alone, also while they are still running."""

    runs: tuple[Path, ...]
    """Folders of runs, or of several runs."""
    out: Path = Path("report")
    """Where report.html and figures/ go."""
    figures: bool = True
    """Whether to write every figure as a PNG and a PDF too."""


@dataclass
class Subject:
    """A run under analysis: its log, and once it was measured the rest."""

    log: logs.RunLog
    place: Path
    """The run's folder, or the checkpoint that was given."""
    parameters: int | None = None
    text: str = ""
    """Which text it was measured on."""
    measured: Measured | None = None


def analyze(config: AnalyzeConfig, console: Console | None = None) -> Path:
    """Measure every run that can be, and write the report; its path."""
    console = console or Console()
    compute = choose(config.device, config.precision)
    subjects, problems = find(config.runs)
    for subject in subjects:
        problems += subject.log.problems
        try:
            look_into(subject, config, compute, console)
        except (ValueError, OSError) as error:
            problems.append(f"{subject.log.label}: {error}")
        except torch.OutOfMemoryError:
            problems.append(
                f"{subject.log.label}: the GPU's memory is full: give a smaller --batch."
            )
    measured = {s.log.label: s.measured for s in subjects if s.measured is not None}
    if measured:
        save(measured, config.out / "numbers")
    texts = list(dict.fromkeys(s.text for s in subjects if s.text))
    words = ["multigate", "analyze", *map(str, config.runs)]
    subtitle = ["; ".join(texts), date.today().isoformat(), shlex.join(words)]
    found = sections(measured)
    return publish(config, subjects, found, subtitle, problems, console)


def report(config: ReportConfig, console: Console | None = None) -> Path:
    """The report of training alone; its path."""
    subjects, problems = find(config.runs)
    problems += [problem for s in subjects for problem in s.log.problems]
    subtitle = [
        date.today().isoformat(),
        shlex.join(["multigate", "report", *map(str, config.runs)]),
    ]
    return publish(config, subjects, [], subtitle, problems, console or Console())


def find(places: Sequence[Path]) -> tuple[list[Subject], list[str]]:
    """The runs in these folders, and a sentence for each folder without one."""
    found, problems = list[Path](), list[str]()
    for place in places:
        inside = sorted(path for path in place.glob("*") if is_run(path))
        if is_run(place) or is_checkpoint(place):
            found.append(place)
        elif inside:
            found += inside
        elif place.exists():
            problems.append(f"{place} is no run: give a folder that `multigate train` has made.")
        else:
            problems.append(f"{place} does not exist: give the folder of a run.")
    if not found:
        raise FileNotFoundError(" ".join(problems) or "give the folder of at least one run.")
    names = logs.labels([named(place) for place in found])
    return [
        Subject(logs.read_run(run_of(place), name), place)
        for name, place in zip(names, found, strict=True)
    ], problems


def is_run(path: Path) -> bool:
    files = ("log.jsonl", "config.toml")
    return any((path / file).exists() for file in files) or bool(checkpoints(path))


def is_checkpoint(path: Path) -> bool:
    return (path / "state.json").exists()


def run_of(place: Path) -> Path:
    """The folder of the run that `place` is, or belongs to."""
    return place.resolve().parent.parent if is_checkpoint(place) else place


def named(place: Path) -> Path:
    """What a run is called; a checkpoint by its run and its step."""
    run = run_of(place).resolve()
    return run.with_name(f"{run.name}@{place.name}") if is_checkpoint(place) else run


def look_into(subject: Subject, config: AnalyzeConfig, compute: Compute, console: Console) -> None:
    """Measure one run."""
    begin, label = time.perf_counter(), subject.log.label
    path, state = open_run(subject.place, config.checkpoint)
    model = load_model(path, state)
    subject.parameters = model.parameter_count()
    rows, subject.text = text_for(model, state["data"], state["tokenizer"], config)
    model = model.to(compute.device).eval()
    context = model.config.context
    batch = config.batch or max(1, MOST_TOKENS[compute.device.type] // 4 // context)
    with console.status("") as status:

        def progress(what: str, share: float) -> None:
            status.update(f"{label}: {what} {share:.0%}" if share else f"{label}: {what}")

        subject.measured = measure(
            model, rows, config.prune_samples, batch, compute.autocast, progress
        )
    took = time.perf_counter() - begin
    console.print(f"{label}: {path.name}, {subject.text}, {took:.0f} s", highlight=False)


def text_for(
    model: GPT, trained_on: str, tokenizer: str, config: AnalyzeConfig
) -> tuple[Tensor, str]:
    """Windows [samples, context + 1] of the text, and in words which."""
    data = open_data(Path(trained_on) if config.data is None else config.data)
    if data.tokenizer_fingerprint != tokenizer:
        raise ValueError(
            f"it was trained with another tokenizer than that of {data.folder}: prepare the text "
            "with the tokenizer of the run's data."
        )
    split, context = data.split(config.split), model.config.context
    available = split.windows(context)
    count = min(available, config.samples)
    chosen = np.linspace(0, available - 1, count).astype(np.int64)
    rows = torch.from_numpy(split.rows(chosen, context).astype(np.int64))
    return rows, f"{count} windows of {context} tokens of {data.folder} ({config.split})"


def publish(
    config: AnalyzeConfig | ReportConfig,
    subjects: Sequence[Subject],
    found: Sequence[Section],
    subtitle: Sequence[str],
    problems: list[str],
    console: Console,
) -> Path:
    """Write the figures and the page, and say where they are and what could not be had."""
    runs = [s.log for s in subjects]
    contents = [Section("Training", logs.charts(runs)), *found]
    config.out.mkdir(parents=True, exist_ok=True)
    if config.figures:
        try:
            drawn = [chart for section in contents for chart in section.charts]
            draw(drawn, config.out / "figures")
        except ValueError as error:
            problems.append(str(error))
    made = Report(
        title=" vs ".join(run.label for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        subtitle=" · ".join(part for part in subtitle if part),
        columns=logs.COLUMNS,
        rows=[logs.row(s.log, s.parameters) for s in subjects],
        sections=contents,
        problems=problems,
    )
    path = config.out / "report.html"
    path.write_text(page(made), encoding="utf-8")
    for problem in problems:
        console.print(problem, highlight=False, markup=False, soft_wrap=True)
    console.print(f"The report: {path.resolve()}", highlight=False, markup=False, soft_wrap=True)
    return path
