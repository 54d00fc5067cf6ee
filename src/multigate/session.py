"""What a run consists of, built from its configuration: data, model, optimizer, loader.

A `Session` is either new or put back to where its newest checkpoint was made.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import batching
from .checkpoint import checkpoints, open_run, read_state, read_tensors
from .config import TrainConfig, differences, to_table
from .data import Loader, PrepareConfig, open_data, prepare
from .device import Compute, LossScale, versions
from .distributed import World, barrier, parallelise
from .gpt import GPT
from .optim import build_optimizer
from .residuals import build_residual


def find_data(given: str, tokenizer: str, world: World, say: Callable[[str], None]) -> Path:
    """The prepared folder that `given` is, or that is now made of it, in ./data."""
    folder = Path(given)
    if (folder / "data.json").exists() or (folder / "progress.json").exists():
        return folder
    label = f"{folder.name}-{Path(tokenizer).stem}".replace(":", "")
    folder = Path("data") / label
    if world.first:
        if not (folder / "data.json").exists():
            say(f"{given} is prepared into {folder} first")
        prepare(PrepareConfig(out=folder, sources=(given,), tokenizer=tokenizer))
    barrier(world)
    return folder


def check_model(config: TrainConfig) -> None:
    """A model that cannot be built is said before text is prepared for it."""
    model = config.gpt(1)
    with torch.device("meta"):
        options = model.residual_options
        build_residual(model.residual, model.width, 2 * model.blocks, model.streams, **options)


class Session:
    """Everything that training changes, and what it needs to do so."""

    def __init__(
        self, config: TrainConfig, compute: Compute, world: World, say: Callable[[str], None]
    ) -> None:
        self.config, self.compute, self.world = config, compute, world
        self.folder = config.folder
        self.step = 0
        """Steps done."""
        self.bad = 0
        """How many of them, the last ones in a row, were left out as not finite."""
        check_model(config)
        self.resumed = self._newest()
        stored = read_state(self.resumed) if self.resumed is not None else None
        if stored is not None:
            self._check_same_run(stored)
        folder = find_data(config.data, config.tokenizer, world, say)
        self.data = open_data(folder, verify=config.verify_data and world.first)
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
        c, plan, model = self.config, self.plan, self.model
        tokens = self.data.split("train").tokens
        resumed = f", going on from {self.resumed.name}" if self.resumed else ""
        yield f"run {self.folder}{resumed}"
        yield f"model {c.scale}, {c.residual}: {model.parameter_count():,} parameters"
        yield (
            f"data {self.data.folder}: {tokens:,} tokens; {c.steps} steps are "
            f"{c.steps * c.tokens_per_step / tokens:.2f} epochs"
        )
        yield (
            f"step {c.tokens_per_step:,} tokens = processes {self.world.size} x micro-batches "
            f"{plan.accumulation} x windows {plan.micro_batch} x tokens {model.config.context}"
        )
        yield from self.compute.reasons

    def _newest(self) -> Path | None:
        found = checkpoints(self.folder)
        if found and self.config.resume == "never":
            raise ValueError(
                f"{self.folder} holds a run already: give this one another --name, or let it go on "
                "with --resume auto."
            )
        return found[-1] if found else None

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
        """`init`: the best weights of another run, which has to be of the same architecture."""
        path, stored = open_run(run)
        if stored["tokenizer"] != self.data.tokenizer_fingerprint:
            raise ValueError(
                f"{run} was trained with another tokenizer than that of {self.data.folder}: "
                "prepare the data with the tokenizer file in the folder of the run's data."
            )
        read_tensors(path, model.state_dict())

    def _plan(self, stored: dict[str, Any] | None) -> batching.Batching:
        """How a step is cut up; the way it was before, if nothing else is asked for."""
        config, context, size = self.config, self.model.config.context, self.world.size
        micro = config.micro_batch
        share = config.tokens_per_step // context // size
        if micro is None and stored is not None and share % stored["micro_batch"] == 0:
            micro = stored["micro_batch"]

        def most() -> int:
            return batching.most_windows(self.model, self.compute.autocast)

        return batching.plan(config.tokens_per_step, context, size, micro, most)

    def _restore(self, path: Path, stored: dict[str, Any]) -> None:
        self.loader.load_state_dict(stored["loader"])
        weights, rest = self.tensors()
        read_tensors(path, {**weights, **rest})
        torch.set_rng_state(rest["rng.cpu"])
        if self.compute.device.type == "cuda" and stored["cuda_rng"] is not None:
            cuda_rng = torch.tensor(stored["cuda_rng"], dtype=torch.uint8)
            torch.cuda.set_rng_state(cuda_rng, self.compute.device)
        self.step, self.bad = stored["step"], stored["bad"]
