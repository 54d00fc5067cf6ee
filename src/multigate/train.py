"""A small trainer: AdamW, warm-up and cosine, one device."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .data import Tokens, windows
from .gpt import GPT


@dataclass(frozen=True)
class TrainConfig:
    """How to train; the model is in `GPTConfig`."""

    steps: int = 500
    batch: int = 8
    """Windows of the model's context a step."""
    lr: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    """On matrices only: gates, queries, biases and norm weights are left alone."""
    clip: float = 1.0
    seed: int = 0
    bf16: bool = False
    """Autocast the matrix products to bfloat16."""
    compile: bool = False


@dataclass(frozen=True)
class Progress:
    step: int
    loss: float
    """Training loss in nats."""
    tokens_per_second: float


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def optimizer_for(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; decay on matrices, except those that the residual exempts."""
    exempt = {f"stack.residual.{name}" for name in model.stack.residual.undecayed()}
    decayed = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and n not in exempt}
    others = {n: p for n, p in model.named_parameters() if n not in decayed}
    groups = [
        {"params": list(decayed.values()), "weight_decay": config.weight_decay},
        {"params": list(others.values()), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def train(
    model: GPT,
    tokens: Tokens,
    config: TrainConfig,
    report: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Train `model` in place on random windows of `tokens`; `report` is called after every step."""
    device = model.embed.weight.device
    optimizer = optimizer_for(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    forward = torch.compile(model) if config.compile else model
    begin = time.perf_counter()
    for step in range(config.steps):
        x, y = windows(tokens, model.config.context, config.batch, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        with _precision(device.type, config.bf16):
            loss = forward(x.to(device), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        seconds = time.perf_counter() - begin
        report(Progress(step, loss.item(), (step + 1) * x.numel() / seconds))


def _precision(device: str, bf16: bool) -> AbstractContextManager[object]:
    return torch.autocast(device, dtype=torch.bfloat16) if bf16 else nullcontext()
