"""How good a model of bytes is, in bits per byte, and the simple model it must beat."""

import math

import numpy as np
import torch

from .data import Tokens
from .gpt import GPT


def spread_windows(tokens: Tokens, length: int, most: int) -> Tokens:
    """Rows of `length` + 1 tokens, at most `most` tokens in all, spread evenly over the text."""
    available = (len(tokens) - 1) // length
    if available < 1:
        raise ValueError(f"{len(tokens)} bytes are too few for one window of {length}.")
    count = min(available, max(1, most // length))
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(np.int64)
    return np.stack([tokens[s : s + length + 1] for s in starts])


@torch.no_grad()
def bits_per_byte(model: GPT, tokens: Tokens, batch: int = 16, most: int = 65536) -> float:
    """Mean bits per byte over windows of the model's context."""
    device = model.embed.weight.device
    windows = spread_windows(tokens, model.config.context, most)
    nats = 0.0
    for rows in torch.from_numpy(windows.astype(np.int64)).split(batch):
        rows = rows.to(device)
        nats += model(rows[:, :-1], rows[:, 1:]).item() * len(rows)
    return nats / len(windows) / math.log(2)


def order1_bits_per_byte(train: Tokens, val: Tokens, length: int = 256, most: int = 65536) -> float:
    """The same windows under p(byte | previous byte): counts on `train`, one added to each."""
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=65536).reshape(256, 256) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    windows = spread_windows(val, length, most)
    return float(bits[windows[:, :-1], windows[:, 1:]].mean())
