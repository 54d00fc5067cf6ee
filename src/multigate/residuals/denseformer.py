"""DenseFormer: a depth-weighted average after every transformer block."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from multigate.numerics import weighted_sum

from .base import Residual, State, register_residual


@register_residual("denseformer")
class DenseFormer(Residual):
    """Plain residuals inside a block, a learned average of all block outputs after it (2402.02622).

    With X_0 = e, Y_0 = e and block i made of `period` sublayers (the last one may be shorter):

        X_i = Y_{i-1} + the outputs of block i's sublayers, each added as in PreNorm
        Y_i = sum over j <= i, j = i mod `dilation`, of a_{i,j} X_j

    The a_{i,j} are plain numbers, not a softmax: a_{i,i} = 1 and the others 0 at the start, which
    is PreNorm. Recorded: `weights`, the a_{i,.} of a step that ends a block.
    """

    def __init__(self, dim: int, depth: int, period: int = 2, dilation: int = 1) -> None:
        super().__init__(dim, depth)
        for what, value in (("period", period), ("dilation", dilation)):
            if value < 1:
                raise ValueError(f"denseformer: {what} must be at least 1, got {value}.")
        self.period, self.dilation = period, dilation
        blocks = -(-depth // period)
        sources = [len(self._sources(block)) for block in range(1, blocks + 1)]
        self.weights = nn.ParameterList(torch.eye(k)[-1].clone() for k in sources)

    def state_size(self, i: int) -> int:
        blocks_done = -(-i // self.period) if i == self.depth else i // self.period
        return (2 + blocks_done) * self.dim

    def handover_size(self, i: int) -> int:
        inside_a_block = i % self.period > 0
        return (inside_a_block + 1 + i // self.period) * self.dim

    def carried(self, i: int, state: State) -> Tensor:
        return state[0].unsqueeze(-2)

    def _sources(self, block: int) -> range:
        return range(block % self.dilation, block + 1, self.dilation)

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x, x)

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        x, *outputs = state
        if y is not None:
            x = (x + y).to(x.dtype)
        if (i + 1) % self.period == 0 or i == self.depth - 1:
            outputs = [*outputs, x]
            x = self._average(i, outputs)
        return x, (x, *outputs)

    def _handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        x, *outputs = state
        return tuple(outputs) if i % self.period == 0 else (x, *outputs)

    def _resume(self, i: int, sent: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        if i % self.period:
            return sent[0], sent
        x = self._average(i - 1, sent)
        return x, (x, *sent)

    def _average(self, i: int, outputs: Sequence[Tensor]) -> Tensor:
        """Y after the block that ends with sublayer i, from all outputs so far."""
        block = len(outputs) - 1
        weights = self.weights[block - 1]
        self.note(i, weights=weights)
        used = [outputs[j] for j in self._sources(block)]
        return weighted_sum(used, weights).to(outputs[0].dtype)
