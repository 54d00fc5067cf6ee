"""The numbers of a study, from what is kept of its runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .cells import Cell
from .kept import Kept, read_all, read_speeds
from .plan import run_name, split_name
from .settings import Settings
from .stats import noise, paired, spread
from .studies import STUDIES, Group, Study

LOSSES = ("train", "val", "test")
ENVIRONMENT = ("device", "torch", "cuda", "precision", "kernel", "multigate", "commit", "source")


def losses(run: Kept) -> dict[str, float]:
    """By name; val and test on every token of the split, with the weights of the last step."""
    scores = {split: run.score(split) for split in LOSSES[1:]}
    return {"train": run.train} | {split: s["loss"] for split, s in scores.items() if s}


def results(out: Path, settings: Settings, name: str) -> dict[str, Any]:
    """All that the tables of the study `name` say, as plain values."""
    kept = read_all(out)
    study = STUDIES[name](settings.config["scale"])
    factor = 1.0 if settings.lr_factor is None else settings.lr_factor
    cells = study.cells()
    found = Finished(kept, factor, read_speeds(out))
    asked = settings.studies[name]

    def table(of: Group) -> dict[str, Any]:
        # The first table is where the better of two stands for both; elsewhere both are shown.
        return group(of, of is study.groups[0], cells, found, asked, settings.config["scale"])

    groups = [g for g in map(table, study.groups) if g["rows"]]
    runs = {
        run: kept[run] for run in dict.fromkeys([*asked, *shown_runs(groups, found)]) if run in kept
    }
    finished = {run: k for run, k in runs.items() if k.finished}
    return {
        "study": name,
        "title": study.title,
        "commands": list(settings.commands[name]),
        "config": dict(settings.config),
        "data": dict(settings.data),
        "learning_rate": learning_rate(settings, kept),
        "groups": groups,
        "pairs": pairs(study, cells, found, settings.config["scale"]),
        "noise": {name: plain(n) for name, n in found.noise.items() if n is not None},
        "runs": {run: measured(k) for run, k in finished.items()},
        "failed": {run: k.failure for run, k in runs.items() if not k.finished},
        "missing": [run for run in asked if run not in kept],
        "left_out": {
            cell.label: settings.left_out[cell.label]
            for cell in cells.values()
            if cell.label in settings.left_out
        },
        "made_with": made_with(finished.values()),
    }


class Finished:
    """The finished runs of a cell, by seed, and how fast it is alone where that was measured."""

    def __init__(
        self,
        kept: Mapping[str, Kept],
        factor: float,
        speeds: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.kept, self.factor, self.speeds = kept, factor, speeds or {}
        self.seeds = sorted({int(run.config["seed"]) for run in kept.values()})
        # Of all cells there are, whatever study they are of.
        keys = dict.fromkeys(split_name(name)[0] for name in kept)
        self.noise = {name: noise(self.losses(key, name) for key in keys) for name in LOSSES}

    def of(self, key: str) -> dict[int, Kept]:
        named = {seed: self.kept.get(run_name(key, seed, self.factor)) for seed in self.seeds}
        return {seed: run for seed, run in named.items() if run is not None and run.finished}

    def losses(self, key: str, name: str) -> dict[int, float]:
        found = {seed: losses(run) for seed, run in self.of(key).items()}
        return {seed: loss[name] for seed, loss in found.items() if name in loss}

    def differences(self, key: str, other: str) -> dict[str, Any]:
        """Of two cells, by the name of the loss, as plain values."""
        made = {}
        for name in LOSSES:
            pair = (self.losses(key, name), self.losses(other, name))
            if found := paired(*pair, self.noise[name]):
                verdicts = {"verdict": found.verdict, "pooled_verdict": found.pooled_verdict}
                made[name] = {**plain(found), **verdicts}
        return made

    def best(self, cell: Cell) -> str:
        """The cell or the alternative with the lowest mean val loss over the seeds all have."""
        candidates = {key: self.losses(key, "val") for key in (cell.key, *cell.alternatives)}
        tried = {key: values for key, values in candidates.items() if values}
        common = set.intersection(*map(set, tried.values())) if tried else set[int]()
        if not common:
            return next(iter(tried), cell.key)
        return min(tried, key=lambda key: sum(tried[key][seed] for seed in common))


def group(
    of: Group,
    choose: bool,
    cells: Mapping[str, Cell],
    found: Finished,
    asked: Iterable[str],
    scale: str,
) -> dict[str, Any]:
    """The rows that were ever asked for; beside them, whatever else of the table has run."""
    wanted = {split_name(name)[0] for name in asked}
    asked_for = any(cell.key in wanted for cell in of.cells)
    chosen = [
        (cell, cells[found.best(cell)] if choose else cell)
        for cell in of.cells
        if cell.key in wanted or (asked_for and found.of(cell.key))
    ]
    rows = [row(cell, shown, cells, found, scale) for cell, shown in chosen]
    return {"title": of.title, "about": of.about, "rows": rows}


def shown_runs(groups: Iterable[Mapping[str, Any]], found: Finished) -> Iterator[str]:
    """The names of the runs that the rows of these tables are made from."""
    for table in groups:
        for row in table["rows"]:
            yield from (run_name(row["cell"], seed, found.factor) for seed in row["seeds"])


def row(
    cell: Cell, shown: Cell, cells: Mapping[str, Cell], found: Finished, scale: str
) -> dict[str, Any]:
    """A row of a table: `shown` in the place of `cell`."""
    runs = found.of(shown.key)
    # A cell that is compared with one of another study, or with itself, has nothing beside it.
    other = cells.get(shown.against) if shown.against != shown.key else None
    values: dict[str, Any] = {}
    for name in LOSSES:
        over_seeds = spread(list(found.losses(shown.key, name).values()))
        values[name] = None if over_seeds is None else plain(over_seeds)
    speeds = [run.speed for run in runs.values() if run.speed is not None]
    memory = [run.memory for run in runs.values() if run.memory is not None]
    alone = found.speeds.get(shown.key)
    return {
        "key": cell.key,
        "cell": shown.key,
        "label": shown.label,
        "against": other.label if other else None,
        "seeds": sorted(runs),
        "parameters": next((run.parameters for run in runs.values()), None),
        "losses": values,
        "differences": found.differences(shown.key, other.key) if other else {},
        "paper": paper(shown, cells, scale),
        "tokens_per_second": round(median(speeds)) if speeds else None,
        "memory_gib": max(memory) if memory else None,
        "at_once": max((run.environment.get("at_once", 1) for run in runs.values()), default=1),
        "alone": None if alone is None else alone["tokens_per_s"],
        "overhead": None if alone is None else alone["overhead"],
    }


def compared(rows: Sequence[Mapping[str, Any]], split: str) -> list[Mapping[str, Any]]:
    """The rows that a table compares: their other row is in it, and they are nobody's other row."""
    there, others = ({row[name] for row in rows} for name in ("label", "against"))
    return [
        row
        for row in rows
        if row["against"] in there and row["label"] not in others and split in row["differences"]
    ]


