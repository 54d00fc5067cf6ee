"""SIGINT and SIGTERM as a wish to stop between two steps."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INSIST_SECONDS = 1.0
"""A second Ctrl-C after this long interrupts at once; sooner it is the same wish, sent twice, as
launchers do that signal both a process and its group."""


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The signals that came, to be acted upon when it suits. Outside the main thread, where Python
    hands out none, nothing is caught."""
    caught, first = list[int](), [0.0]
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and number in caught and now - first[0] > INSIST_SECONDS:
            raise KeyboardInterrupt
        if not caught:
            first[0] = now
        caught.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
