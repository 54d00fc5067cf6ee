"""What a run consists of, built from its configuration: data, model, optimizer, loader.

A `Session` is either new or put back to where its newest checkpoint was made.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import batching
from .checkpoint import (
    checkpoint_path,
    checkpoints,
    open_run,
    read_state,
    read_tensors,
)
from .config import TrainConfig, compared, differences, to_table
from .data import Loader, PrepareConfig, open_data, prepare
from .data.shards import HEADER, PROGRESS
from .device import Compute, LossScale, versions
from .distributed import World, least_over, parallelise
from .gpt import GPT
from .optim import build_optimizer
from .residuals import build_residual

ANY_WEIGHTS = {"context", "stream_dtype"}
"""What of a model's configuration its weights do not depend on."""


def prepared_folder(given: str, tokenizer: str) -> Path:
    """The prepared folder that `given` is, or that will be made of it, in ./data."""
    source = Path(given)
    if (source / HEADER).exists() or (source / PROGRESS).exists():
        return source
    return Path("data") / f"{source.name}-{Path(tokenizer).stem}".replace(":", "")


def find_data(given: str, tokenizer: str, first: bool, say: Callable[[str], None]) -> Path:
    """`prepared_folder`, made now if it has to be.

    The first process prepares, which may take hours, and the others wait for its header; so this
    comes before the processes join, whose patience with each other is limited.
    """
    source = Path(given)
    folder = prepared_folder(given, tokenizer)
    if folder == source:
        return source
    if not first:
        while not (folder / HEADER).exists():
            time.sleep(0.5)
        return folder
    if not (folder / HEADER).exists():
        say(f"{given} is prepared into {folder} first")
    # Without the slash a path may end with.
    word = str(source) if source.exists() else given
    prepare(PrepareConfig(out=folder, sources=(word,), tokenizer=tokenizer))
    return folder


def check_model(config: TrainConfig) -> None:
    """A model that cannot be built is said before text is prepared for it."""
    model = config.gpt(1)
    with torch.device("meta"):
        options = model.options()
        build_residual(model.residual, model.width, 2 * model.blocks, model.streams, **options)


def describe_model(config: TrainConfig, parameters: int) -> str:
    memory = "" if config.model.memory == "store" else f", memory {config.model.memory}"
    return f"model {config.scale}, {config.residual}{memory}: {parameters:,} parameters"


def describe_step(config: TrainConfig, plan: batching.Batching, processes: int) -> str:
    """How a step's tokens come about."""
    context = config.tokens_per_step // plan.windows
    return (
        f"step {config.tokens_per_step:,} tokens = processes {processes} x micro-batches "
        f"{plan.accumulation} x windows {plan.micro_batch} x tokens {context}"
    )