def pairs(
    study: Study, cells: Mapping[str, Cell], found: Finished, scale: str
) -> list[dict[str, Any]]:
    """Two rows beside each other, where both have a seed."""
    made = []
    for pair in study.pairs:
        cell, other = (cells[found.best(of)] for of in pair)
        differences = found.differences(cell.key, other.key)
        if differences:
            own, others = (paper(c, cells, scale) for c in (cell, other))
            apart = round(own["val"] - others["val"], 4) if own and others else None
            labels = {"label": cell.label, "against": other.label}
            made.append({**labels, "differences": differences, "paper": apart})
    return made


def paper(cell: Cell, cells: Mapping[str, Cell], scale: str) -> dict[str, Any] | None:
    """The paper's figures at this scale; S stands for what is smaller."""
    at = scale if scale in ("s", "m", "l") else "s"
    if at not in cell.paper:
        return None
    train, val = cell.paper[at]
    other = cells.get(cell.against)
    difference = round(val - other.paper[at][1], 4) if other and at in other.paper else None
    return {"scale": at, "train": train, "val": val, "difference": difference}


def measured(run: Kept) -> dict[str, Any]:
    """The numbers of one run."""
    bits = {split: run.score(split) for split in LOSSES[1:]}
    return {
        **{name: round(loss, 6) for name, loss in losses(run).items()},
        **{f"{split}_bits_per_byte": s["bits_per_byte"] for split, s in bits.items() if s},
        "parameters": run.parameters,
        "tokens_per_second": run.speed,
        "memory_gib": run.memory,
    }


def learning_rate(settings: Settings, kept: Mapping[str, Kept]) -> dict[str, Any]:
    """What the check has seen, and what was chosen."""
    optim = settings.config["optim"]
    checked = []
    for factor, name in zip(settings.lr_factors, settings.lr_runs, strict=False):
        run = kept.get(name)
        numbers = {k: round(v, 6) for k, v in losses(run).items()} if run and run.finished else {}
        rates = {rate: factor * optim[rate] for rate in ("lr_muon", "lr_adamw")}
        checked.append({"run": name, "factor": factor, **rates, **numbers})
    return {"factor": settings.lr_factor, "checked": checked}


def made_with(runs: Iterable[Kept]) -> dict[str, list[Any]]:
    """What the runs were made with: more than one value where they were not made alike."""
    return {
        name: list(dict.fromkeys(run.environment.get(name) for run in runs)) for name in ENVIRONMENT
    }


def plain(value: Any) -> dict[str, Any]:
    """A small dataclass as a table of rounded numbers."""
    table = {
        k: list(map(rounded, v)) if isinstance(v, tuple) else v for k, v in vars(value).items()
    }
    return {k: rounded(v) for k, v in table.items()}


def rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
