"""Finding and loading tasks: the harness's own, and those of a folder."""

import random
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multigate.data.optional import optional


def needed(package: str) -> Any:
    """A package that scoring tasks needs, or one sentence on how to get it."""
    return optional(package, "eval", "multigate eval --tasks")


def find_tasks(names: Sequence[str], folder: Path | None) -> tuple[Any, list[str]]:
    """The harness's task manager, and the tasks, groups and tags that `names` stand for.

    Where `folder` has them all, the harness's 14,000 tasks are not looked through (ten seconds).
    """
    managers = needed("lm_eval.tasks").TaskManager
    if folder is None:
        own = None
    else:
        own = _in_folder(managers, folder)
        if all(own.match_tasks([name]) for name in names) and _is_closed(own):
            return own, _matching(own, names)
    every = managers(include_path=None if folder is None else str(folder))
    for name in names:
        if not every.match_tasks([name]):
            raise ValueError(_unknown(name, every.all_tasks, folder, own))
    return every, _matching(every, names)


def load_tasks(manager: Any, names: Sequence[str]) -> list[Any]:
    """The tasks and groups themselves, with their datasets."""
    found = list[Any]()
    for name in names:
        try:
            loaded = manager.load([name])
        except ConnectionError as error:
            raise ConnectionError(
                f"the task {name} needs its dataset from the Hugging Face Hub, which cannot be "
                f"reached ({_line(error)}): fetch it once with a network, after which it is kept, "
                "or score tasks with data of your own (--task-folder)."
            ) from error
        except Exception as error:
            # What a task file says is input, whatever the harness trips over in it.
            raise ValueError(
                f"the task {name} cannot be loaded ({type(error).__name__}: {_line(error)}): mend "
                "its .yaml file or its data."
            ) from error
        # A group comes first, before the groups inside it; a tag is just its tasks.
        groups = list(loaded["groups"].values())
        found += groups[:1] or loaded["tasks"].values()
    return found


def settle(tasks: Sequence[Any], shots: int | None, new_tokens: int | None) -> None:
    """Tell the tasks how to ask, with the seeds and by the rules of the harness's own command."""
    seeds = needed("lm_eval.defaults")
    random.seed(seeds.DEFAULT_RANDOM_SEED)
    np.random.seed(seeds.DEFAULT_OTHER_SEED)
    torch.manual_seed(seeds.DEFAULT_OTHER_SEED)
    for task in leaves(tasks):
        if new_tokens is not None and task.get_config("output_type") == "generate_until":
            length = {"max_gen_toks": new_tokens}
            task.set_config(key="generation_kwargs", value=length, update=True)
        own = task.get_config("num_fewshot")
        # A task that wants no examples gets none.
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=seeds.DEFAULT_OTHER_SEED)


def check_tasks(tasks: Sequence[Any], context: int) -> None:
    """That a run with this context can be asked, before it is: later, hours may be lost."""
    normalize = needed("lm_eval.models.utils").normalize_gen_kwargs
    for task in leaves(tasks):
        if getattr(task, "UNSAFE_CODE", False):
            raise ValueError(
                f"the task {task.task_name} runs code that the model writes: export the run and "
                "use `lm_eval --confirm_run_unsafe_code` where that does no harm."
            )
        if task.get_config("output_type") != "generate_until":
            continue
        most = normalize(dict(task.get_config("generation_kwargs") or {}))["max_gen_toks"]
        if most >= context:
            raise ValueError(
                f"the task {task.task_name} lets the model write {most} tokens, which leaves no "
                f"room for a question in its context of {context}: give fewer with --new-tokens."
            )


def leaves(tasks: Sequence[Any]) -> list[Any]:
    """All tasks, those of groups among them."""
    found = list[Any]()
    for task in tasks:
        found += task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]
    return found


def _in_folder(managers: Any, folder: Path) -> Any:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} to take tasks from.")
    own = managers(include_path=str(folder), include_defaults=False)
    if not own.all_tasks:
        raise ValueError(
            f"{folder} holds no task: a task is a .yaml file with a name (`task: NAME`)"
            + _misread(own, folder)
            + "."
        )
    return own


def _is_closed(manager: Any) -> bool:
    """Whether all that groups of the folder name is in the folder too."""
    groups = [manager.task_index[name].cfg for name in manager.all_groups]
    members = [member for group in groups for member in group.get("task") or []]
    return all(member in manager.task_index for member in members if isinstance(member, str))


def _matching(manager: Any, names: Sequence[str]) -> list[str]:
    """In the order given, each once."""
    return list(dict.fromkeys(match for name in names for match in manager.match_tasks([name])))


def _unknown(name: str, known: Sequence[str], folder: Path | None, own: Any) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    there = ""
    if own is not None and folder is not None:
        there = f"; {folder} has {', '.join(own.all_tasks)}{_misread(own, folder)}"
    return f"unknown task {name!r}: {hint}`lm_eval ls tasks` lists those of the harness{there}."


def _misread(own: Any, folder: Path) -> str:
    """Which files the harness passed over without a word."""
    used = {entry.yaml_path for entry in own.task_index.values()}
    left = sorted(file.name for file in folder.rglob("*.yaml") if file not in used)
    return f" (not understood: {', '.join(left)})" if left else ""


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given").rstrip(".")
