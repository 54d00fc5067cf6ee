"""What fits: an estimate of the memory that a training step takes, in each memory mode.

A whole step (forward, backward, optimizer) runs on fake tensors, which have shapes and no numbers:
seconds for any size, on any machine. What is alive at its fullest moment is the estimate.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from . import batching
from .config import TrainConfig
from .data.shards import HEADER, read_header
from .data.tokenizer import make_tokenizer
from .device import DTYPES, Compute, choose
from .gpt import GPT, GPTConfig
from .live import Live
from .ops import backend
from .ops.gate_pool import KERNELS
from .optim import OptimConfig, build_optimizer
from .residuals import build_residual
from .residuals.memory import MODES
from .session import check_model, describe_model, describe_step, prepared_folder

PARTS = ("weights", "gradients", "optimizer", "sublayers", "residual", "working")
GPT2_TOKENS = 50257


@dataclass(frozen=True)
class Step:
    """What a device computes in a step, apart from the model."""

    windows: int
    """Of a micro-batch."""
    accumulation: int = 1
    """Micro-batches; from the second on there are gradients from the start."""
    precision: str = "fp32"
    kernel: str = "torch"
    """The backend of the residual's operations."""
    checkpointing: bool = False

    def autocast(self) -> AbstractContextManager[object]:
        """On a CPU, where fake tensors live; what it casts is the same on a GPU."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast("cpu", dtype=DTYPES[self.precision])


def estimate(config: GPTConfig, optim: OptimConfig, step: Step) -> dict[str, int]:
    """The bytes of each of `PARTS` at the fullest moment of a step that is not compiled.

    `sublayers`: their inputs and what they keep themselves, with the weights as autocast has cast
    them. `residual`: what it has made or was given, and is still there. `working`: all else; the
    logits in float32 and their gradients, as a rule.
    """
    live = Live()
    with FakeTensorMode(), backend.assuming(step.kernel), live:
        live.part = "weights"
        model = GPT(config)
        model.stack.checkpointing = step.checkpointing
        live.part = "optimizer"
        optimizer = build_optimizer(model, optim, steps=1)
        live.part = "working"
        watch(model, live)
        tokens = torch.zeros(step.windows, config.context, dtype=torch.long)
        for _ in range(min(step.accumulation, 2)):
            with step.autocast():
                loss = model(tokens, tokens)
            loss.backward()
        optimizer.clip()
        optimizer.step(torch.zeros(()))
    return {part: live.peak.get(part, 0) for part in PARTS}


def watch(model: GPT, live: Live) -> None:
    """Tell `live` to which part belongs what the model makes."""
    before = list[str]()

    def enter(part: str, owner: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            before.append(live.part)
            live.part = part
            live.give(args[0], owner)

        return hook

    def leave(owner: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor | None) -> None:
            live.part = before.pop()
            if out is not None:
                live.give(out, owner)

        return hook

    model.stack.register_forward_pre_hook(enter("residual", "residual"))
    model.stack.register_forward_hook(leave("working"))
    for sublayer in model.stack.sublayers:
        sublayer.register_forward_pre_hook(enter("sublayers", "sublayers"))
        # Always: a checkpointed sublayer is left by an exception when it is computed again.
        sublayer.register_forward_hook(leave("residual"), always_call=True)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: live.give(p.grad, "gradients"))


def modes(config: GPTConfig) -> tuple[str, ...]:
    """The memory modes of the residual; one without them stores."""
    with torch.device("meta"):
        residual = build_residual(
            config.residual, config.width, 2 * config.blocks, config.streams, **config.options()
        )
    return MODES if "memory" in inspect.signature(type(residual)).parameters else MODES[:1]


def in_mode(config: GPTConfig, mode: str) -> GPTConfig:
    """The same model in another memory mode."""
    options = {name: value for name, value in config.residual_options.items() if name != "memory"}
    return replace(config, memory=mode, residual_options=options)


def vocabulary(config: TrainConfig) -> int:
    """Ids of the tokenizer, from the header of the data, or as it would be prepared."""
    folder, word = prepared_folder(config.data, config.tokenizer), config.tokenizer
    if (folder / HEADER).exists():
        size: int = read_header(folder)["vocab_size"]
        return size
    if word == "gpt2":
        return GPT2_TOKENS
    if word.startswith("bpe:") and word[4:].isdecimal():
        return int(word[4:])
    return make_tokenizer(word).vocab_size


def target(config: TrainConfig) -> Compute:
    """What to train on; for an estimate a GPU need not be there."""
    if config.device != "cuda" or torch.cuda.is_available():
        return choose(config.device, config.precision, config.compile)
    precision = "bf16" if config.precision == "auto" else config.precision
    reason = f"device cuda, precision {precision}: taken as given, this machine has no GPU"
    return Compute(torch.device("cuda"), precision, config.compile != "off", (reason,))


def kernel(compute: Compute) -> str:
    """The backend of the residual's operations on the target."""
    if compute.device.type != "cuda" or os.environ.get(backend.VARIABLE) == "torch":
        return "torch"
    if not torch.cuda.is_available():
        return KERNELS[0]
    device, dtype = compute.device, str(DTYPES[compute.precision])
    return backend.choose("gate_pool", KERNELS, "auto", device.type, device.index, dtype)


