"""Training runs as their logs tell them, finished or not: the summary and the loss curves."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multigate.log import MOVING_AVERAGE, read_records
from multigate.residuals.base import default_streams

from .chart import Chart, Line, Panel
from .running import Array

POINTS = 500
"""The most points of a curve; each is the mean of the steps it stands for."""
COLUMNS = (
    *("run", "residual", "streams", "parameters", "steps", "train loss", "val loss"),
    *("tokens/s", "memory"),
)


@dataclass(frozen=True)
class RunLog:
    """What a run's folder says without its weights."""

    label: str
    config: Mapping[str, Any]
    train: Mapping[str, Array]
    """By name, one number for every step: step, loss, grad_norm, tokens, tokens_per_second."""
    val: Mapping[str, Array]
    """The same for every evaluation: step, loss, bits_per_byte, ..."""
    parameters: int | None
    problems: Sequence[str] = ()

    @property
    def steps(self) -> int:
        return int(self.train["step"][-1]) if len(self.train["step"]) else 0

    @property
    def train_loss(self) -> float:
        """The mean over the last 200 steps, as the paper reports it."""
        losses = self.train["loss"][np.isfinite(self.train["loss"])]
        return float(np.mean(losses[-MOVING_AVERAGE:])) if len(losses) else math.nan

    @property
    def val_loss(self) -> float:
        return float(self.val["loss"][-1]) if len(self.val["loss"]) else math.nan


def read_run(folder: Path, label: str) -> RunLog:
    """The run in `folder`; what is missing or damaged is said, the rest is read."""
    problems = []
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
        problems.append(f"{label}: {folder} has no config.toml, so its settings are not known.")
    except (OSError, ValueError) as error:
        config = {}
        problems.append(f"{label}: its config.toml cannot be read ({error}).")
    if not isinstance(config.get("model", {}), dict) or not isinstance(config.get("steps", 0), int):
        config = {}
        problems.append(f"{label}: its config.toml is not one of `multigate train`.")
    try:
        records, damaged = read_records(folder)
    except OSError as error:
        records, damaged = [], 0
        problems.append(f"{label}: its log.jsonl cannot be read ({error.strerror}).")
    if damaged:
        count = "1 line was" if damaged == 1 else f"{damaged} lines were"
        problems.append(f"{label}: {count} left out of log.jsonl, which cannot be read there.")
    if not any(record["event"] == "train" for record in records):
        problems.append(f"{label}: {folder} has no log of training steps, so there is no curve.")
    counts = [r.get("parameters") for r in records if r["event"] == "start"]
    starts = [count for count in counts if isinstance(count, int)]
    return RunLog(
        label,
        config,
        columns(records, "train", ("step", "loss", "grad_norm", "tokens_per_second")),
        columns(records, "val", ("step", "loss", "bits_per_byte", "memory_gib")),
        starts[-1] if starts else None,
        problems,
    )


def columns(
    records: Sequence[Mapping[str, Any]], event: str, names: Sequence[str]
) -> dict[str, Array]:
    """The records of one kind, column by column; what a record lacks is NaN."""
    chosen = [record for record in records if record["event"] == event]
    return {name: np.array([number(r.get(name)) for r in chosen], float) for name in names}


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def labels(folders: Sequence[Path]) -> list[str]:
    """A short name for each run: its folder's, with the one above where two are the same."""
    short = [folder.name for folder in folders]
    long = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    chosen = [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]
    return [
        label if chosen.count(label) == 1 else f"{label} ({k + 1})"
        for k, label in enumerate(chosen)
    ]


def row(log: RunLog, parameters: int | None = None) -> list[str]:
    """The run's row of the summary, under `COLUMNS`."""
    speed, memory = log.train["tokens_per_second"], log.val["memory_gib"]
    # The first half may hold compilation and warming up.
    usual = np.nanmedian(speed[len(speed) // 2 :]) if np.isfinite(speed).any() else math.nan
    most = np.nanmax(memory) if np.isfinite(memory).any() else math.nan
    count = parameters or log.parameters
    steps = f"{log.steps:,}"
    if log.config.get("steps", log.steps) > log.steps:
        steps += f" of {log.config['steps']:,}"
    return [
        log.label,
        str(log.config.get("residual", "?")),
        streams(log.config),
        f"{count:,}" if count else "?",
        steps,
        said(log.train_loss, ".4f"),
        said(log.val_loss, ".4f"),
        said(usual, ",.0f"),
        said(most, ".2f") + (" GiB" if math.isfinite(most) else ""),
    ]


def streams(config: Mapping[str, Any]) -> str:
    """How many a run has; a dash where its residual takes no number of them."""
    given = config.get("model", {}).get("streams")
    try:
        usual = default_streams(config["residual"])
    except (KeyError, ValueError):
        return "?" if given is None else str(given)
    return "-" if usual is None else str(usual if given is None else given)


def said(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "?"


def charts(logs: Sequence[RunLog]) -> list[Chart]:
    """Loss over steps, train and val; gradient norm and speed."""
    drawn = {k: log for k, log in enumerate(logs) if len(log.train["step"])}
    absent = [
        f"{log.label} has no steps in its log." for k, log in enumerate(logs) if k not in drawn
    ]
    losses = [
        Panel("training loss", "step", "loss", curves(drawn, "loss")),
        Panel(
            "held-out loss",
            "step",
            "loss",
            [
                Line(log.label, log.val["step"], log.val["loss"], k)
                for k, log in drawn.items()
                if len(log.val["step"])
            ],
        ),
    ]
    others = [
        Panel("gradient norm", "step", "norm", curves(drawn, "grad_norm"), log_y=True),
        Panel("speed", "step", "tokens/s", curves(drawn, "tokens_per_second")),
    ]
    return [
        Chart(
            "loss",
            "Loss",
            "Mean cross entropy of a token in nats, in training (averaged over neighbouring steps) "
            "and on held-out text.",
            losses if drawn else (),
            claim="MGR ends below PreNorm, mHC-lite and both Attention Residuals at every size at "
            "which they were trained.",
            seen=compared(list(drawn.values())),
            absent=absent,
        ),
        Chart(
            "training",
            "Gradient norm and speed",
            "The norm of the whole gradient before clipping, and tokens a second, averaged over "
            "neighbouring steps.",
            others if drawn else (),
            absent=absent,
        ),
    ]


def curves(logs: Mapping[int, RunLog], name: str) -> list[Line]:
    """A line for each run, in the colour of its place among all."""
    found = []
    for k, log in logs.items():
        x, y = thinned(log.train["step"], log.train[name])
        found.append(Line(log.label, x, y, k))
    return found


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """At most `POINTS` points: means over neighbours, without what is not finite."""
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(x) == 0:
        return x, y
    parts = min(POINTS, max(1, len(x) // 5))
    groups = np.array_split(np.arange(len(x)), parts)
    return np.array([x[g].mean() for g in groups]), np.array([y[g].mean() for g in groups])


def compared(logs: Sequence[RunLog]) -> str:
    """The last val losses, best first, and their distance from the best."""
    scored = sorted((log for log in logs if math.isfinite(log.val_loss)), key=lambda r: r.val_loss)
    if not scored:
        return ""
    best = scored[0]
    text = f"Lowest held-out loss: {best.label}, {best.val_loss:.4f}"
    rest = [f"{log.label} +{log.val_loss - best.val_loss:.4f}" for log in scored[1:]]
    unfinished = [log.label for log in logs if log.config.get("steps", 0) > log.steps]
    late = f" Not finished: {', '.join(unfinished)}." if unfinished else ""
    return text + (f"; {', '.join(rest)}." if rest else ".") + late
