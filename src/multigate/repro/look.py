"""A look into trained runs: `multigate analyze`, and what is kept of it.

OUT/analysis/figures/*.png          every figure
             numbers/NAME.json.gz   every statistic of a run
             about.json             which runs, how much text; it comes last
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigate.config import TrainConfig
from multigate.data.writer import write_json, write_whole

from .queue import POLL, Clock

FOLDER = "analysis"
ABOUT = "about.json"
SAMPLES = 256
"""Windows of the val text."""


def look_into(
    runs: Sequence[Path],
    base: TrainConfig,
    out: Path,
    clock: Clock,
    slot: str | None,
    say: Callable[[str], None],
) -> None:
    """Analyse finished runs and keep the result; what is kept already, or has no time, is left."""
    names = [run.name for run in runs]
    if names == kept_names(out) or clock.over():
        return
    gone = [run.name for run in runs if not (run / "checkpoints").exists()]
    if gone:
        say(f"no analysis: the checkpoints of {', '.join(gone)} are not here")
        return
    place = runs[0].parent / FOLDER
    words = ["--data", base.data, "--out", str(place), "--device", base.device]
    words += ["--checkpoint", "last", "--samples", str(SAMPLES)]
    say(f"analysing {len(runs)} runs")
    place.mkdir(parents=True, exist_ok=True)
    status = analyse([*map(str, runs), *words], place / "output.txt", clock, slot)
    if status is None:
        say("the analysis was stopped: the same command makes it again")
    elif status:
        last = (place / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
        say(f"no analysis: {' '.join(last)}")
    else:
        keep(place, out / FOLDER, names)


def analyse(words: Sequence[str], output: Path, clock: Clock, slot: str | None) -> int | None:
    """`multigate analyze` in a process of its own: its status, None if time was up before."""
    seen = {} if slot is None else {"CUDA_VISIBLE_DEVICES": slot}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "multigate", "analyze", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **seen},
        )
        try:
            while process.poll() is None and not clock.over():
                time.sleep(POLL)
        finally:
            ended = process.poll()
            process.kill()
            process.wait()
    return ended


def keep(place: Path, target: Path, names: Sequence[str]) -> None:
    """Take over the figures as PNG, and the numbers."""
    shutil.rmtree(target, ignore_errors=True)
    for folder in ("figures", "numbers"):
        (target / folder).mkdir(parents=True)
    for figure in sorted(place.glob("figures/*.png")):
        shutil.copyfile(figure, target / "figures" / figure.name)
    for numbers in sorted(place.glob("numbers/*.json")):
        packed = gzip.compress(numbers.read_bytes(), 9, mtime=0)
        write_whole(target / "numbers" / f"{numbers.name}.gz", packed)
    write_json(target / ABOUT, {"runs": list(names), "split": "val", "samples": SAMPLES})


def kept_names(out: Path) -> list[str]:
    """The runs whose analysis is kept."""
    path = out / FOLDER / ABOUT
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def measures(out: Path) -> list[dict[str, Any]]:
    """For each run that was looked into, the numbers behind what the paper says of deep models."""
    found = []
    for name in kept_names(out):
        packed = (out / FOLDER / "numbers" / f"{name}.json.gz").read_bytes()
        found.append({"run": name, **measure(json.loads(gzip.decompress(packed)))})
    return found


def measure(numbers: Mapping[str, Any]) -> dict[str, float | None]:
    """Massive values, angles, gradients and the use of blocks, one number each.

    "deep" is the second half of the blocks.
    """
    arrays = {k: np.array(v, float) for k, v in numbers.items() if k in NEEDED and v is not None}
    if set(arrays) < NEEDED:
        return {}
    largest = arrays["massive.hidden"][:, 0]
    rms, gradient = arrays["dynamics.output_rms"], arrays["dynamics.grad_rms"]
    steps = np.diagonal(arrays["angles.hidden"], 1)
    lost = arrays["pruning.delta_loss"]
    deep = lost[len(lost) // 2 :]
    values = {
        "largest activation": np.max(largest),
        "largest / mean": np.max(largest / arrays["massive.mean"]),
        "output rms, last / first block": rms[-1] / rms[0],
        "gradient rms, first / last block": gradient[0] / gradient[-1],
        "angle to the next block, deep": np.mean(steps[len(steps) // 2 :]),
        "loss without a block, deep, median": np.nanmedian(deep),
        "the same, smallest": np.nanmin(deep),
    }
    return {k: round(float(v), 6) if np.isfinite(v) else None for k, v in values.items()}


NEEDED = {
    *("massive.hidden", "massive.mean", "dynamics.output_rms", "dynamics.grad_rms"),
    *("angles.hidden", "pruning.delta_loss"),
}
