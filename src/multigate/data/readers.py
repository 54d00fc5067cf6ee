"""The documents of one file: text, JSON lines or parquet by its ending, compressed or not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigate.names import unknown

from .compressed import ENDINGS, is_damage, open_bytes
from .optional import optional


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file of a source."""

    path: Path
    key: str = "text"
    """Where the text of a document is, in JSON lines and parquet."""

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int | None:
        """Bytes of text, where they are known before reading."""
        return self.path.stat().st_size if self._kind() == "text" else None

    def stamp(self) -> str:
        """Another one as soon as the file is another one."""
        stat = self.path.stat()
        return f"{self.path.name} {stat.st_size} {stat.st_mtime_ns}"

    def mark(self) -> None:
        """Nothing is needed beside the number of documents to go on from a place."""

    def read(self, skip: int = 0, mark: None = None) -> Iterator[str]:
        """The documents after the first `skip`, which are passed over without decoding them."""
        with said(self.path):
            match self._kind():
                case "parquet":
                    yield from parquet_documents(self.path, self.key, skip)
                case "jsonl":
                    yield from jsonl_documents(self.path, self.key, skip)
                case _:
                    if skip == 0:
                        yield text_document(self.path)

    @property
    def is_one_document(self) -> bool:
        return self._kind() in ("text", "compressed")

    def _kind(self) -> str:
        endings = [s for s in self.path.suffixes if s not in ENDINGS]
        if self.path.suffix in ENDINGS:
            return "jsonl" if endings[-1:] == [".jsonl"] else "compressed"
        return {".jsonl": "jsonl", ".parquet": "parquet"}.get(self.path.suffix, "text")


@contextmanager
def said(file: Path) -> Iterator[None]:
    """Turn what can go wrong below a reader into one sentence with the file's name."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} holds text that is not UTF-8 (at byte {error.start} of a document)."
        ) from error
    except Exception as error:
        if is_damage(error):
            raise ValueError(f"{file} cannot be decompressed ({error}): fetch it again.") from error
        if isinstance(error, OSError):
            raise OSError(f"{file} cannot be read: {error.strerror or error}.") from error
        raise


def text_document(file: Path) -> str:
    with open_bytes(file) as stream:
        data = stream.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (at byte {error.start}): convert it, or leave it out with a "
            "pattern."
        ) from error


def jsonl_documents(file: Path, key: str, skip: int) -> Iterator[str]:
    with open_bytes(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            if skip:
                skip -= 1
                continue
            yield json_text(f"{file} line {number}", line, key)


def json_text(where: str, line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text (at byte {error.start} of the line)."
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON ({error.msg}): a .jsonl file has one object on every line."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object with the key {key!r}.")
    if key not in record:
        raise ValueError(f"{where}: {unknown('key', key, record)}")
    return checked(record[key], where, key)


def checked(text: Any, where: str, key: str) -> str:
    """The text itself; null counts as an empty document."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {key!r} is not text but {type(text).__name__}.")
    return text


def parquet_documents(file: Path, key: str, skip: int) -> Iterator[str]:
    parquet = optional("pyarrow.parquet", "data", f"reading {file.name}")
    arrow = optional("pyarrow", "data", f"reading {file.name}")
    try:
        table = parquet.ParquetFile(file)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a parquet file ({first_line(error)}).") from error
    with table:
        names = table.schema_arrow.names
        if key not in names:
            raise ValueError(f"{file}: {unknown('column', key, names)}")
        groups = list(range(table.num_row_groups))
        while groups and skip >= (rows := table.metadata.row_group(groups[0]).num_rows):
            skip -= rows
            groups.pop(0)
        if not groups:
            return
        for batch in table.iter_batches(256, row_groups=groups, columns=[key]):
            texts = batch.column(0).slice(skip).to_pylist()
            skip = max(0, skip - batch.num_rows)
            for text in texts:
                yield checked(text, str(file), key)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
