"""Every residual architecture: one file each, found by itself when it is put into this folder."""

import importlib
import pkgutil

from .base import (
    Residual,
    State,
    build_residual,
    flatten_state,
    register_residual,
    residual_names,
)
from .init import gate_bias_init
from .stack import Stack, Sublayer

# Importing a file registers what is in it; these come first in `residual_names()`, simplest first.
_FIRST = ("prenorm", "highway", "denseformer", "hc", "mhc", "attnres", "mgr")
_files = sorted(module.name for module in pkgutil.iter_modules(__path__))
for _file in (*_FIRST, *(name for name in _files if name not in _FIRST)):
    importlib.import_module(f"{__name__}.{_file}")

from .mgr import MultiGateResidual  # noqa: E402

__all__ = [
    "MultiGateResidual",
    "Residual",
    "Stack",
    "State",
    "Sublayer",
    "build_residual",
    "flatten_state",
    "gate_bias_init",
    "register_residual",
    "residual_names",
]
