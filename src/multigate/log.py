"""Seeing a run: the progress line, log.jsonl always, TensorBoard and Weights & Biases when asked.

log.jsonl has one object a line: {"event": "train", "step": 1, "loss": ...} for every step, exactly
once however often the run was interrupted; "val" for evaluations; "start", "checkpoint", ...
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from .track import TRACKERS, Tracker

MOVING_AVERAGE = 200
"""Steps over which the paper averages its training loss."""
SECONDS_BETWEEN_LINES = 15.0
"""Where the output is no terminal, a plain line this often stands for the moving one."""


def read_log(run: Path, event: str = "train") -> list[dict[str, Any]]:
    """The records of one kind in a run's log, in order."""
    return [record for record in read_records(run)[0] if record["event"] == event]


def read_records(run: Path) -> tuple[list[dict[str, Any]], int]:
    """All records of a run's log, in order, and how many lines of it cannot be read."""
    path = run / "log.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for record in map(parsed, lines) if record is not None]
    return records, len(lines) - len(records)


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line of a log; None for one that was cut off in the middle."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and "event" in record
    return record if whole and isinstance(record.get("step"), int) else None


def rewind(path: Path, step: int) -> None:
    """Drop from a log what came after `step`, and a line that was cut off in the middle."""
    if not path.exists():
        return
    kept = list[bytes]()
    for line in path.read_bytes().splitlines():
        record = parsed(line)
        if record is not None and record["step"] <= step:
            kept.append(line + b"\n")
    aside = path.with_suffix(".rewound")
    with aside.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class Log:
    """What the first process of a run shows and keeps."""

    def __init__(
        self,
        run: Path,
        config: Mapping[str, Any],
        steps: int,
        step: int = 0,
        trackers: Sequence[str] = (),
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.steps = steps
        self.path = run / "log.jsonl"
        rewind(self.path, step)
        # Unbuffered: a line is in the file when it has been written, whatever kills the process.
        self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""
        """Lines that a full disk has refused so far."""
        self._trackers: list[Tracker] = [TRACKERS[t](run, run.name, config, step) for t in trackers]
        self._begin = time.perf_counter()
        self._first: int | None = None
        before = [r["loss"] for r in read_log(run) if r["loss"] is not None]
        self._recent = deque[float](before, maxlen=MOVING_AVERAGE)
        self._shown: dict[str, str] = {}
        self._last_line = self._begin
        self._progress = Progress(
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[line]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=step, line="")
        self._progress.start()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def event(self, event: str, step: int, **values: Any) -> None:
        line = json.dumps({"event": event, "step": step, **values}) + "\n"
        warned = bool(self._unwritten)
        self._unwritten += line.encode()
        try:
            self._write()
        except OSError as error:
            if not warned:
                self.say(f"warning: {self.path} cannot be written ({error.strerror}), trying on")

    def train(
        self, step: int, values: Mapping[str, float | None], shown: Mapping[str, str]
    ) -> None:
        """One finished step: `values` to keep, None for what is not finite; `shown` on the line."""
        self.event("train", step, **values)
        finite = {k: v for k, v in values.items() if v is not None}
        self._track(step, {f"train/{k}": v for k, v in finite.items()})
        if "loss" in finite:
            self._recent.append(finite["loss"])
        loss = sum(self._recent) / len(self._recent) if self._recent else math.nan
        self._shown |= {"loss": f"{loss:.3f}", **shown}
        self._update(step)

    def val(self, step: int, values: Mapping[str, float], shown: Mapping[str, str]) -> None:
        """One evaluation on held-out text."""
        self.event("val", step, **values)
        self._track(step, {f"val/{k}": v for k, v in values.items()})
        self._shown |= shown
        self._update(step, now=not self.console.is_terminal)

    def sync(self) -> None:
        """Until the log is on the disk."""
        try:
            self._write()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written ({error.strerror}): there will be no checkpoint "
                "until it can; free some space."
            ) from None

    def close(self) -> None:
        self._progress.stop()
        with suppress(OSError):
            self._write()
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _write(self) -> None:
        """All that is unwritten, or nothing of it: half a line would spoil the next."""
        end = self.path.stat().st_size
        try:
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten = b""
        except OSError:
            os.truncate(self.path, end)
            raise

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(step, values)

    def _update(self, step: int, now: bool = False) -> None:
        if self._first is None:
            # The first step compiles: how long the others take is seen from its end.
            self._first, self._begin = step, time.perf_counter()
        done, elapsed = step - self._first, time.perf_counter() - self._begin
        eta = clock(elapsed / done * (self.steps - step)) if done else "?"
        parts = [f"{k} {v}" for k, v in self._shown.items()]
        line = f"step {step}/{self.steps}  " + "  ".join([*parts, f"ETA {eta}"])
        self._progress.update(self._task, completed=step, line=line)
        waited = time.perf_counter() - self._last_line
        if not self.console.is_terminal and (now or waited > SECONDS_BETWEEN_LINES):
            self._last_line = time.perf_counter()
            self.say(line)


class Silent(Log):
    """What every other process has in the place of a log."""

    def __init__(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def event(self, event: str, step: int, **values: Any) -> None:
        pass

    def train(
        self, step: int, values: Mapping[str, float | None], shown: Mapping[str, str]
    ) -> None:
        pass

    def val(self, step: int, values: Mapping[str, float], shown: Mapping[str, str]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
