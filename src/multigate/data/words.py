"""Encoding word by word with a memory, for byte-level BPEs that split text as GPT-2 does.

GPT-2's pattern

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

cuts a text into words that are encoded one by one, and most words of a text have come before. So
the ids of a word are kept, as the bytes they become in a shard, and a text is a join of them. The
cutting is done by `re`, which has no \\p{..}: the classes are spelled out for the characters of
Unicode 3.2 below U+10000 whose class has not changed since, on which every library agrees; a text
with any other character is left to the library.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

MOST_WORDS = 300_000
"""When more are known all are forgotten, which bounds the memory at about 60 MB a process."""
LONGEST_TEXT = 1 << 20
"""Characters cut into words at a time."""
SPACES = frozenset(
    [*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)]
    + [0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
)


@cache
def stable_classes() -> dict[str, list[int]]:
    """Code points by class: L letter, N number, Z space, O other."""
    classes: dict[str, list[int]] = {"L": [], "N": [], "Z": [], "O": []}
    for point in range(0x10000):
        then = unicodedata.ucd_3_2_0.category(chr(point))
        if then in ("Cn", "Co", "Cs"):
            continue
        now = unicodedata.category(chr(point))
        kinds = [k[0] if k[0] in "LN" else "O" for k in (then, now)]
        if point in SPACES:
            classes["Z"].append(point)
        elif kinds[0] == kinds[1]:
            classes[kinds[0]].append(point)
    return classes


def ranges(points: Iterable[int]) -> str:
    """Code points in the form they have inside the brackets of a pattern."""
    spans: list[list[int]] = []
    for point in sorted(points):
        if spans and spans[-1][1] == point - 1:
            spans[-1][1] = point
        else:
            spans.append([point, point])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in spans)


@cache
def word_pattern() -> re.Pattern[str]:
    classes = stable_classes()
    letter, number, space = (ranges(classes[k]) for k in "LNZ")
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}]+"
        rf"|[{space}]+(?![^{space}])|[{space}]+"
    )


@cache
def unstable_pattern() -> re.Pattern[str]:
    return re.compile(f"[^{ranges(p for points in stable_classes().values() for p in points)}]")


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of bounded length: a word always ends where a line does."""
    begin = 0
    while len(text) - begin > LONGEST_TEXT:
        end = re.compile(r"[^\s]\n").search(text, begin + LONGEST_TEXT)
        if end is None:
            break
        yield text[begin : end.start() + 1]
        begin = end.start() + 1
    yield text[begin:]


class WordEncoder:
    """Encodes texts through the ids of their words, which `encode` gives and `pack` checks."""

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        pack: Callable[[list[int]], np.ndarray[Any, Any]],
    ) -> None:
        self._encode, self._pack = encode, pack
        self._known: dict[str, bytes] = {}

    def __call__(self, text: str) -> bytes | None:
        """The ids of `text` as bytes, or None where it holds an unstable character."""
        parts = []
        for piece in pieces(text):
            words = word_pattern().findall(piece)
            new = set(words).difference(self._known)
            if any(not w.isascii() and unstable_pattern().search(w) for w in new):
                return None
            if new:
                self._learn(list(new))
            parts.append(b"".join(map(self._known.__getitem__, words)))
            if len(self._known) > MOST_WORDS:
                self._known.clear()
        return b"".join(parts)

    def _learn(self, words: list[str]) -> None:
        ids = self._encode(words)
        packed = self._pack(list(chain.from_iterable(ids)))
        data, size, begin = packed.tobytes(), packed.itemsize, 0
        for word, of_word in zip(words, ids, strict=True):
            end = begin + size * len(of_word)
            self._known[word] = data[begin:end]
            begin = end
