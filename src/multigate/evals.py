"""How good a model of bytes is, in bits per byte, and the simple model it must beat."""

import math

import numpy as np
import torch

from .data import Tokens
from .gpt import GPT


@torch.no_grad()
def bits_per_byte(model: GPT, tokens: Tokens, batch: int = 16, most: int = 65536) -> float:
    """Mean bits per byte over the first `most` bytes, in windows of the model's context."""
    device, length = model.embed.weight.device, model.config.context
    count = min(most, len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"{len(tokens)} bytes are too few for one window of {length}.")
    rows = torch.from_numpy(
        np.stack([tokens[k * length : (k + 1) * length + 1] for k in range(count)])
    ).long()
    nats = 0.0
    for chunk in rows.split(batch):
        chunk = chunk.to(device)
        nats += model(chunk[:, :-1], chunk[:, 1:]).item() * len(chunk)
    return nats / count / math.log(2)


def order1_bits_per_byte(train: Tokens, val: Tokens, most: int = 65536) -> float:
    """The same text under p(byte | previous byte): counts on `train`, one added to each."""
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=65536).reshape(256, 256) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    val = val[: most + 1]
    return float(bits[val[:-1], val[1:]].mean())
