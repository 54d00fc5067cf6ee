"""The optimizer of the trainer: Muon for the matrices of the sublayers, AdamW for the rest."""

from .config import OptimConfig, learning_rate_share
from .groups import parameter_groups
from .muon import Muon
from .optimizer import Optimizer, build_optimizer, not_finite
from .orthogonal import orthogonalise

__all__ = [
    "Muon",
    "OptimConfig",
    "Optimizer",
    "build_optimizer",
    "learning_rate_share",
    "not_finite",
    "orthogonalise",
    "parameter_groups",
]
