"""Losses of 30 tiny steps for each residual, as they were when they were last looked at.

`python tests/golden.py` writes them anew into tests/golden.json: only after a change that is meant
to change what is computed, and said in the changelog.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import multigate as mg
from multigate.config import ModelChanges, resolve
from runs import losses, prepared

FILE = Path(__file__).with_name("golden.json")
STEPS = 30


def golden_losses(residual, data, out):
    """The tiny scale with its own recipe, on short windows of made-up prose."""
    tiny = resolve("tiny")
    config = replace(
        tiny,
        residual=residual,
        data=str(data),
        out=Path(out),
        device="cpu",
        steps=STEPS,
        tokens_per_step=256,
        eval_every=STEPS,
        model=ModelChanges(context=64),
        optim=replace(tiny.optim, warmup=10),
    )
    return losses(config)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        data = prepared(Path(place))
        found = {
            name: [round(loss, 6) for loss in golden_losses(name, data, place)]
            for name in mg.residual_names()
        }
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
