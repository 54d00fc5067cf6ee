"""Writing files so that each is whole or absent, whatever happens meanwhile."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

ASIDE = ".tmp"


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last; Windows has no way to and needs none."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def put_in_place(aside: Path, file: Path) -> None:
    os.replace(aside, file)
    sync_folder(file.parent)


def write_whole(file: Path, data: bytes) -> None:
    aside = file.with_name(file.name + ASIDE)
    with aside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    put_in_place(aside, file)


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode())


class ShardWriter:
    """One shard: bytes are appended aside, `finish` puts the file in its place."""

    def __init__(self, file: Path, item: int) -> None:
        self.file, self._item = file, item
        self._aside = file.with_name(file.name + ASIDE)
        self._hash = hashlib.sha256()
        self._size = 0
        self._stream: BinaryIO = self._aside.open("wb")

    def write(self, tokens: bytes) -> None:
        self._stream.write(tokens)
        self._hash.update(tokens)
        self._size += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Its entry in the header."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        put_in_place(self._aside, self.file)
        tokens = self._size // self._item
        return {"file": self.file.name, "tokens": tokens, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Leave nothing behind, which on a full disk is what is needed most."""
        # What could not be written is thrown away in any case.
        with suppress(OSError):
            self._stream.close()
        self._aside.unlink(missing_ok=True)
