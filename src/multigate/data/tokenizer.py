"""Tokenizers behind one small interface, each saved beside the data so that it decodes offline."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigate.names import unknown

Ids = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]
"""The token ids of one text, in the dtype of the shards."""
KINDS = (
    "bytes, bpe:SIZE (trained on the source), gpt2, the path of a .tiktoken file of ranks, or the "
    "path of a tokenizer.json"
)


def dtype_for(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest little-endian dtype that holds every id."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokenizer:
    """What turns text into ids below `vocab_size` and back; `eot` ends every document.

    A text never encodes to `eot`, whatever it contains (but see `ByteTokenizer`).
    """

    kind: str
    file: str | None = None
    """Its file in a data folder."""

    def __init__(self, name: str, vocab_size: int, eot: int) -> None:
        self.name, self.vocab_size, self.eot = name, vocab_size, eot
        self.dtype = dtype_for(vocab_size)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | Ids) -> str:
        raise NotImplementedError

    def to_bytes(self) -> bytes:
        """What its file holds."""
        return b""

    def entry(self) -> dict[str, Any]:
        """Its entry in `data.json`."""
        digest = hashlib.sha256(self.to_bytes()).hexdigest()
        return {"name": self.name, "kind": self.kind, "file": self.file, "sha256": digest}

    def __reduce__(self) -> tuple[Any, ...]:
        """Tokenizers travel to other processes as they are saved."""
        return rebuild, (self.entry(), self.to_bytes(), self.eot)

    def pack(self, ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> Ids:
        """Ids of a text in the shards' dtype: all in the vocabulary, and no end of text."""
        wide = np.asarray(ids, dtype=np.int64)
        if len(wide) and not 0 <= wide.min() <= wide.max() < self.vocab_size:
            raise ValueError(
                f"the tokenizer {self.name!r} gave the token {wide.max()}, beyond its vocabulary "
                f"of {self.vocab_size}."
            )
        if (wide == self.eot).any():
            raise ValueError(
                f"the tokenizer {self.name!r} turns ordinary text into its end of text (token "
                f"{self.eot}): name another token with eot."
            )
        return wide.astype(self.dtype)

    def unpack(self, data: bytes) -> Ids:
        return np.frombuffer(data, dtype=self.dtype)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8; byte 0 is the end of text, also where a text itself contains it."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__("bytes", 256, 0)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        return [self.unpack(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return bytes(ids).decode(errors="replace")


def make_tokenizer(
    word: str, sample: Callable[[], Iterable[str]] = tuple, eot: str | None = None
) -> Tokenizer:
    """The tokenizer a user names; `sample` gives the texts a BPE is trained on.

    `eot` names the end-of-text token of a tokenizer.json that has an unusual one.
    """
    # These two import this module.
    from .bpe import JsonTokenizer, train_bpe
    from .ranks import RanksTokenizer, download_gpt2

    path = Path(word).expanduser()
    if path.suffix == ".json":
        return JsonTokenizer.from_bytes(read_file(path), word, eot)
    if eot is not None:
        raise ValueError(
            f"the tokenizer {word!r} brings its own end of text: leave eot={eot!r} out."
        )
    if word == "bytes":
        return ByteTokenizer()
    if word == "gpt2":
        return RanksTokenizer(download_gpt2(), word)
    if word.startswith("bpe:"):
        return train_bpe(word, sample())
    if path.suffix == ".tiktoken":
        return RanksTokenizer.from_bytes(read_file(path), word)
    raise ValueError(f"unknown tokenizer {word!r}: The kinds are {KINDS}.")


def load_tokenizer(folder: Path, entry: dict[str, Any], eot: int) -> Tokenizer:
    """The tokenizer that was saved in a data folder."""
    file = entry["file"]
    return rebuild(entry, b"" if file is None else read_file(folder / file), eot)


def rebuild(entry: dict[str, Any], data: bytes, eot: int) -> Tokenizer:
    """A tokenizer from its entry and what its file holds."""
    from .bpe import JsonTokenizer
    from .ranks import RanksTokenizer

    match entry["kind"]:
        case "bytes":
            return ByteTokenizer()
        case "json":
            return JsonTokenizer.from_bytes(data, entry["name"], eot)
        case "tiktoken":
            return RanksTokenizer.from_bytes(data, entry["name"])
    raise ValueError(unknown("kind of tokenizer", entry["kind"], ["bytes", "json", "tiktoken"]))


def read_file(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer file {path}.")
    return path.read_bytes()
