"""Small runs of the trainer, for its tests."""

import io
import time
from dataclasses import replace

from rich.console import Console

from multigate.config import ModelChanges, resolve
from multigate.data import PrepareConfig, prepare
from multigate.log import read_log
from multigate.train import train

PROSE = """the residual stream of a deep network grows with every layer that writes into it and a
gate decides how much of the new replaces the old so that norms stay bounded while attention reads
"""


def document(seed, words=120):
    """Made-up prose that is the same on every machine and in every Python."""
    known = PROSE.split()
    state = seed * 2654435761 % 2**32 or 1
    chosen = []
    for _ in range(words):
        state = (1664525 * state + 1013904223) % 2**32
        chosen.append(known[(state >> 16) % len(known)])
    return " ".join(chosen) + ".\n"


def write_documents(folder, count=60, words=120):
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        (folder / f"{k:03d}.txt").write_text(document(k + 1, words))
    return folder


def prepared(folder, tokenizer="bytes", count=60, **changes):
    """A prepared data folder of made-up prose."""
    text = write_documents(folder / "text", count)
    config = PrepareConfig(
        out=folder / "data", sources=(str(text),), tokenizer=tokenizer, val_share=0.2, processes=1
    )
    prepare(replace(config, **changes), console=quiet())
    return folder / "data"


def quiet():
    return Console(file=io.StringIO(), width=200)


def small(data, out, model=None, optim=None, **changes):
    """Two blocks of width 32; steps of 4 windows of 32 bytes."""
    tiny = resolve("tiny")
    sizes = {"blocks": 2, "width": 32, "heads": 2, "context": 32, **(model or {})}
    settings = {
        **{"data": str(data), "out": out, "device": "cpu", "steps": 12, "tokens_per_step": 128},
        **{"eval_every": 6, "save_every": 4, "eval_tokens": 512},
        **changes,
    }
    rates = {"warmup": 3, **(optim or {})}
    return replace(
        tiny,
        model=ModelChanges(**sizes),
        optim=replace(tiny.optim, **rates),
        **settings,
    )


def run(config):
    """Train quietly: the result, what was shown, and the log of the steps."""
    console = quiet()
    result = train(config, console)
    return result, console.file.getvalue(), read_log(config.folder)


def wait_for_step(process, config, step):
    """Until the log of a run that is a process of its own has `step`."""
    log = config.folder / "log.jsonl"
    while not (log.exists() and f'"train", "step": {step},' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)


def losses(config):
    return [record["loss"] for record in run(config)[2]]


def numbers(log):
    """What must be the same however often a run was interrupted: not its speed, nor the memory of a
    process that has done more than this run."""
    aside = ("tokens_per_second", "memory_gib")
    return [{k: v for k, v in r.items() if k not in aside} for r in log]
