"""`multigate eval`: a trained run on prepared text; with --tasks see `harness/`."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .batching import MOST_TOKENS
from .checkpoint import open_run, read_tensors
from .data import open_data
from .device import choose
from .evals import Score
from .evals import evaluate as score
from .gpt import GPT, GPTConfig

LEAST = {"tokens": 1, "batch": 1, "shots": 0, "limit": 1, "new_tokens": 1}
TEXT_FLAGS = {"split", "tokens"}
TASK_FLAGS = {"task_folder", "shots", "limit", "new_tokens", "samples"}


@dataclass(frozen=True)
class EvalConfig:
    """Measure a trained run on held-out text: loss, perplexity, bits per byte. With --tasks it is
    scored on tasks of EleutherAI's harness instead (docs/evaluation.md)."""

    run: Path
    """The run's folder, or one of its checkpoints."""
    data: Path | None = None
    """A prepared folder (for --tasks one with the run's tokenizer); None takes the one the run was
    trained on."""
    split: str = "val"
    """val or test (or train)."""
    checkpoint: Literal["best", "last"] = "best"
    """best: of the checkpoints that were kept, the one with the lowest val loss."""
    tokens: int | None = None
    """Read about so many tokens, spread evenly; None reads all."""
    batch: int | None = None
    """Windows computed at once; None chooses."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: fp32 for --tasks and on a CPU, bf16 (or else fp16) on a GPU."""
    json: bool = False
    """Print one line of JSON and nothing else."""
    tasks: tuple[str, ...] | None = None
    """Tasks, groups or tags of the harness; * stands for any letters."""
    task_folder: Path | None = None
    """A folder with tasks of your own (.yaml files), besides the harness's."""
    shots: int | None = None
    """Solved examples before every question; None takes what the task says."""
    limit: int | None = None
    """Score the first so many documents of every task only; None scores all."""
    new_tokens: int | None = None
    """The most tokens to write for an answer; None takes what the task says."""
    samples: bool = False
    """Keep what was asked and answered for every document too."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        if self.tasks == ():
            raise ValueError("--tasks needs the name of a task.")
        given = {f.name for f in fields(self) if getattr(self, f.name) != f.default}
        foreign = given & (TEXT_FLAGS if self.tasks else TASK_FLAGS)
        if foreign:
            flag = "--" + min(foreign).replace("_", "-")
            what = "held-out text, not" if self.tasks else "tasks: name some"
            raise ValueError(f"{flag} is for {what} with --tasks.")


def load_model(path: Path, state: dict[str, Any]) -> GPT:
    """The model of a checkpoint, with its weights, on the CPU."""
    known = {field.name for field in fields(GPTConfig)}
    strange = [name for name in state["model"] if name not in known]
    if strange:
        raise ValueError(
            f"{path} has settings that this version of multigate does not know "
            f"({', '.join(strange)}): use the version that wrote it, "
            f"{state['versions']['multigate']}, or a later one."
        )
    model = GPT(GPTConfig(**state["model"]))
    read_tensors(path, model.state_dict())
    return model


def evaluate(config: EvalConfig, console: Console | None = None) -> Score:
    console = console or Console()
    path, state = open_run(config.run, config.checkpoint)
    data = open_data(Path(state["data"]) if config.data is None else config.data)
    if data.tokenizer_fingerprint != state["tokenizer"]:
        raise ValueError(
            f"{path} was trained with another tokenizer than that of {data.folder}: its losses "
            "would mean nothing there; prepare the text with the tokenizer of the run's data."
        )
    compute = choose(config.device, config.precision)
    model = load_model(path, state).to(compute.device).eval()
    context = model.config.context
    batch = config.batch or max(1, MOST_TOKENS[compute.device.type] // 4 // context)
    split = data.split(config.split)
    result = score(model, split, batch, config.tokens, compute.autocast)
    values = {
        "checkpoint": str(path),
        "data": str(data.folder),
        "split": config.split,
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
    }
    if config.json:
        print(json.dumps(values))
        return result
    table = Table(show_header=False)
    for name, value in values.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), text)
    console.print(table)
    return result
