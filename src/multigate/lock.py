"""One process at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(file: Path, sentence: str) -> Iterator[None]:
    """Hold the lock `file`; `sentence` is the error if another process does.

    The lock goes with the process, also with a killed one. Windows has none.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise OSError(sentence) from error
        yield
