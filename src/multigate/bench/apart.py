"""Training steps that are compiled side by side and measured one by one.

Compiling a model takes minutes of one core; measuring it takes seconds and wants the machine for
itself. So each job has a process, which compiles PreNorm and its model without running them, gives
the memory of their weights back, and waits for its turn.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn

from .ops import Row, sentence
from .steps import Candidate, Work, measured, release


class NotYet(Exception):
    """Compiled, and not to be run before its turn."""


class Gate:
    """torch.compile's usual backend, whose code does not run before the gate is open."""

    def __init__(self) -> None:
        self.open = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Not at the top: it takes seconds to import, and most commands compile nothing.
        from torch._inductor.compile_fx import compile_fx

        code: Any = compile_fx(graph, inputs)

        def run(*arguments: Any) -> Any:
            if not self.open:
                raise NotYet
            return code(*arguments)

        return run

    def compiled(self, candidate: Candidate) -> Candidate:
        """`candidate` with the code of both its passes, and nothing of it has run."""
        if candidate.compute.compile:
            # As a rule the backward pass is compiled when it is first run.
            with functorch.patch(force_non_lazy_backward_lowering=True):
                try:
                    candidate.step()
                except NotYet:
                    return candidate
            raise RuntimeError("the step has run before its turn: please report this.")
        return candidate


def put_aside(model: nn.Module) -> None:
    """Give the memory of the weights back. The compiled code stays that of the model."""
    for weight in model.parameters():
        weight.untyped_storage().resize_(0)


def bring_back(model: nn.Module, like: nn.Module) -> None:
    for weight, values in zip(model.parameters(), like.parameters(), strict=True):
        weight.untyped_storage().resize_(values.untyped_storage().nbytes())
        weight.data.copy_(values.data)


def work(job: Work, pipe: Connection, threads: int) -> None:
    """In its process: say None when it is compiled or what went wrong, wait, then say the row."""
    # Ctrl-C is for the command, which ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inductor.compile_threads = threads
    gate = Gate()
    makers = [job.baseline] if job.is_baseline else [job.baseline, job.candidate]
    try:
        candidates = [gate.compiled(make(gate)) for make in makers]
        for candidate in candidates:
            put_aside(candidate.model)
        release(job.compute.device)
    except Exception as error:
        pipe.send(sentence(error))
        return
    pipe.send(None)
    pipe.recv()
    try:
        for candidate, make in zip(candidates, makers, strict=True):
            # The same seed: the same weights.
            bring_back(candidate.model, make().model)
            release(job.compute.device)
        gate.open = True
        pipe.send(measured(job, *candidates, *[None] * (2 - len(candidates))))
    except Exception as error:
        pipe.send({"error": sentence(error)})


class Worker:
    """A job's process, seen from the command."""

    def __init__(self, job: Work, threads: int) -> None:
        # A forked process cannot use the GPU of the one it came from.
        context = multiprocessing.get_context("spawn")
        self.job = job
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(job, theirs, threads))
        self.process.start()
        theirs.close()
        self.failure: str | None = None

    def wait(self) -> None:
        """Until it is compiled."""
        self.failure = self._heard()

    def row(self) -> Row:
        """Let it measure; afterwards nothing of it is left on the device."""
        row = self.job.row()
        if self.failure is None:
            figures = self._heard("go")
            row |= {"error": figures} if isinstance(figures, str) else figures
        else:
            row["error"] = self.failure
        self.process.join()
        return row

    def _heard(self, *said: str) -> Any:
        """Its next word, after what is `said` to it."""
        try:
            for word in said:
                self.pipe.send(word)
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with status {self.process.exitcode}."

    def end(self) -> None:
        self.process.terminate()
        self.process.join()


def measure_apart(jobs: Sequence[Work], at_once: int) -> Iterator[Row]:
    """A row for each job; up to `at_once` are compiled at a time, and none while one measures."""
    threads = max(1, (os.cpu_count() or 1) // at_once)
    for first in range(0, len(jobs), at_once):
        workers = list[Worker]()
        try:
            for job in jobs[first : first + at_once]:
                workers.append(Worker(job, threads))
            for worker in workers:
                worker.wait()
            for worker in workers:
                yield worker.row()
        finally:
            for worker in workers:
                worker.end()
