"""Multi-Gate Residuals and every residual architecture it is compared with, behind one seam."""

from . import ops
from .generate import generate
from .gpt import GPT, GPTConfig, preset
from .residuals import (
    MultiGateResidual,
    Residual,
    Stack,
    Sublayer,
    build_residual,
    gate_bias_init,
    register_residual,
    residual_names,
)

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GPTConfig",
    "MultiGateResidual",
    "Residual",
    "Stack",
    "Sublayer",
    "build_residual",
    "gate_bias_init",
    "generate",
    "ops",
    "preset",
    "register_residual",
    "residual_names",
]
