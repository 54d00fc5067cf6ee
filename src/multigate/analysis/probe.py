"""A probe on the seam: what goes through a residual's `start` and `step`, while a model runs.

    with Probe(model, Massive(), Gates()):
        model(tokens)

The model is left as it is: for the length of the context its residual's two verbs are wrapped.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multigate.residuals.base import State
from multigate.residuals.stack import Stack

from .running import Arrays

BLOCK = 2
"""Sublayers of a transformer block: attention, then MLP."""


@dataclass(frozen=True)
class Step:
    """A step as it went by; i = -1 is the start, which has no input and no output.

    The norm of the next sublayer is not in `hidden` (except where the residual applies it before
    it sums its streams, and only after the last step).
    """

    i: int
    input: Tensor | None
    """h [..., D], which sublayer i has read."""
    output: Tensor | None
    """y [..., D], which it has written; None if it was skipped."""
    hidden: Tensor
    """h [..., D], which the next sublayer reads."""
    before: Tensor | None
    """The streams [..., m, D] before the step; None for a residual without streams."""
    after: Tensor | None
    """The streams after it."""
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    """alpha, beta, mix, ... by name, as `Residual.recording` gives them."""
    mixture: tuple[Tensor, Tensor] | None = None
    """What the step has done to the streams, see `Residual.mixture`."""
    summed: int = 1
    """How many streams `hidden` is the plain sum of: divided by it, sizes can be compared."""


class Watcher(Protocol):
    """Something that sees every step and says in the end what it has recorded."""

    def see(self, step: Step) -> None: ...

    def result(self) -> Arrays: ...


class Probe:
    """Shows every step of a model, or of a `Stack`, to the watchers for the length of a context."""

    def __init__(self, model: nn.Module, *watchers: Watcher) -> None:
        self.residual = stack_of(model).residual
        self.watchers = watchers
        self._stack = ExitStack()
        self._noted: dict[int, dict[str, Tensor]] = {}
        self._last: tuple[Tensor, Tensor | None] | None = None

    def __enter__(self) -> "Probe":
        if "step" in vars(self.residual):
            raise ValueError("this model is watched already: leave the first probe before.")
        self._noted = self._stack.enter_context(self.residual.recording())
        for name, wrapped in (("start", self._start), ("step", self._step)):
            setattr(self.residual, name, wrapped)
            self._stack.callback(delattr, self.residual, name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._last = None

    def _start(self, x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, State]:
        h, state = type(self.residual).start(self.residual, x)
        streams = self.residual.carried(0, state)
        self._show(Step(-1, None, None, h, None, streams, self._noted.pop(-1, {})))
        return (h if norm is None else norm(h)), state

    def _step(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module | None = None
    ) -> tuple[Tensor, State]:
        assert self._last is not None, "a step before the start"
        apart = self.residual.norm_apart(i)
        step = type(self.residual).step
        h, state = step(self.residual, i, y, state, None if apart else norm)
        (read, before), after = self._last, self.residual.carried(i + 1, state)
        noted = self._noted.pop(i, {})
        mixture = self.residual.mixture(i, noted) if y is not None else None
        summed = self.residual.summed(i)
        self._show(Step(i, read, y, h, before, after, noted, mixture, summed))
        return (norm(h) if apart and norm is not None else h), state

    def _show(self, step: Step) -> None:
        self._last = step.hidden, step.after
        for watcher in self.watchers:
            watcher.see(step)


def stack_of(model: nn.Module) -> Stack:
    """The `Stack` of a model, or the model itself if it is one."""
    stack = model if isinstance(model, Stack) else getattr(model, "stack", None)
    if not isinstance(stack, Stack):
        raise ValueError(
            f"{type(model).__name__} has no Stack to look into: give a multigate.GPT, a Stack, or "
            "a module that holds a Stack as `stack`."
        )
    return stack


def blocks_of(model: nn.Module) -> list[range]:
    """The sublayers of every whole transformer block."""
    return [range(BLOCK * k, BLOCK * (k + 1)) for k in range(depth_of(model) // BLOCK)]


def depth_of(model: nn.Module) -> int:
    return stack_of(model).residual.depth


@torch.no_grad()
def watch(
    model: nn.Module,
    tokens: Tensor,
    *watchers: Watcher,
    batch: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Run `tokens` [samples, T] through the model in batches, under the eyes of the watchers."""
    with Probe(model, *watchers):
        for rows in batches(model, tokens, batch):
            with autocast():
                model(rows)


def batches(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Iterator[Tensor]:
    """`tokens` in batches of so many samples, or of about 16,000 tokens, on the model's device."""
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(
            f"tokens must be of shape [samples, T] and not empty, got {tuple(tokens.shape)}."
        )
    device = next(iter(_tensors(model))).device
    for rows in tokens.split(batch or max(1, 16384 // tokens.shape[1])):
        yield rows.to(device)


def next_tokens(
    model: nn.Module, tokens: Tensor, batch: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """`tokens` [samples, T] as inputs and targets [rows, T - 1], batch by batch."""
    if tokens.ndim == 2 and tokens.shape[1] == 1:
        raise ValueError(
            "the loss of next tokens needs at least 2 tokens in a sample, got "
            f"{tuple(tokens.shape)}."
        )
    for rows in batches(model, tokens, batch):
        # A copy, because tensors of inference mode cannot be kept for a backward pass.
        rows = rows.clone()
        yield rows[:, :-1], rows[:, 1:]


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield torch.empty(0)
