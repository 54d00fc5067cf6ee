"""One run in a process of its own: train, measure on val and test, keep; look inside if told.

`python -m multigate.repro.worker JOB.json`. Its standard input is a pipe that nobody writes to:
when it closes, the command that began the run is gone, and the run saves and ends as well.
"""

import gc
import io
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from multigate.checkpoint import open_run
from multigate.config import TrainConfig, from_table, to_table
from multigate.data.shards import read_header
from multigate.data.writer import write_json
from multigate.device import choose
from multigate.evaluate import EvalConfig, evaluate
from multigate.lock import locked
from multigate.log import read_records
from multigate.train import train

from .environment import environment
from .kept import LOG, read_kept, write_kept
from .look import INSIDE, look_into, wanted

FAILED, UNSEEN = "failed: ", "not looked into: "
"""Before the sentence that says why, in what a worker prints."""
SPLITS = ("val", "test")
PATIENCE = 120.0
"""Seconds to wait for an earlier worker of the same run, whose command is gone."""


@dataclass(frozen=True)
class Job:
    """What a worker is told."""

    config: TrainConfig
    keep: Path
    """Where the run is kept."""
    at_once: int = 1
    """How many runs share the device."""
    look: bool = False
    """Whether to look into the model in the end."""

    def write(self) -> Path:
        path = self.config.folder / "job.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {**vars(self), "config": to_table(self.config), "keep": str(self.keep)}
        write_json(path, told)
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        told = json.loads(path.read_text(encoding="utf-8"))
        config = from_table(TrainConfig(), told["config"], str(path))
        return cls(config, Path(told["keep"]), told["at_once"], told["look"])


def work(job: Job) -> int:
    """Train as far as it goes, then look inside; the exit status is 0 once the run is kept."""
    wait_for(job.config.folder)
    if not finished(job.keep) and (status := trained(job)):
        return status
    if job.look and wanted(job.keep, job.config.folder):
        try:
            look_into(job.config, job.keep)
        except Exception as error:
            # The run itself is there, whatever went wrong here.
            traceback.print_exc()
            print(f"{UNSEEN}{sentence(error)}", flush=True)
    return 0


def finished(keep: Path) -> bool:
    return (keep / LOG).exists() and read_kept(keep).finished


def trained(job: Job) -> int:
    """Train, measure and keep a run; the exit status."""
    config = job.config
    result = train(config, Console(soft_wrap=True))
    if result.signal is not None:
        return 128 + result.signal
    compute = choose(config.device, config.precision, config.compile)
    if compute.device.type == "cuda":
        # What the weights and the optimizer took is needed by others on the device.
        gc.collect()
        torch.cuda.empty_cache()
    splits = [split for split in SPLITS if split in read_header(Path(config.data))["splits"]]
    scores = [scored(config, split) for split in splits]
    for score in scores:
        if not math.isfinite(score["loss"]):
            # Such a number would be neither lower nor higher than another.
            raise ArithmeticError(f"the loss on {score['split']} is not finite: it has diverged.")
    _, state = open_run(config.folder, "last")
    found = {**environment(compute), "micro_batch": state["micro_batch"], "at_once": job.at_once}
    (job.keep / INSIDE).unlink(missing_ok=True)
    write_kept(job.keep, config, found, [*read_records(config.folder)[0], *scores])
    return 0


def scored(config: TrainConfig, split: str) -> dict[str, Any]:
    """The last weights on every token of a split, as a record of the log."""
    told = EvalConfig(
        run=config.folder,
        data=Path(config.data),
        split=split,
        checkpoint="last",
        device=config.device,
        precision=config.precision,
    )
    score = evaluate(told, Console(file=io.StringIO()))
    return {
        **{"event": "score", "step": config.steps, "split": split, "loss": score.loss},
        **{"bits_per_byte": score.bits_per_byte, "tokens": score.tokens},
    }


def wait_for(folder: Path) -> None:
    """Until no other process trains the run."""
    begin = time.monotonic()
    while True:
        try:
            with locked(folder / ".lock", f"another process is still training {folder}."):
                return
        except OSError:
            if time.monotonic() - begin > PATIENCE:
                raise
            time.sleep(0.2)


def end_with_the_command() -> None:
    """Ask this process to save and end as soon as the one that began it is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def sentence(error: Exception) -> str:
    """Why the run could not go on, in a line."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, ValueError | OSError | ArithmeticError):
        return lines[0]
    if "out of memory" in str(error):
        return (
            "the GPU's memory is full: use fewer --jobs, or for training a smaller --micro-batch."
        )
    return f"{type(error).__name__}: {lines[0]}"


def reason(output: str, status: int) -> str:
    """What a worker that failed has said; else how it ended."""
    if why := said(output, FAILED):
        return why
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}."
    return f"its process ended with status {status}."


def said(output: str, mark: str) -> str:
    """What a worker has printed behind this mark, if it has."""
    lines = [line for line in output.splitlines() if line.startswith(mark)]
    return lines[-1].removeprefix(mark) if lines else ""


def keep_failure(job: Job, why: str) -> None:
    """Keep a run that could not go on, as far as it came."""
    records, _ = read_records(job.config.folder)
    step = max((record["step"] for record in records), default=0)
    for place in (job.config.out, Path(job.config.data).parent):
        why = why.replace(f"{place}{os.sep}", "")
    failed = {"event": "failed", "step": step, "reason": why}
    write_kept(job.keep, job.config, {}, [*records, failed])


def main(arguments: Sequence[str]) -> int:
    end_with_the_command()
    try:
        return work(Job.read(Path(arguments[0])))
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED}{sentence(error)}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
