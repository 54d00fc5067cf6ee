"""The settings of `multigate repro`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from multigate.config import TrainConfig, resolve

from .plan import recipe
from .studies import STUDIES, Study

SITTING = ("out", "runs", "budget_minutes", "jobs", "device", "figures")
"""Settings that are of one sitting and not of the results."""


@dataclass(frozen=True)
class ReproConfig:
    """Run a study of the paper: every row with every seed, then a table with intervals.

    The same command goes on where an earlier one was stopped or killed.
    """

    study: Literal["table1", "ablations", "deep"]
    """table1: the rows of Table 1 and related work; ablations: what the paper leaves open; deep:
    many narrow blocks, and a look into them."""
    scale: Literal["tiny", "mini", "s", "m", "l"] = "tiny"
    """s, m and l are the paper's, with its hyper-parameters."""
    data: str | None = None
    """A folder made by `multigate prepare`, or text that can be prepared, such as fineweb-edu; None
    takes the recipe's."""
    out: Path | None = None
    """Where results are kept, to be published: repro/SCALE, for deep repro/deep."""
    runs: Path | None = None
    """Where the runs themselves are, with their checkpoints: runs/repro-OUT."""
    seeds: tuple[int, ...] = (0, 1, 2)
    extra_seeds: int = 1
    """How many of the seeds related work gets."""
    rows: tuple[str, ...] = ()
    """Only these rows, such as prenorm mgr-competitive-4; --dry-run shows all names."""
    steps: int | None = None
    """Other than the recipe's."""
    lr_factors: tuple[float, ...] | None = None
    """PreNorm chooses its learning rates among so many times the recipe's, on val; one: no choice.
    None is 0.5 1 2 for table1 and ablations at tiny and mini, and 1 otherwise."""
    config: tuple[Path, ...] = ()
    """TOML files of `multigate train` with settings for all runs."""
    budget_minutes: float | None = None
    """Stop after so long: no new run is begun, and those going on save and end."""
    jobs: int = 1
    """Runs at once on each GPU (or on the CPU)."""
    micro_batch: int | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    figures: bool = True

    def __post_init__(self) -> None:
        least = {"steps": 1, "jobs": 1, "extra_seeds": 0, "micro_batch": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 up, got {self.seeds}.")
        factors = self.factors
        if not factors or len(set(factors)) < len(factors) or min(factors) <= 0:
            raise ValueError(f"lr_factors must be different numbers above 0, got {factors}.")
        if self.budget_minutes is not None and not self.budget_minutes > 0:
            raise ValueError(f"budget_minutes must be more than 0, got {self.budget_minutes}.")

    def declared(self) -> Study:
        return STUDIES[self.study](self.scale)

    @property
    def factors(self) -> Sequence[float]:
        return self.declared().learning_rates if self.lr_factors is None else self.lr_factors

    @property
    def folder(self) -> Path:
        """`out`, or where it is unless told. Ablations share table1's folder, and so its runs."""
        own = self.study if self.declared().analyze else self.scale
        return Path("repro") / own if self.out is None else self.out

    @property
    def runs_folder(self) -> Path:
        return Path("runs") / f"repro-{self.folder.name}" if self.runs is None else self.runs

    def command(self) -> str:
        """What to type for the same results; files and folders by their last names."""
        words = ["multigate", "repro", self.study, "--scale", self.scale]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("study", "scale", *SITTING) or value == f.default:
                continue
            given = [str(v) for v in (value if isinstance(value, tuple) else (value,))]
            places = f.name in ("data", "config")
            words += [f"--{f.name.replace('_', '-')}"]
            words += [Path(word).name for word in given] if places else given
        return " ".join(words)

    def recipe(self) -> TrainConfig:
        """The configuration that all runs begin with."""
        base = recipe(resolve(self.scale, self.config), self.steps)
        data = base.data if self.data is None else self.data
        micro = base.micro_batch if self.micro_batch is None else self.micro_batch
        device = base.device if self.device == "auto" else self.device
        return replace(base, data=data, micro_batch=micro, device=device)


@dataclass(frozen=True)
class SummaryConfig:
    """Make tables and figures anew from what a study has kept, and from nothing else."""

    out: Path
    """The --out of `multigate repro`."""
    figures: bool = True


@dataclass(frozen=True)
class SpeedConfig:
    """Time the models of a study with nothing beside them, for the tokens/s of its tables.

    A forward and a backward pass of one micro-batch, beside PreNorm's, turn by turn. It needs the
    folder of results and no text.
    """

    out: Path
    """The --out of `multigate repro`."""
    rows: tuple[str, ...] = ()
    """Only these, such as prenorm mgr-competitive-4; the figures of others stay as they are."""
    jobs: int = 1
    """So many models are compiled at once; they are timed one by one."""
    rounds: int = 3
    """Of PreNorm, model, model, PreNorm, four steps each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    figures: bool = True

    def __post_init__(self) -> None:
        for name in ("jobs", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
