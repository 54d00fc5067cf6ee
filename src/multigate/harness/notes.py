"""The harness talks a lot; what matters of it is kept, each thing once."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

TOLD = ("lm_eval.models", "lm_eval.evaluator_utils", "lm_eval.tasks")
"""Where warnings come from that concern the scores: cut prompts, documents left out, tasks of one
name. The others are about settings that were meant."""
TALKATIVE = ("lm_eval", "datasets", "huggingface_hub", "transformers")


class Notes(logging.Handler):
    """The first warning from each line of the harness's code, and how many more came from it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: dict[tuple[str, int], list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(TOLD):
            self._found.setdefault((record.pathname, record.lineno), []).append(record.getMessage())

    def lines(self) -> list[str]:
        return [
            first.rstrip() + (f" (and {len(more)} more like this)" if more else "")
            for first, *more in self._found.values()
        ]


@contextmanager
def quiet(notes: Notes) -> Iterator[None]:
    """Keep bars and messages of the harness and its libraries off the terminal."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    before = [(log.handlers, log.propagate) for log in loggers]
    try:
        for log in loggers:
            log.handlers, log.propagate = [notes], False
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for log, (handlers, propagate) in zip(loggers, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
