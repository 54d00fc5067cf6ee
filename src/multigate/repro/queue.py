"""Runs on the devices there are: one a device or several, until all are done or time is up."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from multigate.log import parsed

from .worker import UNSEEN, Job, finished, keep_failure, reason, said

POLL = 0.1
SECONDS_BETWEEN_LINES = 30.0
GRACE = 90.0
"""Seconds that a run has to save and end, before it is ended."""
OUTPUT = "output.txt"
State = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class Outcome:
    """How a run of the queue ended."""

    job: Job
    state: State
    seconds: float
    reason: str = ""
    """Why it has failed; of a finished run, why nobody looked into it."""


@dataclass(frozen=True)
class Clock:
    """When to stop: the budget, and what the person at the keyboard wishes."""

    minutes: float | None = None
    caught: Sequence[int] = ()
    begin: float = field(default_factory=time.monotonic)

    def over(self) -> bool:
        spent = time.monotonic() - self.begin
        return bool(self.caught) or (self.minutes is not None and spent > 60 * self.minutes)


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: str | None
    output: BinaryIO
    begin: float
    asked: float | None = None
    """When it was asked to stop."""


def slots(device: str, at_once: int) -> list[str | None]:
    """A place for each run at a time: the GPU's name in CUDA_VISIBLE_DEVICES, None for a CPU."""
    import torch

    count = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if device == "cuda" and not count:
        raise ValueError("this machine has no cuda device: use --device auto or cpu.")
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    gpus: list[str | None] = list(names[:count]) if names else [str(k) for k in range(count)]
    # One on every GPU first, then the second on each.
    return (gpus or [None]) * at_once


def threads(runs: int) -> int:
    """For each of so many runs at once on the CPU."""
    import torch

    return max(1, torch.get_num_threads() // runs)


def command(told: Path) -> list[str]:
    return [sys.executable, "-m", "multigate.repro.worker", str(told)]


class Queue:
    """Starts jobs in order on free slots; `drain` returns when all have ended."""

    def __init__(
        self,
        places: Sequence[str | None],
        clock: Clock,
        say: Callable[[str], None],
        ended: Callable[[Outcome], None],
    ) -> None:
        self.free, self.clock, self.say, self.ended = deque(places), clock, say, ended
        self.places = len(places)
        self.running = list[Running]()
        self._line = time.monotonic()

    def drain(self, jobs: Iterable[Job]) -> None:
        waiting = deque(jobs)
        try:
            while self.running or (waiting and not self.clock.over()):
                while waiting and self.free and not self.clock.over():
                    self._start(waiting.popleft())
                time.sleep(POLL)
                self._collect()
                if self.clock.over():
                    self._ask()
                self._progress()
        finally:
            # Whatever went wrong here: the closed pipes end the runs, which save first.
            for run in self.running:
                self._close(run)

    def _start(self, job: Job) -> None:
        slot = self.free.popleft()
        told = job.write()
        output = (job.config.folder / OUTPUT).open("wb")
        environment = dict(os.environ)
        if slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot
        elif self.places > 1:
            # With a thread for every core each, runs would wait for each other most of the time.
            environment["OMP_NUM_THREADS"] = str(threads(self.places))
        process = subprocess.Popen(
            command(told),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C is for the command, which asks its runs to stop.
            start_new_session=True,
        )
        self.running.append(Running(job, process, slot, output, time.monotonic()))

    def _collect(self) -> None:
        for run in list(self.running):
            status = run.process.poll()
            if status is None:
                continue
            self.running.remove(run)
            self._close(run)
            self.free.append(run.slot)
            seconds = time.monotonic() - run.begin
            text = (run.job.config.folder / OUTPUT).read_text(errors="replace")
            if status == 0:
                self.ended(Outcome(run.job, "finished", seconds, said(text, UNSEEN)))
            elif run.asked is not None:
                self.ended(Outcome(run.job, "stopped", seconds))
            else:
                why = reason(text, status)
                # A run that is kept already has not failed; only the look into it has.
                state: State = "finished" if finished(run.job.keep) else "failed"
                if state == "failed":
                    keep_failure(run.job, why)
                self.ended(Outcome(run.job, state, seconds, why))

    def _ask(self) -> None:
        now = time.monotonic()
        for run in self.running:
            if run.asked is None:
                run.asked = now
                run.process.terminate()
            elif now - run.asked > GRACE:
                run.process.kill()

    def _close(self, run: Running) -> None:
        if run.process.stdin is not None:
            run.process.stdin.close()
        run.output.close()

    def _progress(self) -> None:
        if time.monotonic() - self._line < SECONDS_BETWEEN_LINES:
            return
        self._line = time.monotonic()
        for run in self.running:
            self.say(f"  {run.job.config.name}: {how_far(run.job.config.folder)}")


def how_far(folder: Path) -> str:
    """The last step in the log of a run that is going on."""
    log = folder / "log.jsonl"
    if log.exists():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            for line in reversed(file.read().splitlines()):
                record = parsed(line)
                if record is not None and record["event"] == "train":
                    loss = record["loss"]
                    return f"step {record['step']}" + (f", loss {loss:.3f}" if loss else "")
    return "starting"
