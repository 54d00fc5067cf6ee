"""Everything the report shows of one model, from one look at the text and some more passes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import angles, dynamics, gates, life, massive, mixing, pruning
from .chart import Chart, Section
from .probe import Watcher, watch
from .running import Arrays

Measured = dict[str, Arrays]
"""The arrays of a model by family."""

FAMILIES: dict[str, tuple[str, Callable[[Mapping[str, Arrays]], list[Chart]]]] = {
    "dynamics": ("Training dynamics", dynamics.charts),
    "angles": ("Angular distance", angles.charts),
    "pruning": ("Block pruning", pruning.charts),
    "massive": ("Massive activations", massive.charts),
    "gates": ("Gates", gates.charts),
    "mixing": ("What is read, and how streams are mixed", mixing.charts),
    "life": ("The life of a stream", life.charts),
}


def measure(
    model: nn.Module,
    rows: Tensor,
    pruned_rows: int,
    batch: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Callable[[str, float], None] = lambda what, share: None,
    found: Measured | None = None,
) -> Measured:
    """All families on `rows` [samples, T + 1]; pruning, a pass for each block, on some of them.

    `progress` is told what is going on and which share of it is done. They are put into `found`
    as they are measured, so that an error leaves what came before it.
    """
    found = {} if found is None else found
    watchers: dict[str, Watcher] = {
        "dynamics": dynamics.Dynamics(),
        "angles": angles.Angles(),
        "massive": massive.Massive(),
        "gates": gates.Gates(),
        "mixing": mixing.Mixing(),
        "life": life.Life(),
    }
    progress("activations", 0.0)
    watch(model, rows[:, :-1], *watchers.values(), batch=batch, autocast=autocast)
    found |= {name: watcher.result() for name, watcher in watchers.items()}
    progress("gradients", 0.0)
    found["dynamics"] |= dynamics.gradients(model, rows, batch, autocast)
    some = torch.linspace(0, len(rows) - 1, min(pruned_rows, len(rows))).long()
    found["pruning"] = pruning.block_pruning(
        model,
        rows[some],
        batch,
        autocast,
        lambda done, total: progress("pruning", done / total),
    )
    return found


def sections(measured: Mapping[str, Measured]) -> list[Section]:
    """The figures of all runs, family by family."""
    return [
        Section(title, draw({label: m[name] for label, m in measured.items() if name in m}))
        for name, (title, draw) in FAMILIES.items()
        if any(name in m for m in measured.values())
    ]
