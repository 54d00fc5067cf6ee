"""What Hyper-Connections and their descendants share: n streams, three maps a sublayer."""

import torch
from torch import Tensor, nn

from multigate.numerics import wide

from .base import Residual, State


def mixed(mix: Tensor, streams: Tensor) -> Tensor:
    """sum_j mix[j, k] X_j, of mix [..., n, m] and streams [..., n, D].

    torch.compile merges sums with what is around them, and leaves products of so small matrices
    alone; without it one product is faster.
    """
    if not torch.compiler.is_compiling():
        return mix.mT @ streams
    total = mix[..., 0, :].unsqueeze(-1) * streams[..., :1, :]
    for j in range(1, streams.shape[-2]):
        total = total + mix[..., j, :].unsqueeze(-1) * streams[..., j : j + 1, :]
    return total


class HyperStreams(Residual):
    """n streams X_j [..., n, D], read, written and mixed by coefficients of each sublayer:

        h_l = sum_j pre_j X_j,    y_l = F_l(h_l),    X_k <- post_k y_l + sum_j mix[j, k] X_j

    All n streams start as the embedding; the output is their sum, to be normed by the final norm.
    With `norm_then_sum` each stream goes through that norm first and the results are summed.

    A subclass gives the coefficients of sublayer l from the streams it reads. Recorded: `pre`,
    under the step that reads with it (-1 for the first), and `post` and `mix` under the step that
    writes.
    """

    def __init__(
        self, dim: int, depth: int, streams: int, norm_then_sum: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__(dim, depth, streams, eps)
        self.norm_then_sum = norm_then_sum

    def coefficients(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [..., n], post [..., n] and mix [..., n, n] (source stream first)."""
        raise NotImplementedError

    def state_size(self, i: int) -> int:
        coefficients = self.streams + self.streams**2 if i < self.depth else 0
        return self.streams * self.dim + coefficients

    def handover_size(self, i: int) -> int:
        return self.streams * self.dim

    def carried(self, i: int, state: State) -> Tensor:
        return state[0]

    def mixture(self, i: int, coefficients: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return coefficients["mix"].mT, coefficients["post"]

    def norm_apart(self, i: int) -> bool:
        return i < self.depth - 1 or not self.norm_then_sum

    def summed(self, i: int) -> int:
        return self.streams if i == self.depth - 1 else 1

    def _start(self, x: Tensor) -> tuple[Tensor, State]:
        streams = x.unsqueeze(-2).repeat_interleave(self.streams, dim=-2)
        return self._read(0, streams)

    def _step(self, i: int, y: Tensor | None, state: State) -> tuple[Tensor, State]:
        streams = self._write(i, y, state)
        if i < self.depth - 1:
            return self._read(i + 1, streams)
        if self.norm_then_sum:
            raise ValueError(
                f"{self.name}: norm_then_sum needs the output norm: hand it to the last step, or "
                "to Stack as out_norm."
            )
        return wide(streams).sum(-2).to(streams.dtype), (streams,)

    def _step_normed(
        self, i: int, y: Tensor | None, state: State, norm: nn.Module
    ) -> tuple[Tensor, State] | None:
        if i < self.depth - 1 or not self.norm_then_sum:
            return None
        streams = self._write(i, y, state)
        return norm(wide(streams)).sum(-2).to(streams.dtype), (streams,)

    def _handover(self, i: int, h: Tensor, state: State) -> tuple[Tensor, ...]:
        return state[:1]

    def _resume(self, i: int, sent: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        return self._read(i, sent[0])

    def _batch_shape(self, i: int, state: State) -> torch.Size:
        return state[0].shape[:-2]

    def _write(self, i: int, y: Tensor | None, state: State) -> Tensor:
        streams, post, mix = state
        if y is None:
            return streams
        self.note(i, post=post, mix=mix)
        old = wide(streams)
        written = post.unsqueeze(-1) * y.to(old.dtype).unsqueeze(-2)
        return (written + mixed(mix, old)).to(streams.dtype)

    def _read(self, sublayer: int, streams: Tensor) -> tuple[Tensor, State]:
        pre, post, mix = self.coefficients(sublayer, streams)
        self.note(sublayer - 1, pre=pre)
        h = mixed(pre.unsqueeze(-1), wide(streams)).squeeze(-2)
        return h.to(streams.dtype), (streams, post, mix)
