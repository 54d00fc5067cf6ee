"""Documents to token bytes by split, in several processes, with results in order."""

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar, cast

from .tokenizer import Tokenizer

T = TypeVar("T")


class Piece(NamedTuple):
    """What some documents add to one split."""

    tokens: bytes
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class Chunk:
    """Some documents of one source."""

    texts: list[str]
    split: str
    val_share: float = 0.0
    """Of the documents this share goes to the split val instead."""
    seed: int = 0


def split_of(text: bytes, seed: int, val_share: float) -> str:
    """train or val, from the text alone: in any order, and alike for all copies of a text."""
    key = seed.to_bytes(16, "little", signed=True)
    draw = int.from_bytes(hashlib.blake2b(text, key=key, digest_size=8).digest(), "little")
    return "val" if draw < val_share * 2**64 else "train"


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk) -> dict[str, Piece]:
    end = tokenizer.dtype.type(tokenizer.eot).tobytes()
    parts: dict[str, list[bytes]] = {}
    sizes: dict[str, int] = {}
    for text, ids in zip(chunk.texts, tokenizer.encode_batch(chunk.texts), strict=True):
        data = text.encode()
        split = split_of(data, chunk.seed, chunk.val_share) if chunk.val_share else chunk.split
        parts.setdefault(split, []).extend((ids.tobytes(), end))
        sizes[split] = sizes.get(split, 0) + len(data)
    return {s: Piece(b"".join(p), len(p) // 2, sizes[s]) for s, p in parts.items()}


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def start_method() -> str:
    """Forked workers are there at once; elsewhere than on Linux forking is not safe."""
    return "fork" if sys.platform == "linux" else "spawn"


def ahead(items: Iterator[T], count: int = 4) -> Iterator[T]:
    """The same items, taken in a thread that is `count` ahead: decompressing can go on there."""
    end = object()
    with ThreadPoolExecutor(1, "reader") as pool:
        taken = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := taken.popleft().result()) is not end:
            taken.append(pool.submit(next, items, end))
            yield cast(T, item)


class Encoder:
    """Encodes chunks in `processes` processes; one is this one."""

    def __init__(self, tokenizer: Tokenizer, processes: int) -> None:
        self.item = tokenizer.dtype.itemsize
        """Bytes of a token."""
        self._tokenizer, self._processes = tokenizer, processes
        # Bytes are sent to another process no faster than they are encoded. Otherwise only the very
        # first chunk is encoded here: forked workers then know its words already.
        alone = processes == 1 or tokenizer.kind == "bytes"
        self._here: int | None = None if alone else 1
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, chunks: Iterable[Chunk]) -> Iterator[dict[str, Piece]]:
        chunks = iter(chunks)
        with one_thread_each():
            for chunk in islice(chunks, self._here):
                yield encode_chunk(self._tokenizer, chunk)
        if self._here is not None:
            self._here = 0
        try:
            # The workers are forked before there is a second thread.
            pending = deque(self._submit(chunk) for chunk in islice(chunks, 1))
            for chunk in ahead(chunks):
                pending.append(self._submit(chunk))
                if len(pending) > 3 * self._processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process that encodes text has died, perhaps for want of memory: run the same "
                "command again to go on, with fewer processes."
            ) from error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _submit(self, chunk: Chunk) -> Future[dict[str, Piece]]:
        with one_thread_each():
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self._processes,
                    multiprocessing.get_context(start_method()),
                    _start_worker,
                    (self._tokenizer,),
                )
            return self._pool.submit(_encode_in_worker, chunk)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """The package tokenizers starts a thread for every core unless told not to; it is told here
    and not in the worker, because it warns at the moment of the fork."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_worker: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker
    # Ctrl-C reaches the whole group; the main process is the one that answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = tokenizer


def _end_with_parent() -> None:
    """A killed main process cannot stop its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: Chunk) -> dict[str, Piece]:
    return encode_chunk(_worker, chunk)
