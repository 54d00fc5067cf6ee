"""The training loop: steps, evaluations and checkpoints, exactly resumable."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from .checkpoint import CheckpointError, Saver, checkpoints
from .config import TrainConfig, to_table, to_toml
from .device import LossScale, choose, compiled, memory, to_host, versions
from .distributed import accumulating, join, least_over, mean_over
from .evals import Score, evaluate, gates
from .lock import locked
from .log import MOVING_AVERAGE, Log, Silent, read_log
from .meter import Meter
from .session import Session, check_model, find_data
from .signals import caught_signals


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int
    train_loss: float
    """Mean over the last 200 steps, as the paper reports it."""
    val: Score | None
    checkpoint: Path | None
    signal: int | None = None
    """The signal that ended it early."""


@dataclass(frozen=True)
class Reading:
    """What a step leaves to be read: loss, gradient norm, whether it was left out, stop."""

    step: int
    share: float
    values: Tensor
    ready: torch.cuda.Event | None


class NotFinite(ArithmeticError):
    """Too many steps in a row had a loss or a gradient that was not finite."""


def train(config: TrainConfig, console: Console | None = None) -> Result:
    """Train as `config` says, going on from the run's newest checkpoint if there is one."""
    console = console or Console()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    compute = choose(config.device, config.precision, config.compile, local_rank)
    check_model(config)
    first = int(os.environ.get("RANK", 0)) == 0
    say = console.print if first else (lambda text: None)
    data = find_data(config.data, config.tokenizer, first, say)
    with join(compute.device.type) as world, caught_signals() as caught, ExitStack() as stack:
        if world.first:
            stack.enter_context(run_folder(config.folder))
        session = Session(config, compute, world, data)
        stack.callback(session.loader.close)
        log = open_log(session, console) if world.first else Silent()
        stack.callback(log.close)
        return Run(session, log, caught).go()


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a run, and keep others out of it."""
    with writable(folder):
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    try:
        with locked(lock, f"another process is training {folder}: give this run another --name."):
            yield
    finally:
        if new and not [path for path in folder.iterdir() if path != lock]:
            lock.unlink(missing_ok=True)
            folder.rmdir()


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the run cannot be kept in {folder} ({error.strerror}): choose a folder that can be "
            "written to with --out."
        ) from None


def open_log(session: Session, console: Console) -> Log:
    """The run's resolved configuration and its log."""
    config, folder = session.config, session.folder
    table = to_table(config)
    with writable(folder):
        (folder / "config.toml").write_text(to_toml(table), encoding="utf-8")
        return Log(folder, table, config.steps, session.step, config.log, console)


