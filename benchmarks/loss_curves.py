"""Do runs that should be alike learn alike? Draws loss curves, and their distance from the first.

    python benchmarks/loss_curves.py RUN RUN [RUN ...] --out benchmarks/results/memory_curves

RUN is the folder of a run of `multigate train`; the first is what the others are compared with, and
one that repeats it shows how far two runs of the same settings are apart. Writes OUT.json, the mean
of every 10 steps and the held-out loss at the end, and OUT.png.
"""

import argparse
import json
from pathlib import Path

import numpy as np

SPAN = 10
"""Steps that a point is the mean of."""


def read(run):
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = np.array([r["loss"] for r in records if r["event"] == "train"])
    points = losses[: len(losses) // SPAN * SPAN].reshape(-1, SPAN).mean(1)
    held_out = [r["loss"] for r in records if r["event"] == "val"]
    return {"train": points.round(5).tolist(), "val": round(held_out[-1], 5)}


def draw(runs, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    (first, base), *others = runs.items()
    steps = SPAN * np.arange(1, len(base["train"]) + 1)
    for name, run in runs.items():
        left.plot(steps, run["train"], label=name, lw=1)
    for i, (name, run) in enumerate(others, 1):
        distance = np.subtract(run["train"], base["train"])
        right.plot(steps, distance, label=name, lw=1, color=f"C{i}")
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel=f"loss - that of {first}")
    right.axhline(0, color="C0", lw=0.8)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="files to write, without ending")
    args = parser.parse_args()
    runs = {run.name: read(run) for run in args.runs}
    for name, run in runs.items():
        print(f"{name}: train {run['train'][-1]:.4f}, val {run['val']:.4f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(runs) + "\n")
    draw(runs, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
