"""Checkpoints: safetensors and JSON, written aside and renamed, so that each is whole or absent.

    RUN/checkpoints/step-00000500/model.safetensors       the weights
                                  training.safetensors    optimizer, random numbers
                                  state.json              step, loader, configuration, val loss

Where parameters are sharded over processes, `torch.distributed.checkpoint` writes every process's
part of both into one safetensors file; such a checkpoint can be read by any number of processes.
Nothing here reads or writes a pickle.
"""

import json
import math
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data.writer import sync_folder
from .distributed import World, barrier
from .optim.sharded import is_sharded

NAME = re.compile(r"step-\d{8,}")
NEEDED = ("step", "model", "data", "tokenizer", "versions")
"""Of a state.json, what no model can be made without."""


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message says what was kept."""


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(p for p in found if NAME.fullmatch(p.name) and p.is_dir())


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("its state.json holds no table")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged ({error}): remove it to go on from the one before."
        ) from None


def complete(path: Path) -> dict[str, Any]:
    """`read_state`, with all that a model can be made from."""
    state = read_state(path)
    missing = [name for name in NEEDED if name not in state]
    if missing:
        raise CheckpointError(
            f"the checkpoint {path} is damaged (its state.json has no {', '.join(missing)}): use "
            "another one."
        )
    return state


def best(run: Path) -> Path | None:
    """The checkpoint with the lowest validation loss; without any, the newest."""
    found = checkpoints(run)
    losses = dict[Path, float]()
    for path in found:
        with suppress(CheckpointError):
            loss = read_state(path).get("val_loss")
            if loss is not None and math.isfinite(loss):
                losses[path] = loss
    return min(losses, key=losses.__getitem__) if losses else (found[-1] if found else None)


def open_run(run: Path, which: str = "best") -> tuple[Path, dict[str, Any]]:
    """A run's checkpoint and its state; `run` may be a checkpoint itself."""
    if (run / "state.json").exists():
        return run, complete(run)
    found = checkpoints(run)
    if not found:
        raise FileNotFoundError(
            f"{run} holds no checkpoint: give the folder of a run of `multigate train`."
        )
    path = (best(run) if which == "best" else None) or found[-1]
    return path, complete(path)


