"""How far a preparation is, and a bar that shows it."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Progress:
    """What `prepare` reports."""

    bytes: int = 0
    """Of text, encoded so far."""
    total: int | None = None
    """Of text, where it is known before reading."""
    tokens: int = 0
    documents: int = 0
    note: str = ""
    """A sentence for the user, in a report of its own."""


@contextmanager
def progress_bar(console: "Console | None" = None) -> Iterator[Callable[[Progress], None]]:
    """A function that draws a bar from what it is told; without rich it does nothing."""
    if importlib.util.find_spec("rich") is None:
        yield lambda progress: None
        return
    from rich import progress as rich

    bar = rich.Progress(
        rich.TextColumn("prepare"),
        rich.BarColumn(bar_width=30),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TextColumn("{task.fields[tokens]:,} tokens"),
        rich.TimeRemainingColumn(),
        console=console,
    )

    def show(progress: Progress) -> None:
        if progress.note:
            bar.console.print(progress.note, markup=False, highlight=False, soft_wrap=True)
            return
        if not bar.tasks:
            # Not before there is something to show: its thread must not be there at the fork.
            bar.start()
            bar.add_task("", total=progress.total, completed=progress.bytes, tokens=0)
        bar.update(bar.task_ids[0], completed=progress.bytes, tokens=progress.tokens)

    try:
        yield show
    finally:
        bar.stop()
