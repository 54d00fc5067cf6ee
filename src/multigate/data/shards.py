"""Prepared data: a folder of token shards with a header, opened and read through memory maps.

data.json          what it is: tokenizer, vocabulary, dtype, settings, and every shard's sha256
train-00000.bin    token ids one after the other, little-endian, end of text after each document
val-00000.bin      likewise, for each split
tokenizer.json     the tokenizer, where it needs a file
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from multigate.names import unknown

from .tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
HEADER = "data.json"
PROGRESS = "progress.json"
Rows = np.ndarray[tuple[int, int], np.dtype[np.unsignedinteger[Any]]]
"""Windows of tokens, one a row."""


class Split:
    """The shards of one split.

    A *window* is context + 1 tokens of one shard; neighbours share one token, so that every token
    but the first of a shard is a target once.
    """

    def __init__(self, name: str, entry: dict[str, Any], data: "TokenData") -> None:
        self.name, self.dtype, self.fingerprint = name, data.dtype, data.fingerprint
        self.tokens: int = entry["tokens"]
        self.documents: int = entry["documents"]
        self.bytes: int = entry["bytes"]
        """Of the UTF-8 text, without the ends of text."""
        self.shards = [
            np.memmap(data.folder / shard["file"], dtype=data.dtype, mode="r")
            for shard in entry["shards"]
        ]

    def windows(self, context: int) -> int:
        """How many windows there are; having none is an error."""
        return int(self._ends(context)[-1])

    def rows(self, indices: Iterable[int] | np.ndarray[Any, Any], context: int) -> Rows:
        """The windows of these numbers, [len(indices), context + 1], in the dtype on disk."""
        ends = self._ends(context)
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < ends[-1]:
            raise IndexError(f"the split {self.name!r} has windows 0 to {ends[-1] - 1} only.")
        places = np.searchsorted(ends, wanted, side="right")
        inside = wanted - np.concatenate([[0], ends])[places]
        rows: Rows = np.empty((len(wanted), context + 1), self.dtype)
        for place in np.unique(places):
            here = places == place
            rows[here] = windows_of(self.shards[place], context)[inside[here]]
        return rows

    def _ends(self, context: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """For every shard, how many windows there are up to its end."""
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}.")
        ends = np.cumsum([(len(shard) - 1) // context for shard in self.shards])
        if ends[-1] == 0:
            raise ValueError(
                f"the split {self.name!r} has {self.tokens} tokens in {len(self.shards)} shards, "
                f"too few for one window of {context} + 1: prepare more text, or shorten the "
                "context."
            )
        return ends


def windows_of(shard: np.ndarray[Any, Any], context: int) -> np.ndarray[Any, Any]:
    """All windows of a shard as the rows of a matrix; nothing is read or copied yet."""
    shape = ((len(shard) - 1) // context, context + 1)
    strides = (context * shard.itemsize, shard.itemsize)
    return np.lib.stride_tricks.as_strided(shard, shape, strides, writeable=False)


class TokenData:
    """A prepared folder, opened with `open_data`."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder, self.header = folder, header
        self.vocab_size: int = header["vocab_size"]
        self.eot: int = header["eot"]
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(header["dtype"]).newbyteorder("<")
        self.fingerprint = fingerprint(header)
        """The same for the same tokens of the same tokenizer, and for no others."""
        self.tokenizer_fingerprint = digest([header["tokenizer"]["sha256"], self.eot])
        """The same for the same ids of the same text."""

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder, self.header["tokenizer"], self.eot)

    def splits(self) -> list[str]:
        return list(self.header["splits"])

    def split(self, name: str) -> Split:
        if name not in self.header["splits"]:
            raise ValueError(f"{self.folder}: {unknown('split', name, self.splits())}")
        return Split(name, self.header["splits"][name], self)


def open_data(folder: Path | str, verify: bool = True) -> TokenData:
    """Open a prepared folder; `verify` reads every shard and compares its sha256."""
    folder = Path(folder)
    header = read_header(folder)
    splits = header["splits"].values()
    shards = [shard for split in splits for shard in split["shards"]]
    item = np.dtype(header["dtype"]).itemsize
    for shard in shards:
        check_size(folder / shard["file"], item * shard["tokens"])
    if verify:
        entry = header["tokenizer"]
        files = shards if entry["file"] is None else [*shards, entry]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda file: check_hash(folder / file["file"], file["sha256"]), files))
        check_vocabulary(folder, header)
    return TokenData(folder, header)


def read_header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / HEADER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if (folder / PROGRESS).exists():
            raise FileNotFoundError(
                f"{folder} holds a half-finished preparation: run the same `multigate prepare` "
                "again to finish it."
            ) from None
        raise FileNotFoundError(
            f"{folder} holds no prepared data: make it with `multigate prepare`."
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder / HEADER} is damaged: prepare the data again.") from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise ValueError(f"{folder / HEADER} is not the header of prepared data.")
    if header["format"] > FORMAT:
        raise ValueError(
            f"{folder} has format {header['format']} and this multigate reads up to {FORMAT}: "
            "install a newer one."
        )
    return header


def check_size(file: Path, expected: int) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"the shard {file} is missing: prepare the data again.")
    size = file.stat().st_size
    if size != expected:
        raise ValueError(
            f"the shard {file} has {size} bytes instead of {expected}: it was cut short or "
            "changed, prepare the data again."
        )


def check_vocabulary(folder: Path, header: dict[str, Any]) -> None:
    """No token may lie beyond the vocabulary: a model of that size has no row for it."""
    data = TokenData(folder, header)
    for name in data.splits():
        most = max((int(shard.max()) for shard in data.split(name).shards if len(shard)), default=0)
        if most >= data.vocab_size:
            raise ValueError(
                f"{folder} holds the token {most} in the split {name!r}, beyond its vocabulary of "
                f"{data.vocab_size}: prepare the data again."
            )


def check_hash(file: Path, expected: str) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"the file {file} is missing: prepare the data again.")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{file} is damaged (its sha256 is another): prepare the data again.")


def fingerprint(header: dict[str, Any]) -> str:
    splits = {
        name: [shard["sha256"] for shard in split["shards"]]
        for name, split in header["splits"].items()
    }
    return digest([header["tokenizer"]["sha256"], header["eot"], header["dtype"], splits])


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
