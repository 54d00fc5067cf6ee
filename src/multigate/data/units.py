"""A unit of work: documents until there is enough text, written as one shard for each split."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .encode import Chunk, Encoder, Piece
from .sources import Part
from .writer import ShardWriter

CHUNK = 250_000
"""Bytes of text that are encoded at a time; a longer document is a chunk of its own."""


@dataclass(frozen=True)
class Stage:
    """Sources that go to one split, or that a validation split is taken from."""

    split: str
    parts: list[Part]
    val_share: float = 0.0
    limit: float = float("inf")
    """Bytes of text to take."""

    def size(self) -> int | None:
        """Bytes of text, where they are known before reading."""
        total = 0
        for part in self.parts:
            size = part.size
            if size is None:
                return None if self.limit == float("inf") else int(self.limit)
            total += size
        return int(min(total, self.limit))


class Cursor:
    """Reads a stage on from a place, and knows the place it has come to."""

    def __init__(self, stage: Stage, place: dict[str, Any]) -> None:
        self.stage = stage
        self.bytes: int = place["bytes"]
        self.done = False
        self._part, self._documents = place["part"], place["documents"]
        self._texts = self._read(place["mark"])

    def place(self) -> dict[str, Any]:
        parts = self.stage.parts
        mark = parts[self._part].mark() if self._part < len(parts) else None
        return {
            "part": self._part,
            "documents": self._documents,
            "mark": mark,
            "bytes": self.bytes,
        }

    def chunks(self, unit: float, seed: int) -> Iterator[Chunk]:
        """The documents of one unit."""
        begin = self.bytes
        while not self.done and self.bytes - begin < unit:
            texts, first = [], self.bytes
            while self.bytes - first < CHUNK and self.bytes - begin < unit:
                text = self._next()
                if text is None:
                    break
                texts.append(text)
            if texts:
                yield Chunk(texts, self.stage.split, self.stage.val_share, seed)

    def _next(self) -> str | None:
        text = next(self._texts, None) if self.bytes < self.stage.limit else None
        if text is None:
            self.done = True
            return None
        text, size = measured(text)
        self.bytes += size
        return text

    def _read(self, mark: Any) -> Iterator[str]:
        """The documents that have any text."""
        while self._part < len(self.stage.parts):
            for text in self.stage.parts[self._part].read(self._documents, mark):
                self._documents += 1
                if text:
                    yield text
            self._part, self._documents, mark = self._part + 1, 0, None


def measured(text: str) -> tuple[str, int]:
    """A text that can be written as UTF-8, and how long it is then."""
    try:
        return text, len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        # JSON can spell halves of surrogate pairs: pairs are joined, lone halves replaced.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, len(whole.encode())


def write_unit(
    out: Path,
    chunks: Iterator[Chunk],
    encoder: Encoder,
    splits: dict[str, Any],
    report: Callable[[], None],
) -> None:
    """Encode chunks and add a shard to every split that they give tokens to."""
    writers: dict[str, ShardWriter] = {}
    try:
        for pieces in encoder(chunks):
            for split, piece in pieces.items():
                entry = splits.setdefault(split, new_split())
                if split not in writers:
                    file = out / f"{split}-{len(entry['shards']):05d}.bin"
                    writers[split] = ShardWriter(file, encoder.item)
                writers[split].write(piece.tokens)
                count(entry, piece, encoder.item)
            report()
        for split, writer in writers.items():
            splits[split]["shards"].append(writer.finish())
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def new_split() -> dict[str, Any]:
    return {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}


def count(entry: dict[str, Any], piece: Piece, item: int) -> None:
    entry["tokens"] += len(piece.tokens) // item
    entry["documents"] += piece.documents
    entry["bytes"] += piece.text_bytes