def read_tensors(path: Path, targets: Mapping[str, Tensor], optional: str | None = None) -> None:
    """Copy what the checkpoint holds under the names of `targets` into them, in place.

    A name that is not there, or has another shape, is one sentence, and nothing is changed; names
    that begin with `optional` may be missing.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    try:
        shapes = _shapes(files)
        if optional is not None:
            targets = {
                k: t for k, t in targets.items() if k in shapes or not k.startswith(optional)
            }
        for name, target in targets.items():
            if name not in shapes:
                raise ValueError(
                    f"the checkpoint {path} has no {name!r}: it is of another architecture; "
                    "train under another name, or with the settings the run began with."
                )
            if shapes[name] != tuple(target.shape):
                raise ValueError(
                    f"the checkpoint {path} holds {name!r} of shape {shapes[name]}, this model has "
                    f"{tuple(target.shape)}: it is of another architecture."
                )
        if any(f.name.startswith("shard-") for f in files) or any(
            map(is_sharded, targets.values())
        ):
            _read_sharded(path, targets)
            return
        for file in files:
            with safe_open(file, framework="pt") as stored, torch.no_grad():
                for name in set(stored.keys()) & set(targets):
                    targets[name].copy_(stored.get_tensor(name))
    except (SafetensorError, OSError, dcp_error()) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged ({reason(error)}): remove it to go on from the one "
            "before."
        ) from None


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """The whole shape of every tensor; a sharded one's ends where its last part ends."""
    from safetensors import safe_open

    shapes = dict[str, tuple[int, ...]]()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            parts = json.loads((stored.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                shape = stored.get_slice(name).get_shape()
                start = parts.get(name, {}).get("saved_offsets", [0] * len(shape))
                ends = tuple(a + b for a, b in zip(start, shape, strict=True))
                shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    return shapes


def _read_sharded(path: Path, targets: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(path))
    alone = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        # That nothing is distributed is known.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(targets), storage_reader=reader, no_dist=alone)


class Saver:
    """Writes the checkpoints of a run, in the background where the parameters are whole.

    `save` returns once the tensors are copied; `wait` until they are on the disk, and raises what
    went wrong. The newest `keep` checkpoints stay, and the best one.
    """

    def __init__(self, run: Path, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = run / "checkpoints", keep, world
        self.run = run
        self._copies = dict[str, Tensor]()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".*"):
                shutil.rmtree(left, ignore_errors=True)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the buffers for a GPU's tensors ahead of time: pinning memory takes a second."""
        on_gpu = any(t.device.type == "cuda" for t in tensors.values())
        if self.world.first and on_gpu and not any(map(is_sharded, tensors.values())):
            self._thread = threading.Thread(target=self._make_buffers, args=(tensors,))
            self._thread.start()

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> None:
        self.wait()
        name = checkpoint_path(self.run, step).name
        tensors = {**model, **training}
        if any(map(is_sharded, tensors.values())):
            self._write_sharded(name, tensors, state)
        elif self.world.first:
            copies = self._copy(tensors)
            done = None
            if any(t.is_cuda for t in tensors.values()):
                done = torch.cuda.Event()
                done.record()
            groups = {
                "model.safetensors": {k: copies[k] for k in model},
                "training.safetensors": {k: copies[k] for k in training},
            }
            self._thread = threading.Thread(
                target=self._write, args=(name, groups, dict(state), done), name="checkpoint"
            )
            self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is written; raises a `CheckpointError` if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kept = checkpoints(self.run)
            last = f"the last good one is {kept[-1].name}" if kept else "there is none before it"
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder} ({reason(error)}): {last}; "
                "free some space or change the folder's rights, and run the same command to go on."
            )

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the CPU, into buffers that are made once; from a GPU without waiting for it."""
        self._make_buffers(tensors)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        return self._copies

    def _make_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self._copies:
                pinned = tensor.device.type == "cuda"
                self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)

    def _write(
        self,
        name: str,
        groups: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        done: torch.cuda.Event | None,
    ) -> None:
        from safetensors.torch import save_file

        aside = self.folder / f".{name}"
        try:
            if done is not None:
                done.synchronize()
            aside.mkdir()
            for file, tensors in groups.items():
                save_file(tensors, aside / file, metadata={"format": "pt"})
                fsync(aside / file)
            self._finish(aside, name, state)
        except BaseException as error:
            self._error = error
            shutil.rmtree(aside, ignore_errors=True)

    def _write_sharded(
        self, name: str, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        aside = self.folder / f".{name}"
        writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
        try:
            save(dict(tensors), storage_writer=writer)
            if self.world.first:
                self._finish(aside, name, state)
        except (Exception, dcp_error()) as error:
            self._error = error
            if self.world.first:
                shutil.rmtree(aside, ignore_errors=True)
        barrier(self.world)

    def _finish(self, aside: Path, name: str, state: Mapping[str, Any]) -> None:
        """The last file, the rename that makes the checkpoint visible, and tidying up."""
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        fsync(aside / "state.json")
        fsync(aside)
        aside.rename(self.folder / name)
        fsync(self.folder)
        kept = {*checkpoints(self.run)[-self.keep :], best(self.run)}
        for old in checkpoints(self.run):
            if old not in kept:
                # Renamed first: what is half deleted must not look like a checkpoint.
                gone = old.rename(self.folder / f".{old.name}")
                shutil.rmtree(gone, ignore_errors=True)


def dcp_error() -> type[BaseException]:
    """What `torch.distributed.checkpoint` raises; no `Exception`, strangely."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def reason(error: BaseException) -> str:
    """In one line; of a failure on several processes, the first."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def fsync(path: Path) -> None:
    """Until `path`, a file or a folder, is on the disk."""
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb+") as file:
        os.fsync(file.fileno())