def cut_up(
    config: TrainConfig, model: GPTConfig, compute: Compute, processes: int = 1
) -> tuple[batching.Batching, Step]:
    """How a step is cut up, with the largest micro-batch that is of use if none was chosen."""
    useful = max(1, batching.MOST_TOKENS[compute.device.type] // model.context)
    plan = batching.plan(
        config.tokens_per_step, model.context, processes, config.micro_batch, lambda: useful
    )
    return plan, Step(
        plan.micro_batch,
        plan.accumulation,
        compute.precision,
        kernel(compute),
        config.checkpoint_activations,
    )


def dry_run(config: TrainConfig, console: Console | None = None) -> None:
    """Show the model and what a step of it takes in every memory mode, and train nothing."""
    console = console or Console()
    check_model(config)
    compute, processes = target(config), int(os.environ.get("WORLD_SIZE", 1))
    model = config.gpt(vocabulary(config))
    plan, step = cut_up(config, model, compute, processes)
    if os.environ.get("RANK", "0") == "0":
        with torch.device("meta"):
            parameters = GPT(model).parameter_count()
        console.print(describe_model(config, parameters))
        console.print(describe_step(config, plan, processes))
        console.print(table(config, model, step))
        for line in (*compute.reasons, *notes(config, compute)):
            console.print(line)


def table(config: TrainConfig, model: GPTConfig, step: Step) -> Table:
    chosen = model.options().get("memory", MODES[0])
    shown = Table(box=None)
    shown.add_column("memory")
    for part in (*PARTS, "peak"):
        shown.add_column(part, justify="right")
    for mode in modes(model):
        parts = estimate(in_mode(model, mode), config.optim, step)
        sizes = [*parts.values(), sum(parts.values())]
        name = f"{mode} *" if mode == chosen else mode
        shown.add_row(name, *(f"{size / 2**30:.2f}" for size in sizes))
    return shown


def notes(config: TrainConfig, compute: Compute) -> Iterator[str]:
    yield (
        "* the chosen mode. GiB on a device, estimated from shapes alone: what autograd keeps and "
        "the largest working set, as a rule the logits in float32 and their gradients."
    )
    if compute.compile:
        yield (
            "This is without torch.compile, which may lower it, in every mode by about the same: "
            "the loss needs less then, and copies in float32 are not kept."
        )
    if config.micro_batch is None:
        yield (
            "The micro-batch is the largest that is of use; training takes one that fits the "
            "device. --micro-batch sets it."
        )
