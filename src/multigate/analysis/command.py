"""`multigate analyze` and `multigate report`: from runs to a page, figures and numbers."""

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from multigate.data.optional import optional
from multigate.device import choose

from . import logs
from .chart import Report, Section
from .draw import draw
from .measure import sections
from .page import page
from .store import save
from .subjects import Subject, Text, find

KINDS = ("figures/*.png", "figures/*.pdf", "numbers/*.npz", "numbers/*.json", "numbers/*.csv")
"""Of files beside the page."""


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


@dataclass(frozen=True)
class Made:
    """What came of it."""

    path: Path
    """The page."""
    measured: int
    """How many runs could be looked into."""
    problems: Sequence[str]
    """A sentence for each thing that could not be had."""


def analyze(
    config: AnalyzeConfig, console: Console | None = None, command: str | None = None
) -> Made:
    """Measure every run that can be, and write the report.

    `command` is what the page says to type for the same; None makes it from `config`.
    """
    console = console or Console()
    subjects, problems = find(config.runs)
    make_room(config.out)
    compute = choose(config.device, config.precision)
    text = Text(config.data, config.split, config.samples, config.prune_samples)
    for subject in subjects:
        problems += subject.log.problems
        label = subject.log.label
        try:
            subject.look_into(config.checkpoint, text, config.batch, compute, console)
        except (ValueError, OSError) as error:
            problems.append(f"{label}: {error}")
        except torch.OutOfMemoryError:
            problems.append(f"{label}: the GPU's memory is full: give a smaller --batch.")
    # Measured runs come first, so that a run has one colour in all figures.
    subjects.sort(key=lambda subject: not subject.measured)
    measured = {s.log.label: s.measured for s in subjects if s.measured}
    texts = {s.log.label: s.text for s in subjects if s.text}
    words = "; ".join(dict.fromkeys(texts.values()))
    if len(set(texts.values())) > 1:
        words = "; ".join(f"{label}: {text}" for label, text in texts.items())
        problems.append("The runs were measured on different text: numbers may not be compared.")
    save(measured, config.out / "numbers")
    subtitle = [words, command or command_line("analyze", config)]
    path = publish(config, subtitle, subjects, sections(measured), problems, console)
    return Made(path, len(measured), problems)


def report(config: ReportConfig, console: Console | None = None) -> Made:
    """The report of training alone."""
    subjects, problems = find(config.runs)
    make_room(config.out)
    problems += [problem for s in subjects for problem in s.log.problems]
    subtitle = [command_line("report", config)]
    path = publish(config, subtitle, subjects, [], problems, console or Console())
    return Made(path, 0, problems)


def make_room(out: Path) -> None:
    """Make the folder of the report, without the files of an earlier one; say now what would be
    in the way after minutes of measuring."""
    for package in ("jinja2", "plotly"):
        optional(package, "plot", "the report")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / "report.html").exists():
            old = [path for kind in KINDS for path in out.glob(kind)]
            for path in [*old, out / "report.html"]:
                path.unlink()
        (out / "report.html").touch()
        (out / "report.html").unlink()
    except OSError as error:
        raise OSError(
            f"the report cannot be kept in {out} ({error.strerror}): choose a folder that can be "
            "written to with --out."
        ) from None


def publish(
    config: AnalyzeConfig | ReportConfig,
    subtitle: Sequence[str],
    subjects: Sequence[Subject],
    found: Sequence[Section],
    problems: list[str],
    console: Console,
) -> Path:
    """Write the figures and the page, and say where they are and what could not be had."""
    runs = [s.log for s in subjects]
    contents = [Section("Training", logs.charts(runs)), *found]
    if config.figures:
        try:
            drawn = [chart for section in contents for chart in section.charts]
            draw(drawn, config.out / "figures")
        except ValueError as error:
            problems.append(str(error))
    rows = [logs.row(s.log, s.parameters) for s in subjects]
    columns = list(logs.COLUMNS)
    if any(s.checkpoint for s in subjects):
        columns.append("at step")
        rows = [[*row, s.checkpoint or "-"] for row, s in zip(rows, subjects, strict=True)]
    made = Report(
        title=" vs ".join(run.label for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        subtitle=" · ".join(part for part in [*subtitle, date.today().isoformat()] if part),
        columns=columns,
        rows=rows,
        sections=contents,
        problems=problems,
    )
    path = config.out / "report.html"
    path.write_text(page(made), encoding="utf-8")
    for problem in problems:
        console.print(problem, highlight=False, markup=False, soft_wrap=True)
    console.print(f"The report: {path.resolve()}", highlight=False, markup=False, soft_wrap=True)
    return path


def command_line(command: str, config: AnalyzeConfig | ReportConfig) -> str:
    """What to type for the same report; settings that are as usual are left out."""
    words = ["multigate", command, *map(str, config.runs)]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is not MISSING and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)
