"""The demonstration: two tiny GPTs that differ in nothing but their residual."""

import math
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import train as trainer
from .data import Tokens, byte_corpus
from .evals import bits_per_byte, order1_bits_per_byte
from .generate import generate
from .gpt import GPT, preset

RESIDUALS = ("prenorm", "mgr-competitive")
PROMPT = 'class Reader:\n    """Read '
MODEL = preset("tiny", context=128)


def demo(steps: int = 1000, seed: int = 0, console: Console | None = None) -> dict[str, float]:
    """Train `RESIDUALS` on this Python's own source text; print and return their bits per byte."""
    console = console or Console()
    begin = time.perf_counter()
    train_text, val_text = byte_corpus()
    order1 = order1_bits_per_byte(train_text, val_text, MODEL.context)
    console.print(
        f"Text: the Python standard library of this machine, {len(train_text) / 1e6:.1f} MB to "
        f"train on and {len(val_text) / 1e6:.1f} MB held out, as bytes."
    )
    console.print(
        f"Model: {MODEL.blocks} blocks of width {MODEL.width}, {steps} steps on "
        f"{torch.get_num_threads()} CPU threads, once for each residual."
    )
    models = {name: _train(name, train_text, steps, seed, console) for name in RESIDUALS}
    scores = {name: bits_per_byte(model, val_text) for name, model in models.items()}
    console.print(_table(models, scores, order1))
    _sample(models["mgr-competitive"], seed, console)
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")
    return {"order-1": order1, **scores}


def _train(name: str, text: Tokens, steps: int, seed: int, console: Console) -> GPT:
    torch.manual_seed(seed)
    model = GPT(replace(MODEL, residual=name))
    config = trainer.TrainConfig(
        steps=steps, batch=8, lr=2e-3, warmup=min(50, steps // 4), seed=seed
    )
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=30),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, note="")
        smooth = 0.0

        def report(progress: trainer.Progress) -> None:
            nonlocal smooth
            share = max(0.05, 1 / (progress.step + 1))
            smooth += share * (progress.loss / math.log(2) - smooth)
            note = f"{smooth:.2f} bits/byte, {progress.tokens_per_second:,.0f} bytes/s"
            bar.update(task, advance=1, note=note)

        trainer.train(model, text, config, report)
    return model


def _table(models: dict[str, GPT], scores: dict[str, float], order1: float) -> Table:
    table = Table(title="Held-out text, bits per byte (lower is better)")
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("bits/byte", justify="right")
    table.add_row("order-1 byte counts", "65,536", f"{order1:.3f}")
    for name, model in models.items():
        table.add_row(f"GPT, {name}", f"{model.parameter_count():,}", f"{scores[name]:.3f}")
    return table


def _sample(model: GPT, seed: int, console: Console) -> None:
    prompt = torch.tensor([list(PROMPT.encode())])
    generator = torch.Generator().manual_seed(seed)
    tokens = generate(model, prompt, 280, temperature=0.7, generator=generator)[0]
    text = bytes(tokens.tolist()).decode(errors="replace").replace("\0", "\n")
    console.rule("What the mgr-competitive model writes")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.rule()
