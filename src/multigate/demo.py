"""The demonstration: two tiny GPTs that differ in nothing but their residual."""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from .analysis.command import AnalyzeConfig, analyze
from .checkpoint import open_run
from .config import ModelChanges, TrainConfig, resolve
from .data import PrepareConfig, Split, TokenData, prepare
from .evals import evaluate
from .evaluate import load_model
from .generate import generate
from .gpt import GPT
from .train import train

RESIDUALS = ("prenorm", "mgr-competitive")
PROMPT = 'class Reader:\n    """Read '
CONTEXT = 128
TOKENS = 65536
"""Of the held-out text, on which the models are compared."""


SAMPLES = 256
"""Windows of it that the report is made from."""


@dataclass(frozen=True)
class DemoConfig:
    """Train two tiny GPTs on the source text of this Python's standard library and compare them."""

    steps: int = 700
    """Training steps of each model."""
    seed: int = 0
    report: Path = Path("demo-report")
    """Where the report on the two goes."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")


def demo(config: DemoConfig | None = None, console: Console | None = None) -> dict[str, float]:
    """Train `RESIDUALS`; print and return their bits per byte on held-out text."""
    config, console = config or DemoConfig(), console or Console()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        text = PrepareConfig(out=Path(place) / "data", sources=("stdlib",), val_share=0.05)
        data = prepare(text, console=console)
        models = {name: _train(name, data, config, Path(place), console) for name in RESIDUALS}
        val = data.split("val")
        scores = {n: evaluate(m, val, 16, TOKENS).bits_per_byte for n, m in models.items()}
        order1 = order1_bits_per_byte(data.split("train"), val, CONTEXT, TOKENS)
        console.print(_table(models, scores, order1))
        _sample(models[RESIDUALS[-1]], data, config.seed, console)
        _report([Path(place) / name for name in RESIDUALS], config.report, console)
        del data, val
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")
    return {"order-1": order1, **scores}


def recipe(config: DemoConfig) -> TrainConfig:
    """The tiny scale's, with shorter windows: on a CPU they learn more in the same time."""
    tiny = resolve("tiny")
    return replace(
        tiny,
        steps=config.steps,
        seed=config.seed,
        device="cpu",
        tokens_per_step=8 * CONTEXT,
        eval_tokens=TOKENS // 4,
        model=ModelChanges(context=CONTEXT),
        optim=replace(tiny.optim, warmup=min(tiny.optim.warmup, config.steps // 4)),
    )


def _train(name: str, data: TokenData, config: DemoConfig, place: Path, console: Console) -> GPT:
    console.rule(name)
    run = replace(recipe(config), residual=name, data=str(data.folder), out=place, name=name)
    if train(run, console).signal is not None:
        raise KeyboardInterrupt
    return load_model(*open_run(place / name, "last"))


def order1_bits_per_byte(train: Split, val: Split, context: int, most: int) -> float:
    """The same windows under p(byte | previous byte): counts on `train`, one added to each."""
    counts = np.ones((256, 256))
    for shard in train.shards:
        pairs = shard[:-1].astype(np.int64) * 256 + shard[1:]
        counts += np.bincount(pairs, minlength=65536).reshape(256, 256)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    windows = val.windows(context)
    chosen = np.linspace(0, windows - 1, min(windows, most // context)).astype(np.int64)
    rows = val.rows(chosen, context)
    return float(bits[rows[:, :-1], rows[:, 1:]].mean() * val.tokens / val.bytes)


def _table(models: dict[str, GPT], scores: dict[str, float], order1: float) -> Table:
    table = Table(title="Held-out text, bits per byte (lower is better)")
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("bits/byte", justify="right")
    table.add_row("order-1 byte counts", "65,536", f"{order1:.3f}")
    for name, model in models.items():
        table.add_row(f"GPT, {name}", f"{model.parameter_count():,}", f"{scores[name]:.3f}")
    return table


def _sample(model: GPT, data: TokenData, seed: int, console: Console) -> None:
    prompt = torch.tensor([list(PROMPT.encode())])
    generator = torch.Generator().manual_seed(seed)
    tokens = generate(model, prompt, 280, temperature=0.7, generator=generator)[0]
    text = data.tokenizer().decode(tokens.tolist()).replace("\0", "\n")
    console.rule(f"What the {RESIDUALS[-1]} model writes")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.rule()


def _report(runs: list[Path], out: Path, console: Console) -> None:
    """What the two look like inside; without the packages for it, which those are."""
    config = AnalyzeConfig(runs=tuple(runs), out=out, samples=SAMPLES, figures=False, device="cpu")
    try:
        analyze(config, console, "multigate demo")
    except (ValueError, OSError) as error:
        console.print(f"No report: {error}", highlight=False, markup=False, soft_wrap=True)
