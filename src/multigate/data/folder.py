"""The folder that is being prepared: who may write into it, what it holds, what went wrong."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multigate import lock

from .shards import HEADER, PROGRESS, read_header
from .writer import ASIDE

LOCK = ".lock"


@contextmanager
def said(out: Path) -> Iterator[None]:
    """Turn what the system says about writing into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                f"there is no space left for {out}: what is finished is kept, so free some and run "
                "the same command again."
            ) from error
        raise OSError(f"{out} cannot be written: {error.strerror}.") from error


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second preparation out."""
    with lock.locked(out / LOCK, f"another process is preparing {out}: wait until it has ended."):
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


def is_finished(out: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder holds finished data of these settings; others are an error."""
    if not (out / HEADER).exists():
        return False
    check_same(out, read_header(out).get("settings", {}), settings, "data")
    for left in (PROGRESS, LOCK):
        (out / left).unlink(missing_ok=True)
    return True


def read_progress(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """How far an earlier preparation came, if it finished anything."""
    if not (out / PROGRESS).exists():
        strange = sorted({f.name for f in out.iterdir()} - {LOCK, PROGRESS + ASIDE})
        if strange:
            raise ValueError(
                f"{out} holds other files ({strange[0]}) and no prepared data: choose a new folder."
            )
        return None
    progress: dict[str, Any] = json.loads((out / PROGRESS).read_bytes())
    if progress["settings"] != settings and not progress["splits"]:
        return None
    check_same(out, progress["settings"], settings, "a half-finished preparation")
    return progress


def check_same(out: Path, old: dict[str, Any], new: dict[str, Any], what: str) -> None:
    for name in {**old, **new}:
        if old.get(name) == new.get(name):
            continue
        if name.endswith("_stamp"):
            change = f"the {name.removesuffix('_stamp')} files have changed since"
        else:
            change = f"{name} was {old.get(name)!r} and is now {new.get(name)!r}"
        raise ValueError(
            f"{out} holds {what} of other settings: {change}; choose another folder, or delete "
            "this one."
        )


def tidy(out: Path, state: dict[str, Any]) -> None:
    """Remove what an interrupted unit or an abandoned preparation left behind."""
    wanted = {shard["file"] for split in state["splits"].values() for shard in split["shards"]}
    wanted.add((state["tokenizer"] or {}).get("file"))
    for file in [*out.glob("*-[0-9]*.bin"), *out.glob("tokenizer.*"), *out.glob("*" + ASIDE)]:
        if file.name not in wanted:
            file.unlink(missing_ok=True)


def discard(out: Path) -> None:
    """Remove a preparation that came to nothing."""
    tidy(out, {"splits": {}, "tokenizer": None})
    for name in (PROGRESS, LOCK):
        (out / name).unlink(missing_ok=True)
    # It may hold hidden files of somebody else.
    with suppress(OSError):
        out.rmdir()