class Session:
    """Everything that training changes, and what it needs to do so."""

    def __init__(
        self, config: TrainConfig, compute: Compute, world: World, data_folder: Path
    ) -> None:
        self.config, self.compute, self.world = config, compute, world
        self.folder = config.folder
        self.step = 0
        """Steps done."""
        self.bad = 0
        """How many of them, the last ones in a row, were left out as not finite."""
        self.resumed = self._newest()
        stored = read_state(self.resumed) if self.resumed is not None else None
        if stored is not None:
            self._check_same_run(stored)
        self.data = open_data(data_folder, verify=config.verify_data and world.first)
        if "val" not in self.data.splits():
            raise ValueError(
                f"{data_folder} has no held-out text, its documents are too few to choose from: "
                "prepare it with a larger --val-share, or with --val and a source of its own."
            )
        self.val = self.data.split("val")
        self.model = self._build()
        self.val.windows(self.model.config.context)  # none at all is said before training
        self.plan = self._plan(stored)
        self.loader = Loader(
            self.data.split("train"),
            self.model.config.context,
            self.plan.windows,
            config.seed,
            world.rank,
            world.size,
            compute.device,
        )
        self.module = parallelise(self.model, world, config.parallel)
        self.optimizer = build_optimizer(self.model, config.optim, config.steps)
        self.scale = LossScale(compute.device) if compute.precision == "fp16" else None
        if self.resumed is not None and stored is not None:
            self._restore(self.resumed, stored)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights, and whatever else a checkpoint needs to hold; not copies."""
        scale = self.scale.state() if self.scale is not None else {}
        rest = {**self.optimizer.state(), **scale, "rng.cpu": torch.get_rng_state()}
        return self.model.state_dict(), rest

    def state(self) -> dict[str, Any]:
        """The same for what is no tensor."""
        device = self.compute.device
        on_gpu = device.type == "cuda"
        return {
            "step": self.step,
            "bad": self.bad,
            "micro_batch": self.plan.micro_batch,
            "cuda_rng": torch.cuda.get_rng_state(device).tolist() if on_gpu else None,
            "loader": self.loader.state_dict(),
            "data": str(self.data.folder),
            "tokenizer": self.data.tokenizer_fingerprint,
            "config": to_table(self.config),
            "model": asdict(self.model.config),
            "versions": versions(),
        }

    def describe(self) -> Iterator[str]:
        """The first lines of a run, for the person who watches."""
        c, model = self.config, self.model
        tokens = self.data.split("train").tokens
        resumed = f", going on from {self.resumed.name}" if self.resumed else ""
        yield f"run {self.folder}{resumed}"
        yield describe_model(c, model.parameter_count())
        yield (
            f"data {self.data.folder}: {tokens:,} tokens; {c.steps} steps are "
            f"{c.steps * c.tokens_per_step / tokens:.2f} epochs"
        )
        yield describe_step(c, self.plan, self.world.size)
        yield from self.compute.reasons

    def _newest(self) -> Path | None:
        """The first process's newest checkpoint, which all others have to see as well."""
        found = checkpoints(self.folder)
        if found and self.config.resume == "never":
            raise ValueError(
                f"{self.folder} holds a run already: give this one another --name, or let it go on "
                "with --resume auto."
            )
        own = int(found[-1].name.removeprefix("step-")) if found and self.world.first else -1
        step = -least_over(self.world, -own)
        if step < 0:
            return None
        path = checkpoint_path(self.folder, step)
        if not path.exists():
            raise ValueError(
                f"this process does not see {path}, which the first one does: all machines of a "
                "run need the same --out folder, on a disk they share."
            )
        return path

    def _check_same_run(self, stored: dict[str, Any]) -> None:
        changed = differences(stored["config"], self.config)
        if changed:
            raise ValueError(
                f"{self.folder} is a run with other settings ({'; '.join(changed)}): go on with "
                "the old ones, give this run another --name, or start from its weights with "
                f"--init {self.folder}."
            )

    def _build(self) -> GPT:
        config = self.config
        torch.manual_seed(config.seed)
        # On the CPU first: the same seed gives the same weights on every device.
        model = GPT(config.gpt(self.data.vocab_size))
        if config.init is not None and self.resumed is None:
            self._take_weights(model, config.init)
        model.stack.checkpointing = config.checkpoint_activations
        return model.to(self.compute.device)

    def _take_weights(self, model: GPT, run: Path) -> None:
        """`init`: the best weights of another run, or those that `save_pretrained` has written; of
        the same architecture."""
        # Here, because multigate.hf brings Transformers with it, which takes seconds to import.
        from .hf.saved import is_saved_model, read_saved_config, read_weights

        saved = is_saved_model(run)
        if saved:
            theirs, tokenizers = read_saved_config(run)
        else:
            path, stored = open_run(run)
            theirs, tokenizers = stored["model"], [stored["tokenizer"]]
        if tokenizers and self.data.tokenizer_fingerprint not in tokenizers:
            raise ValueError(
                f"{run} was trained with another tokenizer than that of {self.data.folder}: "
                "prepare the data with the tokenizer file in the folder of the run's data (or, of "
                "an exported model, in its own folder)."
            )
        ours, theirs = compared(asdict(model.config)), compared(theirs)
        changed = [k for k in ours if k not in ANY_WEIGHTS and theirs.get(k) != ours[k]]
        if changed:
            said = ", ".join(f"{k} {theirs.get(k)} -> {ours[k]}" for k in changed)
            raise ValueError(
                f"{run} is of another architecture ({said}): start from a run of the same one."
            )
        if saved:
            read_weights(run, model)
        else:
            read_tensors(path, model.state_dict())

    def _plan(self, stored: dict[str, Any] | None) -> batching.Batching:
        """How a step is cut up; the way it was before, if nothing else is asked for."""
        config, context, size = self.config, self.model.config.context, self.world.size
        micro = config.micro_batch
        share = config.tokens_per_step // context // size
        if micro is None and stored is not None and share % stored["micro_batch"] == 0:
            micro = stored["micro_batch"]

        def most() -> int:
            shards = size if config.parallel == "fsdp" else 1
            fit = batching.most_windows(self.model, self.compute.autocast, shards)
            return least_over(self.world, fit)

        return batching.plan(config.tokens_per_step, context, size, micro, most)

    def _restore(self, path: Path, stored: dict[str, Any]) -> None:
        self.loader.load_state_dict(stored["loader"])
        weights, rest = self.tensors()
        # A run begun in another precision has no scale: it starts from where it always does.
        read_tensors(path, {**weights, **rest}, optional="loss_scale.")
        torch.set_rng_state(rest["rng.cpu"])
        if self.compute.device.type == "cuda" and stored.get("cuda_rng") is not None:
            cuda_rng = torch.tensor(stored["cuda_rng"], dtype=torch.uint8)
            torch.cuda.set_rng_state(cuda_rng, self.compute.device)
        self.step, self.bad = stored["step"], stored["bad"]
