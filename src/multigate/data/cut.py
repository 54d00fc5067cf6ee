"""Held-out text from a few files: the end of each, whole documents being too few to choose from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .readers import FilePart
from .sources import Part

FEW = 3
"""Documents that should be held out at least, or the files are cut instead."""
SMALLEST_END = 1000
"""Bytes that are held out of a file at least; `share` is raised for that, up to `MOST`."""
MOST = 0.2


@dataclass(frozen=True)
class CutPart:
    """The first part of a text file, or the last `share` of it, from a line's end on."""

    whole: FilePart
    share: float
    held_out: bool

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def size(self) -> int | None:
        size = self.whole.size
        share = self.share if self.held_out else 1 - self.share
        return None if size is None else int(size * share)

    def stamp(self) -> str:
        return f"{self.whole.stamp()} {'end' if self.held_out else 'begin'} {self.share}"

    def mark(self) -> None:
        pass

    def read(self, skip: int = 0, mark: None = None) -> Iterator[str]:
        for text in self.whole.read(skip):
            place = int(len(text) * (1 - self.share))
            place = text.find("\n", place, len(text) - 1) + 1 or place
            yield text[place:] if self.held_out else text[:place]


def cut(parts: Sequence[Part], share: float) -> tuple[list[Part], list[Part]] | None:
    """What to train on and what to hold out, if these are text files, and few; else None."""
    files = [p for p in parts if isinstance(p, FilePart) and p.is_one_document]
    if share == 0 or len(files) < len(parts) or len(files) * share >= FEW:
        return None
    known = [f.size for f in files if f.size is not None]
    needed = SMALLEST_END * len(known) / max(1, sum(known)) if known else 0.0
    if needed > MOST:
        return None
    share = max(share, needed)
    train: list[Part] = [CutPart(f, share, held_out=False) for f in files]
    return train, [CutPart(f, share, held_out=True) for f in files]
