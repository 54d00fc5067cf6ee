"""How fast the rows of a study are with nothing beside them on the device: OUT/speeds.json.

The runs themselves may have shared it. What is timed is a forward and a backward pass of one
micro-batch, beside PreNorm's, turn by turn, as `multigate bench` times its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from multigate.bench.apart import measure_apart
from multigate.bench.ops import Row
from multigate.bench.steps import Candidate, of_gpt
from multigate.config import ModelChanges, TrainConfig, from_table
from multigate.data.writer import write_json
from multigate.device import Compute, choose
from multigate.gpt import GPT
from multigate.names import unknown

from .cells import PRENORM
from .environment import environment
from .kept import SPEEDS, Kept, read_all, read_speeds
from .plan import split_name
from .settings import read_settings


@dataclass(frozen=True)
class Timing:
    """A cell, to be measured."""

    cell: str
    config: TrainConfig
    vocabulary: int
    batch: int
    rounds: int
    compute: Compute

    @property
    def tokens(self) -> int:
        return self.batch * self.config.gpt(self.vocabulary).context

    @property
    def is_baseline(self) -> bool:
        return self.cell == PRENORM.key

    def row(self) -> Row:
        return {"cell": self.cell, "batch": self.batch}

    def baseline(self, backend: str | Callable[..., Any] = "inductor") -> Candidate:
        """PreNorm of the same depth and width."""
        model = self.config.model
        shape = {name: getattr(model, name) for name in ("blocks", "width", "heads", "context")}
        plain = replace(self.config, residual=PRENORM.residual, model=ModelChanges(**shape))
        return self._made(plain, backend)

    def candidate(self, backend: str | Callable[..., Any] = "inductor") -> Candidate:
        return self._made(self.config, backend)

    def _made(self, config: TrainConfig, backend: str | Callable[..., Any]) -> Candidate:
        model, checkpointing = config.gpt(self.vocabulary), config.checkpoint_activations
        return of_gpt(model, self.batch, self.compute, backend, checkpointing)


def vocabulary(run: Kept, config: TrainConfig) -> int:
    """Of a run's model, which follows from the number of its parameters."""
    with torch.device("meta"):
        one, two = (GPT(config.gpt(tokens)).parameter_count() for tokens in (1, 1000))
    a, b = (config.gpt(tokens).vocab_size for tokens in (1, 1000))
    each = (two - one) // (b - a)
    assert run.parameters is not None, "a finished run has said how many it has"
    return a + (run.parameters - one) // each


def timings(out: Path, rounds: int, device: str) -> list[Timing]:
    """One for each cell that has a finished run, in the order of the first study that has it."""
    kept = read_all(out)
    settings = read_settings(out)
    found = dict[str, Timing]()
    for name in dict.fromkeys(run for runs in settings.studies.values() for run in runs):
        cell, run = split_name(name)[0], kept.get(name)
        if cell in found or run is None or not run.finished:
            continue
        config = from_table(TrainConfig(), dict(run.config), str(out / "runs" / name))
        compute = choose(device, config.precision, config.compile)
        batch = int(run.environment["micro_batch"])
        found[cell] = Timing(cell, config, vocabulary(run, config), batch, rounds, compute)
    if not found:
        raise ValueError(f"{out} has no finished run: there is nothing to time.")
    return list(found.values())


def measure(
    out: Path,
    rows: Sequence[str],
    rounds: int,
    jobs: int,
    device: str,
    say: Callable[[str], None],
) -> Mapping[str, Mapping[str, Any]]:
    """Time these cells of `out`, or all, and keep the figures; one that cannot be timed is told."""
    known = {timing.cell: timing for timing in timings(out, rounds, device)}
    for name in rows:
        if name not in known:
            raise ValueError(unknown(f"row with a finished run in {out}", name, known))
    todo = [timing for cell, timing in known.items() if not rows or cell in rows]
    say(f"{len(todo)} models, {jobs} at a time: first they are compiled, then timed one by one")
    figures = {cell: row for cell, row in read_speeds(out).items() if cell in known}
    made_with = environment(todo[0].compute)
    for row in measure_apart(todo, jobs):
        cell = row.pop("cell")
        if "error" in row:
            say(f"{cell}: {row['error']}")
            continue
        figures[cell] = row | {"made_with": made_with}
        say(f"{cell}: {row['tokens_per_s']:,.0f} tokens/s, {row['overhead']:+.1%}")
        in_order = {cell: figures[cell] for cell in known if cell in figures}
        write_json(out / SPEEDS, {"cells": in_order})
    return figures