class Run:
    """The loop over steps."""

    def __init__(self, session: Session, log: Log, caught: list[int]) -> None:
        self.session, self.config, self.log, self.caught = session, session.config, log, caught
        self.compute, self.world = session.compute, session.world
        self.model, self.optimizer = session.model, session.optimizer
        self.saver = Saver(session.folder, self.config.keep, self.world)
        weights, rest = session.tensors()
        self.saver.reserve({**weights, **rest})
        for line in session.describe():
            log.say(line)
        log.event(
            "start",
            session.step,
            processes=self.world.size,
            parameters=self.model.parameter_count(),
            device=self.compute.device.type,
            **versions(),
        )
        self.forward: Callable[..., Tensor] = session.module
        if self.compute.compile:
            self.forward = compiled(session.module, log.say)
        optim = self.config.optim
        self.peaks = {"lr_muon": optim.lr_muon} if optim.muon else {}
        self.peaks["lr_adamw"] = optim.lr_adamw
        self.meter = Meter(self.model, self.compute, self.world.size)
        self.pending = deque[Reading]()
        self.stop = False
        self.val: Score | None = None
        self.val_step = -1
        self.saved_step = session.step if session.resumed is not None else -1

    def go(self) -> Result:
        # A GPU is kept busy: a step's loss is read while the next one is computed.
        delay = 1 if self.compute.device.type == "cuda" else 0
        c, session = self.config, self.session
        while session.step < c.steps and not self.stop:
            self._advance()
            while len(self.pending) > delay:
                self._read(self.pending.popleft())
            if session.step % c.eval_every == 0 or session.step == c.steps:
                self._evaluate()
            if session.step % c.save_every == 0:
                self._drain()
                # Amid bad steps the last good checkpoint must not be rotated out.
                if session.bad == 0:
                    self._save()
        self._drain()
        self._save()
        self.saver.wait()
        self.log.sync()
        return self._result()

    def _advance(self) -> None:
        """One step of the optimizer; nothing in it waits for the device."""
        session, optimizer = self.session, self.optimizer
        share = optimizer.set_step(session.step)
        x, y = next(session.loader)
        micro = session.plan.micro_batch
        loss = self._backward(list(zip(x.split(micro), y.split(micro), strict=True)))
        if session.scale is not None:
            session.scale.unscale_([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = optimizer.clip()
        asked = torch.full((), float(bool(self.caught)), device=loss.device)
        loss, stop = mean_over(self.world, torch.stack([loss, asked]))
        left_out = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
        optimizer.step(left_out)
        optimizer.zero_grad()
        if session.scale is not None:
            session.scale.update(left_out)
        session.step += 1
        values, ready = to_host(torch.stack([loss, norm.to(loss.dtype), left_out, stop]))
        self.pending.append(Reading(session.step, share, values, ready))

    def _backward(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Gradients of the mean loss over the micro-batches; returns that loss."""
        scale = self.session.scale
        total = torch.zeros((), device=self.compute.device)
        for k, (x, y) in enumerate(batches, start=1):
            with accumulating(self.session.module, last=k == len(batches)):
                with self.compute.autocast():
                    loss = self.forward(x, y) / len(batches)
                (loss if scale is None else loss * scale.scale).backward()
            total += loss.detach()
        return total

    def _read(self, reading: Reading) -> None:
        """Log a finished step, and see whether to stop."""
        if reading.ready is not None:
            reading.ready.synchronize()
        loss, norm, left_out, stop = reading.values.tolist()
        speed = self.meter.step(self.config.tokens_per_step)
        self.stop = self.stop or stop > 0
        values: dict[str, float | None] = {
            "loss": loss if math.isfinite(loss) else None,
            **{name: reading.share * peak for name, peak in self.peaks.items()},
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens": reading.step * self.config.tokens_per_step,
            "tokens_per_second": round(speed),
        }
        self.log.train(reading.step, values, self.meter.shown())
        self.session.bad = self.session.bad + 1 if left_out else 0
        if left_out:
            self.log.say(f"step {reading.step}: loss or gradient not finite, the step is left out")
        search = LossScale.HALVINGS if self.session.scale else 0
        if self.session.bad >= self.config.bad_steps + search:
            self._give_up(reading.step)

    def _give_up(self, step: int) -> None:
        self.saver.wait()
        kept = checkpoints(self.session.folder)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise NotFinite(
            f"the loss or its gradient was not finite in {self.session.bad} steps in a row up to "
            f"step {step}: {last}; try a lower learning rate or a longer warm-up, under another "
            "--name."
        )

    def _drain(self) -> None:
        while self.pending:
            self._read(self.pending.popleft())

    def _evaluate(self) -> None:
        self._drain()
        split, autocast = self.session.val, self.compute.autocast
        # Not compiled, for the sake of a quick start: a window takes more memory than in training.
        batch = max(1, self.session.plan.micro_batch // (4 if self.compute.compile else 1))
        tokens = self.config.eval_tokens
        self.val = evaluate(self.model, split, batch, tokens, autocast, self.world)
        self.val_step = self.session.step
        values = {"loss": self.val.loss, "bits_per_byte": self.val.bits_per_byte}
        shown = {"val": f"{self.val.loss:.3f}"}
        gate = gates(self.model, split, autocast)
        if gate is not None:
            values |= {"gate_mean": gate[0], "gate_max": gate[1]}
            shown["gate mean/max"] = f"{gate[0]:.3f}/{gate[1]:.3f}"
        most = memory(self.compute.device)
        if most is not None:
            values["memory_gib"] = round(most / 2**30, 3)
        self.log.val(self.session.step, values, shown)
        self.meter.pause()

    def _save(self) -> None:
        """A checkpoint of the current step, unless there is one or the log lags behind it."""
        begin = time.perf_counter()
        step = self.session.step
        if step == self.saved_step or not self._ready_to_save():
            return
        fresh = self.val is not None and self.val_step == step
        state = {**self.session.state(), "val_loss": self.val.loss if self.val and fresh else None}
        self.saver.save(step, *self.session.tensors(), state)
        self.saved_step = step
        blocked = time.perf_counter() - begin
        self.log.event("checkpoint", step, blocked_seconds=round(blocked, 4))
        self.meter.pause()

    def _ready_to_save(self) -> bool:
        """What went wrong meanwhile is a warning: this time, or the next, may go well."""
        ready = 1
        for check in (self.saver.wait, self.log.sync):
            try:
                check()
            except OSError as error:
                self.log.say(f"warning: {error}")
                ready = int(isinstance(error, CheckpointError))
        return bool(least_over(self.world, ready))

    def _lost(self) -> int:
        """Elements that memory="exact" had no room for, in all processes."""
        lost = getattr(self.model.stack.residual, "lost", None)
        if lost is None or lost.is_meta:
            return 0
        return round(float(mean_over(self.world, lost.double())) * self.world.size)

    def _result(self) -> Result:
        session = self.session
        finished = session.step == self.config.steps
        number = None if finished else self.caught[0] if self.caught else signal.SIGTERM
        kept = checkpoints(session.folder)
        newest = kept[-1] if kept else None
        lost = self._lost()
        if not self.world.first:
            return Result(session.step, math.nan, self.val, newest, number)
        losses = [r["loss"] for r in read_log(session.folder) if r["loss"] is not None]
        recent = losses[-MOVING_AVERAGE:]
        mean = sum(recent) / len(recent) if recent else math.nan
        self.log.event("end", session.step, train_loss=mean)
        if number is not None:
            self.log.say(
                f"stopped by {signal.Signals(number).name} after step {session.step}, which is "
                "saved: run the same command to go on"
            )
        else:
            self.log.say(f"train loss {mean:.4f}, the mean of the last {len(recent)} steps")
        if self.val is not None:
            self.log.say(
                f"val loss {self.val.loss:.4f}, perplexity {self.val.perplexity:.2f}, "
                f"{self.val.bits_per_byte:.4f} bits per byte"
            )
        if lost:
            self.log.say(f"memory exact: {lost:,} elements found no room and came back inexact")
        return Result(session.step, mean, self.val, newest, number)
