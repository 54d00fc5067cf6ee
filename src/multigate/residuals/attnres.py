"""Attention Residuals: every sublayer attends over what earlier ones wrote."""

from typing import cast

import torch
from torch import Tensor, nn

from multigate.ops import depth_pool
from multigate.ops.depth_pool.reference import depth_weights

from .base import Residual, State, register_residual


class Reader(nn.Module):
    """The pseudo-query of one reader, and the gain of the norm its keys go through."""

    def __init__(self, dim: int, key_gain: bool) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim))
        self.gain = nn.Parameter(torch.ones(dim)) if key_gain else None

    def effective_query(self) -> Tensor:
        return self.query if self.gain is None else self.query * self.gain


class AttentionResidual(Residual):
    """Softmax attention over block sums of sublayer outputs (2603.15031).

    The sources are the embedding and one sum of raw sublayer outputs per block, the last of which
    may still be growing. The input of the next sublayer, and the output after the last one, is

        h = sum_i alpha_i v_i,    alpha = softmax_i( (gain * query) . rms(v_i) )

    with a query (zero at the start: uniform weights) and a key gain (`key_gain=False`: none) for
    each reader. `scaled=True` divides the logits by sqrt(D), as Multi-Gate Residuals' pool does.
    The first sublayer reads the embedding itself and has no query. Recorded: `alpha`.

    State: (closed sources, the open block's sum or nothing).
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        block_starts: set[int],
        scaled: bool = False,
        key_gain: bool = True,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, depth, len(block_starts), eps)
        self.block_starts = block_starts
        self.scale = dim**-0.5 if scaled else 1.0
        self.readers = nn.ModuleList(Reader(dim, key_gain) for _ in range(depth))

    def state_size(self, i: int) -> int:
        return (1 + sum(start < i for start in self.block_starts)) * self.dim

    def handover_size(self, i: int) -> int:
        return self.state_size(i)

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        return x, ((x,), ())

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        return self._advance(i, y, state, None)

    def _step_normed(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        return self._advance(i, y, state, norm.weight) if self._fuses(norm) else None

    def _advance(
        self, i: int, y: Tensor | None, state: State, norm_weight: Tensor | None
    ) -> tuple[Tensor, State]:
        closed, block = state
        if i in self.block_starts:
            closed, block = closed + block, ()
        if y is not None:
            dtype = closed[0].dtype
            block = ((block[0] + y).to(dtype),) if block else (y.to(dtype),)
        return self._read(i, closed + block, norm_weight), (closed, block)

    def _handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        closed, block = state
        # A block of which every sublayer so far was skipped has no sum: an empty tensor says so.
        return (*closed, *(block or (closed[0][..., :0],)))

    def _resume(self, i: int, sent: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        return self._read_again(i, sent, None)

    def _resume_normed(
        self, i: int, sent: tuple[Tensor, ...], norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        return self._read_again(i, sent, norm.weight) if self._fuses(norm) else None

    def _read_again(
        self, i: int, sent: tuple[Tensor, ...], norm_weight: Tensor | None
    ) -> tuple[Tensor, State]:
        """What step i - 1 has read, and the state it has left."""
        *closed, last = sent
        block = (last,) if last.numel() else ()
        return self._read(i - 1, (*closed, *block), norm_weight), (tuple(closed), block)

    def _read(self, i: int, sources: tuple[Tensor, ...], norm_weight: Tensor | None) -> Tensor:
        query = cast(Reader, self.readers[i]).effective_query()
        if self._record is not None:
            self.note(i, alpha=depth_weights(sources, query, self.scale, self.eps))
        return depth_pool(sources, query, scale=self.scale, norm_weight=norm_weight, eps=self.eps)


@register_residual("attnres-full")
class FullAttnRes(AttentionResidual):
    """Full AttnRes: every sublayer output is a source of its own, so the state grows with depth.

    At zero queries h is the PreNorm state divided by the number of sources.
    """

    def __init__(
        self, dim: int, depth: int, scaled: bool = False, key_gain: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__(dim, depth, set(range(depth)), scaled, key_gain, eps)


@register_residual("attnres-block")
class BlockAttnRes(AttentionResidual):
    """Block AttnRes: `streams` blocks of sublayers, each summed into one source.

    The boundaries are at round(k depth / streams), counted in sublayers: blocks may be of odd and
    of unequal size. With as many blocks as sublayers this is Full AttnRes.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int = 4,
        scaled: bool = False,
        key_gain: bool = True,
        eps: float = 1e-6,
    ) -> None:
        if streams > depth:
            raise ValueError(
                f"attnres-block cannot cut {depth} sublayers into {streams} blocks: streams, the "
                f"number of blocks, must be at most {depth}."
            )
        starts = {round(k * depth / max(streams, 1)) for k in range(streams)}
        super().__init__(dim, depth, starts, scaled, key_gain, eps)
