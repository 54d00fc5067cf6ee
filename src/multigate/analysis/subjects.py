"""The runs under analysis: where they are, and what each is measured on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from multigate.batching import MOST_TOKENS
from multigate.checkpoint import checkpoints, open_run
from multigate.data import open_data
from multigate.device import Compute
from multigate.evaluate import load_model
from multigate.gpt import GPT

from . import logs
from .measure import Measured, measure


@dataclass(frozen=True)
class Text:
    """Which text to measure on."""

    data: Path | None
    """A prepared folder; None takes the run's own."""
    split: str
    samples: int
    prune_samples: int


@dataclass
class Subject:
    """A run under analysis: its log, and once it was looked into the rest."""

    log: logs.RunLog
    place: Path
    """The run's folder, or the checkpoint that was given."""
    checkpoint: str = ""
    parameters: int | None = None
    text: str = ""
    """Which text it was measured on, in words."""
    measured: Measured = field(default_factory=dict)

    def look_into(
        self, which: str, text: Text, batch: int | None, compute: Compute, console: Console
    ) -> None:
        """Measure the run's `which` ("best" or "last") checkpoint; what was measured before an
        error stays."""
        begin, label = time.perf_counter(), self.log.label
        path, state = open_run(self.place, which)
        model = load_model(path, state)
        self.checkpoint, self.parameters = f"{state['step']:,}", model.parameter_count()
        rows, words = windows(model, state, text)
        model = model.to(compute.device).eval()
        context = model.config.context
        batch = batch or max(1, MOST_TOKENS[compute.device.type] // 4 // context)
        self.text = words
        with console.status("") as status:

            def progress(what: str, share: float) -> None:
                status.update(escape(f"{label}: {what}{f' {share:.0%}' if share else ''}"))

            measure(
                model, rows, text.prune_samples, batch, compute.autocast, progress, self.measured
            )
        took = f"{time.perf_counter() - begin:.0f} s"
        line = f"{label}: {path.name}, {words}, {took}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def windows(model: GPT, state: dict[str, object], text: Text) -> tuple[Tensor, str]:
    """Windows [samples, context + 1], evenly spread, and in words which."""
    data = open_data(Path(str(state["data"])) if text.data is None else text.data)
    if data.tokenizer_fingerprint != state["tokenizer"]:
        raise ValueError(
            f"it was trained with another tokenizer than that of {data.folder}: prepare the text "
            "with the tokenizer of the run's data."
        )
    split, context = data.split(text.split), model.config.context
    available = split.windows(context)
    count = min(available, text.samples)
    chosen = np.linspace(0, available - 1, count).astype(np.int64)
    rows = torch.from_numpy(split.rows(chosen, context).astype(np.int64))
    return rows, f"{count} windows of {context} tokens of {data.folder} ({text.split})"


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
