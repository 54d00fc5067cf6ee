"""`multigate repro`: run what is missing of a study, and make its tables from what is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from multigate.data import open_data
from multigate.lock import locked
from multigate.session import find_data
from multigate.signals import caught_signals

from .config import ReproConfig, SpeedConfig, SummaryConfig
from .kept import Kept, changes, publishable, read_all, read_kept
from .look import INSIDE, kept_numbers, wanted
from .plan import Planned, checks, ordered, planned
from .queue import Clock, Outcome, Queue, slots
from .settings import settle
from .summary import summarize
from .worker import Job


@dataclass(frozen=True)
class Done:
    """What came of it."""

    out: Path
    finished: Sequence[str]
    failed: Sequence[str]
    missing: Sequence[str]
    """Neither finished nor failed: time was up, or somebody stopped it."""
    signal: int | None = None


class Sitting:
    """One call of the command."""

    def __init__(self, config: ReproConfig, console: Console, caught: Sequence[int]) -> None:
        self.config, self.out = config, config.folder
        self.say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self.study = config.declared()
        self.keys = self.study.chosen(config.rows)
        self.clock = Clock(config.budget_minutes, caught)
        self.base = config.recipe()
        data = find_data(self.base.data, self.base.tokenizer, True, self.say)
        self.base = replace(self.base, data=str(data))
        rates = (config.lr_factors, config.factors)
        self.settings = settle(self.out, self.base, open_data(data), *rates)
        self.places = slots(self.base.device, config.jobs)
        self.count, self.total = 0, 0

    def go(self) -> Done:
        self._say_what()
        # What is damaged is told before anything is trained.
        for run in read_all(self.out):
            kept_numbers(self._kept(run))
        runs = self._check_learning_rate()
        if self.settings.lr_factor is not None:
            runs = self._possible(self._planned(self.settings.lr_factor))
            self._note(runs)
            self._run(runs, self.study.analyze)
        kept = read_all(self.out)
        names = [run.name for run in runs]
        finished = [name for name in names if name in kept and kept[name].finished]
        failed = [name for name in names if name in kept and not kept[name].finished]
        missing = [name for name in names if name not in kept]
        self._say_unseen(finished)
        for path in summarize(self.out, self.config.figures, self.say):
            self.say(f"written: {path}")
        self.say(
            f"{len(finished)} of {len(names)} runs are finished"
            + (f", {len(failed)} have failed" if failed else "")
            + ("; the same command goes on" if missing or failed else "")
        )
        return Done(self.out, finished, failed, missing, next(iter(self.clock.caught), None))

    def _say_what(self) -> None:
        c, places = self.base, self.places
        where = f"{len(places)} at a time" + (" on GPUs" if places[0] is not None else "")
        self.say(
            f"{self.study.title} at {c.scale}: {c.steps} steps of {c.tokens_per_step:,} tokens of "
            f"{c.data}, {where}; runs in {self.config.runs_folder}, results in {self.out}"
        )

    def _planned(self, factor: float) -> list[Planned]:
        config = self.config
        order = ordered(self.study, self.keys, config.seeds, config.extra_seeds)
        return [planned(self.base, config.runs_folder, *pair, factor) for pair in order]

    def _possible(self, runs: list[Planned]) -> list[Planned]:
        """Without those whose model there is not, such as more blocks than sublayers."""
        impossible = {run.cell.label: why for run in runs if (why := run.impossible)}
        for label, why in impossible.items():
            self.say(f"left out: {label}: {why}")
        left_out = {**self.settings.left_out, **impossible}
        self.settings = replace(self.settings, left_out=left_out)
        return [run for run in runs if run.cell.label not in impossible]

    def _note(self, runs: Sequence[Planned]) -> None:
        """Write down what is asked for, before any of it is done."""
        names, command = [run.name for run in runs], self.config.command()
        self.settings = self.settings.asked(self.study.name, names, command)
        self.settings.write(self.out)

    def _check_learning_rate(self) -> list[Planned]:
        """Choose the learning rates, if that is still to do: PreNorm's best on val."""
        config, factors = self.config, self.settings.lr_factors
        runs = checks(self.study, self.base, config.runs_folder, config.seeds, factors)
        if self.settings.lr_factor is not None:
            return runs
        self.settings = replace(self.settings, lr_runs=[run.name for run in runs])
        self._note(runs)
        self._run(runs)
        kept = read_all(self.out)
        if any(run.name not in kept for run in runs):
            return runs
        scores = {
            factor: score["loss"]
            for run, factor in zip(runs, factors, strict=True)
            if (score := kept[run.name].score("val")) is not None
        }
        if not scores:
            raise ValueError(
                "PreNorm has failed at every learning rate, so there is nothing to compare with: "
                f"{kept[runs[0].name].failure}"
            )
        best = min(scores, key=scores.__getitem__)
        self.settings = replace(self.settings, lr_factor=best)
        self.settings.write(self.out)
        rates = ", ".join(f"{loss:.4f} at {factor:g}" for factor, loss in scores.items())
        self.say(f"learning rates: {best:g} times the recipe's (val loss {rates})")
        return runs

    def _run(self, runs: Sequence[Planned], look: bool = False) -> None:
        """What of `runs` is missing: what failed before comes after what was never tried."""
        kept = read_all(self.out)
        for run in runs:
            self._check_same(run, kept.get(run.name))
        done = {name for name, run in kept.items() if run.finished}
        todo = [run for run in runs if run.name not in done or (look and self._unseen(run.name))]
        todo.sort(key=lambda run: run.name in kept and run.name not in done)
        self.count, self.total = len(runs) - len(todo), len(runs)
        if again := sum(run.name in done for run in runs):
            left = sum(run.name in done for run in todo)
            rest = f", {left} of them to be looked into" if left else ""
            self.say(f"{again} of {self.total} runs are finished already{rest}")
        at_once = self.config.jobs
        jobs = [Job(run.config, self._kept(run.name), at_once, look) for run in todo]
        Queue(self.places, self.clock, self.say, self._ended).drain(jobs)

    def _kept(self, name: str) -> Path:
        return self.out / "runs" / name

    def _unseen(self, name: str) -> bool:
        return wanted(self._kept(name), self.config.runs_folder / name)

    def _say_unseen(self, finished: Sequence[str]) -> None:
        """Which runs have yet to be looked into, and which nobody can look into any more."""
        if not self.study.analyze:
            return
        left = [name for name in finished if not (self._kept(name) / INSIDE).exists()]
        there = [name for name in left if self._unseen(name)]
        gone = [name for name in left if name not in there]
        if there:
            self.say(f"not looked into yet: {', '.join(there)}; the same command goes on")
        if gone:
            self.say(
                f"not looked into: {', '.join(gone)}, whose checkpoints are not in "
                f"{self.config.runs_folder}; removed from {self.out / 'runs'}, they are made again"
            )

    def _check_same(self, run: Planned, kept: Kept | None) -> None:
        found = changes(kept.config, publishable(run.config)) if kept is not None else []
        if found:
            raise ValueError(
                f"{self.out} holds the run {run.name} with other settings ({'; '.join(found)}): "
                f"remove {self._kept(run.name)} and {run.config.folder} to make it again, "
                "or give another --out and --runs."
            )

    def _ended(self, outcome: Outcome) -> None:
        name = str(outcome.job.config.name)
        if outcome.state == "stopped":
            self.say(f"stopped: {name}, which goes on with the same command")
            return
        self.count += 1
        head = f"[{self.count}/{self.total}] {name}, {outcome.seconds:.0f} s: "
        # A kill may be next: the table is as new as the runs.
        summarize(self.out, False, self.say)
        if outcome.state == "failed":
            self.say(f"{head}failed: {outcome.reason}")
            return
        kept = read_kept(self._kept(name))
        scores = {split: kept.score(split) for split in ("val", "test")}
        said = [f"{split} {score['loss']:.4f}" for split, score in scores.items() if score]
        unseen = [f"not looked into: {outcome.reason}"] if outcome.reason else []
        self.say(head + ", ".join([f"train {kept.train:.4f}", *said, *unseen]))


def repro(config: ReproConfig, console: Console | None = None) -> Done:
    """Run what is missing of a study, as far as time allows, and write its tables."""
    runs = config.runs_folder
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"runs cannot be kept in {runs} ({error.strerror}): choose another folder with --runs."
        ) from None
    busy = f"another `multigate repro` has its runs in {runs}: wait, or give another --runs."
    with locked(runs / ".lock", busy), caught_signals() as caught:
        return Sitting(config, console or Console(), caught).go()


def speed(config: SpeedConfig, console: Console | None = None) -> list[Path]:
    """Time the models of a folder, and make its tables anew; returns the files."""
    # Not at the top: it brings the compiler, and nothing else here compiles.
    from .speed import measure

    say = partial((console or Console()).print, highlight=False, markup=False, soft_wrap=True)
    measure(config.out, config.rows, config.rounds, config.jobs, config.device, say)
    return summary(SummaryConfig(config.out, config.figures), console)


def summary(config: SummaryConfig, console: Console | None = None) -> list[Path]:
    """The tables of a folder made anew; returns the files."""
    say = partial((console or Console()).print, highlight=False, markup=False, soft_wrap=True)
    written = summarize(config.out, config.figures, say)
    for path in written:
        say(f"written: {path}")
    return written
