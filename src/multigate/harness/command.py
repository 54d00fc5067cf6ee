"""`multigate eval RUN --tasks NAME ...`."""

import os
import platform
import sys
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from multigate.batching import MOST_TOKENS
from multigate.checkpoint import checkpoints, open_run
from multigate.device import choose, versions

from .model import harness_model
from .notes import Notes, quiet
from .scores import as_json, keep, show
from .tasks import check_tasks, find_tasks, load_tasks, needed, settle

if TYPE_CHECKING:
    from multigate.evaluate import EvalConfig

FOLDER = "evals"
"""Where a run keeps its scores."""
KEPT = ("results", "groups", "group_subtasks", "n-shot", "n-samples", "higher_is_better")
"""Of what the harness returns, under its names."""


def score_tasks(config: "EvalConfig", console: Console | None = None) -> dict[str, Any]:
    """Score a run on `config.tasks`, show the scores and keep them beside the run.

    Returns what is kept: what was scored, the scores under the harness's names, the versions.
    """
    for package in ("lm_eval", "transformers", "accelerate"):
        needed(package)
    path, state = open_run(config.run, config.checkpoint)
    begin, start = datetime.now().astimezone(), time.perf_counter()
    file = new_file(path, begin)
    # A console that holds its file: what the harness prints goes elsewhere.
    screen = console or Console(file=sys.stdout, quiet=config.json)
    notes = Notes()
    found, settings = run_harness(config, path, screen, notes)
    record = {
        "checkpoint": str(path),
        "step": state["step"],
        "settings": settings,
        **{name: found[name] for name in KEPT if name in found},
        "notes": notes.lines(),
        "model": state["model"],
        "versions": {
            **versions(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("lm_eval", "transformers", "datasets")},
            "tasks": found["versions"],
        },
        "date": begin.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
    }
    show(record, screen)
    if config.json:
        print(as_json({**record, "file": str(file)}))
    keep({**record, "configs": found["configs"]}, file, found.get("samples"))
    screen.print(f"Kept in {file}", markup=False, highlight=False, soft_wrap=True)
    return record


def run_harness(
    config: "EvalConfig", path: Path, screen: Console, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the harness returns for a checkpoint, and how it was asked."""
    # An exported model is of float32, and the harness computes in what a model is of.
    compute = choose(config.device, "fp32" if config.precision == "auto" else config.precision)
    with progress_bar(screen) as bar:
        stage = bar.add_task("finding the tasks", total=None)
        with quiet(notes):
            manager, names = find_tasks(config.tasks or (), config.task_folder)
        bar.update(stage, description="loading the run")
        model, tokenizer = load_run(path, config.data)
        context = model.config.max_position_embeddings
        batch = config.batch or max(1, MOST_TOKENS[compute.device.type] // 4 // context)
        bar.update(stage, description="loading the tasks")
        with quiet(notes):
            tasks = load_tasks(manager, names)
            settle(tasks, config.shots, config.new_tokens)
            check_tasks(tasks, context)
            bar.remove_task(stage)
            lm = harness_model(model.to(compute.device), tokenizer, batch, compute.precision, bar)
            found = ask(lm, manager.load(tasks), config.limit, config.samples)
    return found, {
        "tasks": names,
        "shots": config.shots,
        "limit": config.limit,
        "new_tokens": config.new_tokens,
        "batch": batch,
        "device": str(compute.device),
        "precision": compute.precision,
        "context": context,
    }


def load_run(path: Path, data: Path | None) -> tuple[Any, Any]:
    """The model and the tokenizer that `multigate export` would write."""
    from multigate.hf import from_run

    model, tokenizer = from_run(path, data=data)
    # For log-likelihoods a cache is memory for nothing; generation asks for its own.
    model.config.use_cache = False
    return model, tokenizer


def ask(lm: Any, tasks: dict[str, Any], limit: int | None, samples: bool) -> dict[str, Any]:
    """Let the harness evaluate; what it finds wrong with tasks or sizes is one sentence."""
    names = ", ".join(tasks["tasks"])
    evaluate = needed("lm_eval.evaluator").evaluate
    try:
        found: dict[str, Any] = evaluate(lm, tasks, limit=limit, log_samples=samples)
        return found
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU's memory is full with {lm.batch_size} texts at once: give fewer with --batch."
        ) from error
    except ValueError as error:
        if "larger than population" not in str(error):
            raise
        raise ValueError(
            f"one of {names} has fewer examples to show than asked for: lower --shots."
        ) from error
    except (AssertionError, LookupError, needed("jinja2").TemplateError) as error:
        raise ValueError(
            f"the harness cannot use one of {names} ({type(error).__name__}: {error}): look into "
            "its .yaml file, also with `lm_eval validate`."
        ) from error


def progress_bar(screen: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def new_file(checkpoint: Path, now: datetime) -> Path:
    """Where the scores will be: beside the checkpoints of the run, or in a checkpoint without one.

    That it cannot be written is said before anything is computed.
    """
    run = checkpoint.parent.parent
    place = run if checkpoint in checkpoints(run) else checkpoint
    folder = place / FOLDER
    if not os.access(folder if folder.exists() else place, os.W_OK):
        raise PermissionError(f"the scores cannot be kept in {folder}: it is not writable.")
    name = f"{checkpoint.resolve().name}-{now:%Y%m%d-%H%M%S}"
    files = (folder / f"{name}{more}.json" for more in ("", *(f"-{n}" for n in range(2, 100))))
    return next(file for file in files if not file.exists())
