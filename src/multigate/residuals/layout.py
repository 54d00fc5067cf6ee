"""How a state is made up: which tensor stands where, so that each needs to be sent only once.

This is what a residual without a handover of its own goes by (see `Residual.handover`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Residual

Layout = tuple[Any, ...]
"""A state with a number for every tensor; the same tensor has the same number."""


def numbered(state: tuple[Any, ...], tensors: list[Tensor]) -> Layout:
    """The layout of a state: each tensor's place in `tensors`; one not yet there is appended."""
    layout: list[Any] = []
    for part in state:
        if isinstance(part, Tensor):
            place = next((k for k, t in enumerate(tensors) if t is part), len(tensors))
            if place == len(tensors):
                tensors.append(part)
            layout.append(place)
        else:
            layout.append(numbered(part, tensors))
    return tuple(layout)


def filled(layout: Layout, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The state of this layout."""
    return tuple(tensors[k] if isinstance(k, int) else filled(k, tensors) for k in layout)


def usual_layout(
    residual: "Residual", i: int, device: torch.device, dtype: torch.dtype
) -> tuple[Layout, int]:
    """The layout of (h, state) before sublayer i, and its numbers: seen on a token of zeros."""
    known = residual._layouts
    if (i, dtype) not in known:
        recorded, residual._record = residual._record, None
        tensors: list[Tensor] = []
        with torch.no_grad():
            zero = torch.zeros(residual.dim, device=device, dtype=dtype)
            h, state = residual._start(zero)
            for k in range(i):
                h, state = residual._step(k, zero.clone(), state)
        known[i, dtype] = numbered((h, state), tensors), sum(t.numel() for t in tensors)
        residual._record = recorded
    return known[i, dtype]
