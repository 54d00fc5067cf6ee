"""PreNorm: the plain residual, x + F(x)."""

import torch
from torch import Tensor

from .base import Residual, State, register_residual


@register_residual("prenorm")
class PreNorm(Residual):
    """The sum of everything written so far is the next input.

    x <- x + y,    h = x
    """

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__(dim, depth)

    def state_size(self, i: int) -> int:
        return self.dim

    def carried(self, i: int, state: State) -> Tensor:
        return state[0].unsqueeze(-2)

    def mixture(self, i: int, coefficients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1), torch.ones(1)

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        (x,) = state
        if y is not None:
            x = (x + y).to(x.dtype)
        return x, (x,)
