"""Where a run can be logged to beside its own log: TensorBoard, Weights & Biases."""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .data.optional import optional


class Tracker(Protocol):
    """Somewhere else to log to."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        optional("tensorboard", "track", "logging to TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        # What an interrupted run wrote after the step it goes on from is hidden.
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, run: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        wandb = optional("wandb", "track", "logging to Weights & Biases")
        known = run / "wandb-id"
        identity = known.read_text() if known.exists() else uuid.uuid4().hex[:8]
        known.write_text(identity)
        try:
            self._run = wandb.init(
                project="multigate",
                name=name,
                id=identity,
                resume="allow",
                dir=str(run),
                config=dict(config),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"Weights & Biases refused the run ({error}): log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
