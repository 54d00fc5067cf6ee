"""What is measured: the operations with their inputs, the bytes they must move, their reference."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multigate.ops.depth_pool import reference as depth_reference
from multigate.ops.gate_pool import reference as gate_reference

EPS = 1e-6
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Size:
    """One problem: n streams (or sources) of `tokens` x `width` numbers of type `dtype`."""

    n: int
    width: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    variant: str = "competitive"
    """The gate of gate_pool."""
    norm: bool = False
    """Whether h comes back as RMSNorm(h) * norm_weight."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call: those with a row for each token, and the weights."""

    rows: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    norm_weight: Tensor | None
    names: tuple[str, ...]
    """Of rows and weights, for messages."""
    size: Size

    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient, in a fixed order."""
        norm = () if self.norm_weight is None else (self.norm_weight,)
        return [*self.rows, *self.weights, *norm]

    def mapped(
        self, rows: Callable[[Tensor], Tensor], rest: Callable[[Tensor], Tensor]
    ) -> "Inputs":
        """The same call with every tensor replaced."""
        return Inputs(
            tuple(map(rows, self.rows)),
            tuple(map(rest, self.weights)),
            None if self.norm_weight is None else rest(self.norm_weight),
            self.names,
            self.size,
        )


def random(shape: tuple[int, ...], like: Size, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=like.dtype)


def gate_inputs(size: Size, device: torch.device) -> Inputs:
    """y [T, C], streams [T, n, C]; weights for which gates and pool weights differ by token."""
    rows = (
        random((size.tokens, size.width), size, device),
        random((size.tokens, size.n, size.width), size, device),
    )
    weights = [torch.randn(size.width, device=device) for _ in range(2)]
    weights.append(torch.randn(size.n + (size.variant == "competitive"), device=device))
    names = ("y", "streams", "w_gate", "w_pool", "bias")
    return Inputs(rows, tuple(weights), norm_weight(size, device), names, size)


def depth_inputs(size: Size, device: torch.device) -> Inputs:
    """n sources [T, C], the newest last, and a query."""
    rows = tuple(random((size.tokens, size.width), size, device) for _ in range(size.n))
    query = torch.randn(size.width, device=device) * size.width**-0.5
    names = (*(f"source {i}" for i in range(size.n)), "query")
    return Inputs(rows, (query,), norm_weight(size, device), names, size)


def norm_weight(size: Size, device: torch.device) -> Tensor | None:
    return 1 + 0.1 * torch.randn(size.width, device=device) if size.norm else None


def gate_reference_call(x: Inputs) -> tuple[Tensor, ...]:
    y, streams = x.rows
    w_gate, w_pool, bias = x.weights
    return gate_reference.gate_pool(
        y, streams, w_gate, w_pool, bias, x.size.variant, x.norm_weight, EPS
    )


def depth_reference_call(x: Inputs) -> tuple[Tensor, ...]:
    return (depth_reference.depth_pool(x.rows, x.weights[0], 1.0, x.norm_weight, EPS),)


@dataclass(frozen=True)
class Case:
    """An operation: how to make its inputs, what it computes, and what it must move at least."""

    inputs: Callable[[Size, torch.device], Inputs]
    reference: Callable[[Inputs], tuple[Tensor, ...]]
    vectors: Callable[[int, str], int]
    """Vectors of C numbers read and written for one token, by n and pass."""

    def bytes_moved(self, size: Size, passed: str) -> int:
        return self.vectors(size.n, passed) * size.width * size.tokens * size.dtype.itemsize


CASES: dict[str, Case] = {
    # Forward: n streams and y in, n streams and h out. Backward: streams, y and the gradients of
    # new streams and h in, the gradients of streams and y out.
    "gate_pool": Case(
        gate_inputs,
        gate_reference_call,
        lambda n, passed: 2 * n + 2 if passed == "forward" else 3 * n + 3,
    ),
    # Forward: n sources in, h out. Backward: the sources and the gradient of h in, n gradients out.
    "depth_pool": Case(
        depth_inputs,
        depth_reference_call,
        lambda n, passed: n + 1 if passed == "forward" else 2 * n + 1,
    ),
}
