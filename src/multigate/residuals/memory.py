"""Where the backward pass of the gated steps has the streams from: the price of n of them.

    store       every step keeps the streams before it
    recompute   every `every`-th step does; those between are made once more from the sublayers'
                outputs, which are kept in any case, bit for bit
    invert      s = (s' - beta y) / (1 - beta), backwards from the last step's; a share `keep` of
                the streams, those of the largest gate values, is kept as it was, and with `every`
                all of them at every so many steps
    exact       the same, and two bits an element with which the streams are the same to the last
                bit

The first gated step keeps its streams in any mode: they are outputs of sublayers, which are kept.
So does the last one of a chain: from there the others are found.

A state is (streams,) where the next step shall keep them, or (streams, owed) in the middle of a
chain: what the steps before are still to be given, by stand-ins (see ops/gate_pool/lean.py).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multigate.names import unknown
from multigate.ops.gate_pool import kernel_for, lean

MODES = ("store", "recompute", "invert", "exact")
State = tuple[Any, ...]


class Gate(Protocol):
    """A gated step: `MultiGateResidual`."""

    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter
    gate_variant: str
    eps: float


@dataclass(frozen=True)
class Memory:
    """One of the modes, for a chain of gated steps."""

    mode: str = "store"
    keep: float = 0.01
    every: int | None = None
    millionths: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(unknown("memory", self.mode, MODES))
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is a share of the streams, from 0 to 1, got {self.keep}.")
        # torch.compile may take a float for a variable, and the size of what is kept with it.
        object.__setattr__(self, "millionths", round(1e6 * self.keep))
        if self.every is not None and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(
                f"every must be a whole number of steps, at least 1, got {self.every}."
            )

    def ends(self, step: int, steps: int) -> bool:
        """Whether a chain ends at gated step `step` of `steps`: with it in "recompute", before it
        where steps are inverted, from the streams that this one keeps."""
        if self.mode == "recompute":
            every = self.every or max(round(math.sqrt(steps)), 1)
            return step == steps - 1 or (step + 1) % every == 0
        return step == steps - 1 or (self.every is not None and step % self.every == 0)

    def step(
        self, gate: Gate, y: Tensor, state: State, norm_weight: Tensor | None, last: bool
    ) -> tuple[Tensor, State, Tensor | None]:
        """h, the next state, and with "exact" how many elements could not be kept exactly."""
        if last and self.mode != "recompute":
            # Not after the step: to invert the last one from an output that is kept gains nothing.
            state = (self.end(state, gate),)
        streams, owed, lost = state[0], state[1] if len(state) == 2 else None, None
        weights = (gate.w1, gate.w2, gate.b1, norm_weight)
        options = (gate.gate_variant, gate.eps, kernel_for(y, [streams]))
        if owed:
            once(owed)
        if owed is None or self.mode == "recompute":
            block, steps = (flat(owed), len(owed) - 1) if owed and last else ([], 0)
            h, new, before, saved = lean.Replayed.apply(
                y, streams, *weights, owed is None, steps, *options, *block
            )
            owed = self._owed(owed, streams, y, (*weights, saved), before)
        else:
            before = owed[0] if owed else None
            if self.mode == "invert":
                h, new, after = lean.Inverted.apply(
                    y, streams, *weights, before, self.millionths, *options
                )
            else:
                h, new, after, lost = lean.Exact.apply(y, streams, *weights, before, *options)
            owed = (after,)
        return h, (new,) if last and self.mode == "recompute" else (new, owed), lost

    def _owed(
        self,
        owed: State | None,
        streams: Tensor,
        y: Tensor,
        used: tuple[Tensor | None, ...],
        before: Tensor,
    ) -> State:
        """After a step of a block: what there was, and y, what was used and the stand-in of it."""
        if self.mode != "recompute":
            return ()
        entry = (y.detach(), *(() if t is None else t for t in used), before)
        return (*(owed or (streams.detach(),)), entry)

    def end(self, state: State, gate: Gate) -> Tensor:
        """The streams of a chain that ends here without a step."""
        if len(state) == 1 or not state[1]:
            return state[0]
        streams, owed = state
        once(owed)
        if self.mode != "recompute":
            return lean.Kept.apply(streams, owed[0])
        options = (gate.gate_variant, gate.eps, kernel_for(owed[1][0], [streams]))
        return lean.KeptBlock.apply(streams, len(owed) - 1, *options, *flat(owed))


def flat(owed: State) -> list[Tensor | None]:
    """What a block owes, as `lean.Replayed` wants it."""
    first, *entries = owed
    inputs = [t for entry in entries for t in entry[:-1]]
    given = (t if isinstance(t, Tensor) else None for t in inputs)
    return [first, *given, *(entry[-1] for entry in entries[1:])]


def once(owed: State) -> None:
    """Refuse a second step from one state: its stand-ins would bring the streams twice."""
    if torch.compiler.is_compiling() or not owed:
        return
    last = owed[-1]
    stand_in = last[-1] if isinstance(last, tuple) else last
    if not isinstance(stand_in, Tensor):
        return
    if getattr(stand_in, "spent", False):
        raise ValueError(
            "a second step from one state needs memory='store': the other modes go through a "
            "chain of states once, so checkpoint sublayers, not steps."
        )
    stand_in.spent = True  # type: ignore[attr-defined]
