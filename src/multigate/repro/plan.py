"""From a study to runs: names, configurations, and the order in which they are most useful."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multigate.config import TrainConfig
from multigate.session import check_model

from .cells import Cell
from .studies import Study


@dataclass(frozen=True)
class Planned:
    """A cell with a seed."""

    cell: Cell
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        return str(self.config.name)

    @property
    def impossible(self) -> str | None:
        """Why there is no such model, where there is none."""
        try:
            check_model(self.config)
        except ValueError as error:
            return str(error)
        return None


def run_name(cell: str, seed: int, factor: float) -> str:
    rate = "" if factor == 1 else f"-lr{factor:g}"
    return f"{cell}{rate}-seed{seed}"


def split_name(name: str) -> tuple[str, int]:
    """The cell and the seed of a run's name."""
    cell, _, seed = name.rpartition("-seed")
    return re.sub(r"-lr[\d.e+-]+$", "", cell), int(seed)


def recipe(base: TrainConfig, steps: int | None) -> TrainConfig:
    """The settings of every run; of fewer steps at most a quarter are spent on the warm-up."""
    if steps is None:
        return base
    warmup = min(base.optim.warmup, steps // 4)
    return replace(base, steps=steps, optim=replace(base.optim, warmup=warmup))


def planned(base: TrainConfig, runs: Path, cell: Cell, seed: int, factor: float) -> Planned:
    """What differs between two runs: the cell, the seed, and nothing else."""
    rates = replace(
        base.optim, lr_muon=factor * base.optim.lr_muon, lr_adamw=factor * base.optim.lr_adamw
    )
    config = replace(
        base,
        residual=cell.residual,
        model=replace(base.model, **cell.model),
        optim=rates,
        seed=seed,
        out=runs,
        name=run_name(cell.key, seed, factor),
        # The command has done so once for all.
        verify_data=False,
    )
    return Planned(cell, seed, config)


def checks(
    study: Study, base: TrainConfig, runs: Path, seeds: Sequence[int], factors: Sequence[float]
) -> list[Planned]:
    """The learning-rate check: PreNorm with the first seed at every factor, or nothing to check.

    The run at the factor that wins is PreNorm's run of that seed: nothing is trained twice.
    """
    if len(factors) < 2:
        return []
    return [planned(base, runs, study.baseline, seeds[0], factor) for factor in factors]


def ordered(
    study: Study, keys: Sequence[str], seeds: Sequence[int], extra_seeds: int
) -> Iterator[tuple[Cell, int]]:
    """Seed by seed, within a seed table by table; extra tables for the first seeds only."""
    for place, seed in enumerate(seeds):
        given = set[str]()
        for group in study.groups:
            for cell in group.cells:
                wanted = cell.key in keys and cell.key not in given
                if wanted and (not group.extra or place < extra_seeds):
                    given.add(cell.key)
                    yield cell, seed
