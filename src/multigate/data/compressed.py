"""Compressed files as streams of bytes, by their ending."""

import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from .optional import optional

ENDINGS = (".gz", ".xz", ".zst")
BLOCK = 1 << 17


def open_bytes(file: Path) -> BinaryIO:
    match file.suffix:
        case ".gz":
            return cast(BinaryIO, gzip.open(file, "rb"))
        case ".xz":
            return cast(BinaryIO, lzma.open(file, "rb"))
        case ".zst":
            return io.BufferedReader(ZstdStream(file), 1 << 20)
    return file.open("rb")


def is_damage(error: Exception) -> bool:
    """Whether this is what a decompressor says about a damaged file."""
    # zstandard's own error class exists only where zstandard does.
    known = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    return isinstance(error, known) or type(error).__name__ == "ZstdError"


class ZstdStream(io.RawIOBase):
    """All frames of a .zst file; one that is cut short is an error, which zstandard's own stream
    passes over."""

    def __init__(self, file: Path) -> None:
        zstandard = optional("zstandard", "data", f"reading {file.name}")
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._file = file.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            between = self._frame is None or self._frame.eof
            rest: bytes = self._frame.unused_data if self._frame is not None and between else b""
            data = rest or self._file.read(BLOCK)
            if not data:
                if between:
                    return 0
                raise EOFError("it ends in the middle")
            if between:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
