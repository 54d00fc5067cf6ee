"""The settings of the optimizer, and how the learning rate moves over a run."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from multigate.names import unknown

Method = Literal["polar-express", "newton-schulz"]
Scale = Literal["original", "match-rms-adamw"]


@dataclass(frozen=True)
class OptimConfig:
    """Muon on the matrices of the sublayers, AdamW on everything else."""

    lr_muon: float = 1e-2
    """Peak learning rate of Muon."""
    lr_adamw: float = 3e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.1
    """Decoupled; on matrices only: gates, queries, biases and norm weights are left alone."""
    momentum: float = 0.95
    """Of Muon: the share of the old momentum that is kept."""
    nesterov: bool = True
    """Muon looks one step ahead of its momentum."""
    method: Method = "polar-express"
    """How Muon orthogonalises, in five steps either way."""
    scale: Scale = "original"
    """Muon's factor for an r x c matrix: sqrt(max(1, r/c)), or 0.2 sqrt(max(r, c))."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """Of AdamW's denominator."""
    clip: float = 1.0
    """Largest norm of all gradients together; 0 leaves them as they are."""
    warmup: int = 100
    """Steps over which the learning rates rise to their peak."""
    floor: float = 0.1
    """The cosine ends at this share of the peak."""
    muon: bool = True
    """Without: AdamW on the matrices too, at lr_adamw."""

    def __post_init__(self) -> None:
        for name in ("lr_muon", "lr_adamw", "weight_decay", "clip"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"OptimConfig: {name} must be a number from 0 up, got {value!r}.")
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(
                    f"OptimConfig: {name} must be at least 0 and below 1, got {value!r}."
                )
        if not 0 < self.eps < math.inf:
            raise ValueError(f"OptimConfig: eps must be a number above 0, got {self.eps!r}.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"OptimConfig: floor must be a share from 0 to 1, got {self.floor!r}.")
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(
                f"OptimConfig: warmup must be a whole number of steps from 0 up, "
                f"got {self.warmup!r}."
            )
        if self.method not in get_args(Method):
            raise ValueError(unknown("method", self.method, get_args(Method)))
        if self.scale not in get_args(Scale):
            raise ValueError(unknown("scale", self.scale, get_args(Scale)))


def learning_rate_share(step: int, steps: int, warmup: int, floor: float) -> float:
    """The share of the peak learning rate at `step` = 0 .. steps - 1: a line, then a cosine.

    1 / (warmup + 1) at step 0, 1 at step `warmup`, and `floor` from step `steps` on: the last
    step, steps - 1, is one step of the cosine above it.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
