"""What each block is worth: the loss of the model without it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .chart import Bars, Chart, Panel
from .probe import blocks_of, next_tokens, stack_of
from .running import Array, Arrays, Mean

CLAIM = (
    "PreNorm breaks down without one of its early blocks and hardly misses a deep one; competitive "
    "MGR (n=8) loses by all blocks that can be removed within one order of magnitude, most by the "
    "last one (13.67 of perplexity)."
)


def block_pruning(
    model: nn.Module,
    tokens: Tensor,
    batch: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Callable[[int, int], None] | None = None,
) -> Arrays:
    """The mean loss of all next tokens of `tokens` [samples, T], with each block left out in turn.

        delta_loss = pruned - loss,    delta_ppl = exp(pruned) - exp(loss)

    A block is left out by skipping both its sublayers: the residual reads past them and nothing is
    written. For Multi-Gate Residuals the streams stay as they are and are pooled once more by the
    query of the block's last step, which is the next block's; the blocks whose outputs become
    streams cannot be removed. Recorded: `loss`, and `pruned`, `delta_loss` and `delta_ppl`
    [blocks], NaN for a block that cannot be removed and inf where the number is too large.
    `progress(done, total)` is called after each block.
    """
    stack, blocks = stack_of(model), blocks_of(model)
    loss = _loss(model, tokens, batch, autocast)
    pruned = np.full(len(blocks), np.nan)
    for k, block in enumerate(blocks):
        if all(stack.residual.can_skip(i) for i in block):
            with stack.skipping(*block):
                found = _loss(model, tokens, batch, autocast)
            # NaN says that a block cannot be removed; a model that breaks down has no finite loss.
            pruned[k] = np.inf if np.isnan(found) else found
        if progress is not None:
            progress(k + 1, len(blocks))
    with np.errstate(over="ignore", invalid="ignore"):
        delta_loss, delta_ppl = pruned - loss, np.exp(pruned) - np.exp(loss)
    return {"loss": loss, "pruned": pruned, "delta_loss": delta_loss, "delta_ppl": delta_ppl}


@torch.no_grad()
def _loss(
    model: nn.Module,
    tokens: Tensor,
    batch: int | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Array:
    """The mean over all samples, in nats, of model(tokens[:, :-1], tokens[:, 1:])."""
    mean = Mean()
    for inputs, targets in next_tokens(model, tokens, batch):
        with autocast():
            loss = model(inputs, targets)
        mean.add(loss.expand(len(inputs)))
    return mean.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """The change of perplexity, on a logarithmic axis, and that of the loss; a panel a run."""
    return [
        _chart(runs, "delta_ppl", "perplexity", ppl=True),
        _chart(runs, "delta_loss", "loss", ppl=False),
    ]


def _chart(runs: Mapping[str, Arrays], key: str, what: str, ppl: bool) -> Chart:
    panels, seen, absent = [], [], []
    for colour, (label, arrays) in enumerate(runs.items()):
        if key not in arrays:
            absent.append(f"{label} has no pruned blocks on record.")
            continue
        if not _finite(arrays.get("loss", np.zeros(())), ppl):
            absent.append(f"{label} has no finite {what} that could change.")
            continue
        change = arrays[key]
        absent += _kept(label, change)
        if not np.isnan(change).all():
            notes = [f"block {k}: {what} {v:+.4g}" for k, v in enumerate(change, start=1)]
            numbers = np.arange(1, len(change) + 1)
            bars = Bars(label, numbers, change, colour, notes, missing="cannot be removed")
            panels.append(Panel(label, "block left out", f"change of {what}", [bars], log_y=ppl))
        seen += _seen(label, what, change, ppl)
    return Chart(
        name=f"pruning-{what}",
        title=f"Block pruning: {what}",
        shows=f"How much the {what} rises when one block is left out, without further training.",
        panels=panels,
        claim=CLAIM,
        seen=" ".join(seen),
        absent=absent,
    )


def _finite(loss: Array, ppl: bool) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.exp(loss) if ppl else loss))


def _kept(label: str, change: Array) -> list[str]:
    kept = np.isnan(change)
    if not kept.any():
        return []
    if kept.all():
        return [f"No block of {label} can be removed: each makes some of its streams."]
    verb = "make" if kept.sum() > 1 else "makes"
    named = _named(kept)
    return [f"{named.capitalize()} of {label} {verb} its streams and cannot be removed."]


def _seen(label: str, what: str, change: Array, ppl: bool) -> list[str]:
    found = []
    finite = np.isfinite(change)
    if finite.sum() == 1:
        (k,) = np.flatnonzero(finite)
        found.append(f"Without block {k + 1} the {what} of {label} changes by {change[k]:+.3g}.")
    elif finite.any():
        least = int(np.argmin(np.where(finite, change, np.inf)))
        most = int(np.argmax(np.where(finite, change, -np.inf)))
        found.append(
            f"Without one block the {what} of {label} changes by {change[least]:+.3g} "
            f"(block {least + 1}) to {change[most]:+.3g} (block {most + 1})."
        )
    endless, lower = np.isposinf(change), change <= 0
    if endless.any():
        found.append(
            f"The {what} of {label} is too large to be a number without {_named(endless, 'or')}."
        )
    if ppl and lower.any():
        found.append(
            f"The {what} of {label} is no higher without {_named(lower, 'or')}, which a "
            "logarithmic axis cannot show: no bar."
        )
    return found


def _named(which: Array, last: str = "and") -> str:
    """The places of what is true, counted from 1: "block 1", or "blocks 1, 2 and 3"."""
    *numbers, end = (str(k + 1) for k in np.flatnonzero(which))
    return f"blocks {', '.join(numbers)} {last} {end}" if numbers else f"block {end}"
