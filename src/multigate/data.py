"""Text to train on: the source of the Python standard library, which every Python has, as bytes."""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tokens = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]
"""One long row of token ids."""

# Not code that people write by hand: test data, generated tables, and other people's packages.
SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The .py files of the standard library (or of `root`), in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = sorted(f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(
            f"{root} holds no .py file: this Python comes without the source of its standard "
            "library; pass a folder of .py files instead."
        )
    return files


def byte_corpus(root: Path | None = None, val_share: float = 0.05) -> tuple[Tokens, Tokens]:
    """All source text as bytes, split by file into training and validation.

    A file's split follows from the hash of its path alone, so it is the same on every machine;
    files end with a zero byte.
    """
    base = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in stdlib_files(root):
        name = file.relative_to(base).as_posix().encode()
        draw = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64
        parts[draw < val_share].append(file.read_bytes() + b"\0")
    train, val = (np.frombuffer(b"".join(p), dtype=np.uint8) for p in parts)
    if not len(val) or not len(train):
        raise ValueError(f"{base} is too small to split into training and validation text.")
    return train, val


def windows(
    tokens: Tokens, length: int, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`batch` random windows of `length` tokens, and the same moved on by one as targets."""
    if len(tokens) <= length:
        raise ValueError(f"{len(tokens)} tokens are too few for windows of {length}.")
    starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
    picked = np.stack([tokens[s : s + length + 1] for s in starts.tolist()])
    rows = torch.from_numpy(picked.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
