"""`multigate repro --dry-run`: what a study would do, and what it would take."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from rich.console import Console

from multigate.config import TrainConfig
from multigate.device import PEAK_FLOPS, Compute, flops_per_token
from multigate.fit import cut_up, estimate, target, vocabulary
from multigate.gpt import GPT

from .config import ReproConfig
from .kept import read_all
from .plan import Planned, checks, ordered, planned
from .settings import FILE, read_settings

YARDSTICK, SHARE = "H100", 0.4
"""A GPU to state the cost in, and the share of its peak that training reaches."""


def dry_run(config: ReproConfig, console: Console | None = None) -> None:
    """Print the runs in their order, and of each model parameters and estimated memory."""
    say = partial((console or Console()).print, highlight=False, markup=False, soft_wrap=True)
    base = config.recipe()
    factors, chosen = learning_rates(config)
    asked = all_runs(config, base, factors, chosen)
    cells = {run.cell.key: run for run in asked}
    impossible = {key: why for key, run in cells.items() if (why := run.impossible)}
    runs = [run for run in asked if run.cell.key not in impossible]
    finished = {name for name, run in read_all(config.folder).items() if run.finished}
    for line in heading(config, base, runs, finished):
        say(line)
    if chosen is None:
        rates = ", ".join(f"{factor:g}" for factor in factors)
        say(f"first PreNorm chooses among {rates} times these learning rates, on val")
    elif chosen != 1:
        say(f"at {chosen:g} times these learning rates")
    compute, tokens = target(base), vocabulary(base)
    for line in compute.reasons:
        say(line)
    say("")
    say(f"{'row':34}{'parameters':>14}{'GiB':>9}{'runs left':>11}  seeds")
    total = 0.0
    for key, run in cells.items():
        if key in impossible:
            say(f"{key:34}  left out: {impossible[key]}")
            continue
        left = [r for r in runs if r.cell.key == key and r.name not in finished]
        parameters, gib, flops = cost(run.config, compute, tokens)
        total += len(left) * flops
        seeds = " ".join(str(seed) for seed in dict.fromkeys(r.seed for r in left)) or "-"
        say(f"{key:34}{parameters:>14,}{gib:>9.2f}{len(left):>11}  {seeds}")
    hours = total / (SHARE * PEAK_FLOPS[YARDSTICK]) / 3600
    time = f"about {hours:,.1f}" if hours >= 0.1 else "less than 0.1"
    say("")
    say(
        f"still to do: {total:.3g} floating-point operations, {time} hours of one "
        f"{YARDSTICK} at {SHARE:.0%} of its peak; the memory is an estimate without torch.compile, "
        "which may lower it (`multigate train --dry-run` has its parts)"
    )


def learning_rates(config: ReproConfig) -> tuple[Sequence[float], float | None]:
    """The factors to choose among, and the one that was chosen, if that is over."""
    if (config.folder / FILE).exists():
        settings = read_settings(config.folder).widened(config.lr_factors)
        return settings.lr_factors, settings.lr_factor
    return config.factors, config.factors[0] if len(config.factors) == 1 else None


def all_runs(
    config: ReproConfig, base: TrainConfig, factors: Sequence[float], chosen: float | None
) -> list[Planned]:
    """With the recipe's learning rates, as long as none are chosen."""
    study = config.declared()
    order = ordered(study, study.chosen(config.rows), config.seeds, config.extra_seeds)
    rates = checks(study, base, config.runs_folder, config.seeds, factors)
    found = [*rates, *(planned(base, config.runs_folder, *pair, chosen or 1.0) for pair in order)]
    return list({run.name: run for run in found}.values())


def heading(
    config: ReproConfig, base: TrainConfig, runs: list[Planned], finished: set[str]
) -> Iterator[str]:
    study, optim = config.declared(), base.optim
    yield f"{study.title}, scale {base.scale}: {len(runs)} runs, seed by seed"
    done = sum(run.name in finished for run in runs)
    if done:
        yield f"{done} of them are finished already"
    yield (
        f"a run: {base.steps:,} steps of {base.tokens_per_step:,} tokens = "
        f"{base.steps * base.tokens_per_step:,} tokens of {base.data} (tokenizer of unprepared "
        f"text: {base.tokenizer})"
    )
    yield (
        f"Muon {optim.lr_muon:g}, AdamW {optim.lr_adamw:g}, warm-up {optim.warmup}, cosine to "
        f"{optim.floor:.0%}, weight decay {optim.weight_decay:g}, clip {optim.clip:g}"
    )
    yield f"runs with their checkpoints in {config.runs_folder}, results in {config.folder}"


def cost(config: TrainConfig, compute: Compute, tokens: int) -> tuple[int, float, float]:
    """Parameters, GiB at the fullest moment of a step, and operations of a run."""
    model = config.gpt(tokens)
    _, step = cut_up(config, model, compute)
    with torch.device("meta"):
        parameters = GPT(model).parameter_count()
    parts = estimate(model, config.optim, step)
    flops = flops_per_token(model, parameters) * config.steps * config.tokens_per_step
    return parameters, sum(parts.values()) / 2**30, flops
