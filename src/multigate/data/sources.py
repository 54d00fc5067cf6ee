"""Where text comes from: a word or a path stands for a list of parts, a part for documents."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from .hub import HubPart
from .readers import FilePart

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
HUB_WORDS = {
    "fineweb": "HuggingFaceFW/fineweb:sample-10BT",
    "fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT",
}
KINDS = (
    "stdlib (the source of this Python's standard library), fineweb, fineweb-edu, a Hugging Face "
    "dataset as owner/name or owner/name:subset, hf: before a folder laid out like one, and the "
    "path of a folder, of a text file, .jsonl or .parquet (text and .jsonl also as .gz, .xz, .zst)"
)


class Part(Protocol):
    """A piece of a source whose documents come in a fixed order."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """Bytes of text, where they are known before reading."""

    def stamp(self) -> str:
        """Another one as soon as the part is another one."""

    def read(self, skip: int = 0, mark: Any = None) -> Iterator[str]:
        """The documents after the first `skip`; a `mark` from before makes that quicker."""

    def mark(self) -> Any:
        """What `read` needs beside the number of documents to go on quickly, as JSON."""


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


def folder_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The files below `folder` whose names match, hidden ones left out, in a fixed order."""
    found = (f.relative_to(folder) for f in folder.rglob(pattern) if f.is_file())
    files = sorted(f.as_posix() for f in found if not any(p.startswith(".") for p in f.parts))
    if not files:
        raise FileNotFoundError(f"the folder {folder} holds no file that matches {pattern!r}.")
    return [folder / f for f in files]


def open_source(source: str, text_key: str = "text", pattern: str = "*") -> list[Part]:
    """The parts of a source, in the order in which they are read."""
    if source == "stdlib":
        return [FilePart(file, text_key) for file in stdlib_files()]
    source = HUB_WORDS.get(source, source)
    if not source.startswith("hf:"):
        path = Path(source).expanduser()
        if path.is_dir():
            return [FilePart(file, text_key) for file in folder_files(path, pattern)]
        if path.exists():
            return [FilePart(path, text_key)]
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", source) is None:
            raise FileNotFoundError(f"no source {source!r}: the kinds of source are {KINDS}.")
    name, _, subset = source.removeprefix("hf:").partition(":")
    return [HubPart(name, subset or None, text_key)]


def documents(source: str, text_key: str = "text", pattern: str = "*") -> Iterator[str]:
    """Every document of a source, in order."""
    for part in open_source(source, text_key, pattern):
        yield from part.read()
