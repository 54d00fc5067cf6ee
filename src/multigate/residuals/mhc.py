"""Manifold-constrained Hyper-Connections: the mixing matrix is doubly stochastic."""

import math
from itertools import permutations
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multigate.numerics import inverse_rms, wide
from multigate.ops.sinkhorn import sinkhorn

from .base import register_residual
from .hyper import HyperStreams


class Maps(nn.Module):
    """The three maps of one sublayer, each a weight over the flattened streams, bias and scale."""

    def __init__(self, dim: int, streams: int, sublayer: int, mix_bias: Tensor) -> None:
        super().__init__()
        chosen = 2 * F.one_hot(torch.tensor(sublayer % streams), streams).float() - 1
        self.w_pre = nn.Parameter(torch.zeros(streams, streams * dim))
        self.w_post = nn.Parameter(torch.zeros(streams, streams * dim))
        self.w_mix = nn.Parameter(torch.zeros(len(mix_bias), streams * dim))
        self.b_pre = nn.Parameter(chosen)
        self.b_post = nn.Parameter(chosen.clone())
        self.b_mix = nn.Parameter(mix_bias.clone())
        self.scale_pre = nn.Parameter(torch.tensor(0.01))
        self.scale_post = nn.Parameter(torch.tensor(0.01))
        self.scale_mix = nn.Parameter(torch.tensor(0.01))


class ConstrainedStreams(HyperStreams):
    """The coefficients of mHC and mHC-lite, from v, the n streams of a token in one row:

        u_a  = scale_a (v . W_a) / sqrt(mean(v^2) + eps) + b_a       for a = pre, post, mix
        pre  = sigmoid(u_pre),    post = 2 sigmoid(u_post),    mix = constrain(u_mix)

    W = 0 and scale = 0.01 at the start; b favours one stream (sublayer mod n) by +1 against -1,
    and the identity by 0 against -8: the mHC-lite authors' recipe, with their random stream made
    a fixed one.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int,
        norm_then_sum: bool,
        eps: float,
        mix_bias: Tensor,
    ) -> None:
        super().__init__(dim, depth, streams, norm_then_sum, eps)
        self.maps = nn.ModuleList(Maps(dim, streams, k, mix_bias) for k in range(depth))

    def constrain(self, logits: Tensor) -> Tensor:
        """The n x n mixing matrix from its logits."""
        raise NotImplementedError

    def coefficients(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps, n = cast(Maps, self.maps[sublayer]), self.streams
        flat = wide(streams).flatten(-2)
        weight = torch.cat([maps.w_pre, maps.w_post, maps.w_mix])
        moved = F.linear(flat, weight.to(flat.dtype)) * inverse_rms(flat, self.eps).unsqueeze(-1)
        scaled = (
            scale.to(flat.dtype) * part + bias.to(flat.dtype)
            for scale, part, bias in (
                (maps.scale_pre, moved[..., :n], maps.b_pre),
                (maps.scale_post, moved[..., n : 2 * n], maps.b_post),
                (maps.scale_mix, moved[..., 2 * n :], maps.b_mix),
            )
        )
        u_pre, u_post, u_mix = scaled
        return u_pre.sigmoid(), 2 * u_post.sigmoid(), self.constrain(u_mix)

    def _mix_names(self, sublayers: set[int]) -> set[str]:
        return {f"maps.{k}.{p}_mix" for k in sublayers for p in ("w", "b", "scale")}


@register_residual("mhc")
class ManifoldHyperConnections(ConstrainedStreams):
    """mHC (2512.24880): 20 Sinkhorn steps make the mixing matrix nearly doubly stochastic.

    Its columns sum to 1 to rounding, its rows up to the iteration's remaining error. The first
    mixing map acts on equal streams and has no effect; with one stream, none has.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int = 4,
        sinkhorn_steps: int = 20,
        norm_then_sum: bool = False,
        eps: float = 1e-6,
    ) -> None:
        if sinkhorn_steps < 1:
            raise ValueError(f"mhc: sinkhorn_steps must be at least 1, got {sinkhorn_steps}.")
        identity = -8.0 * (1 - torch.eye(streams)).flatten()
        super().__init__(dim, depth, streams, norm_then_sum, eps, identity)
        self.sinkhorn_steps = sinkhorn_steps

    def constrain(self, logits: Tensor) -> Tensor:
        square = logits.unflatten(-1, (self.streams, self.streams))
        return sinkhorn(square, self.sinkhorn_steps)

    def structural_zeros(self) -> set[str]:
        return self._mix_names(set(range(self.depth)) if self.streams == 1 else {0})


@register_residual("mhc-lite")
class LiteHyperConnections(ConstrainedStreams):
    """mHC-lite (2601.05732): the mixing matrix is a convex combination of all n! permutations.

        mix = sum_k softmax(u_mix)_k P_k

    Doubly stochastic to rounding, without iterations. The first mixing map acts on equal streams,
    and the last one's streams are summed: neither has an effect; with one stream, none has.
    """

    permutations: Tensor
    MOST_STREAMS = 5

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int = 4,
        norm_then_sum: bool = False,
        eps: float = 1e-6,
    ) -> None:
        if streams > self.MOST_STREAMS:
            raise ValueError(
                f"mhc-lite keeps all n! permutations of its n streams, and {streams}! = "
                f"{math.factorial(streams):,} of them are too many: use at most "
                f"{self.MOST_STREAMS} streams, or mhc, which has no such limit."
            )
        identity = torch.full((math.factorial(max(streams, 1)),), -8.0)
        identity[0] = 0.0
        super().__init__(dim, depth, streams, norm_then_sum, eps, identity)
        eye = torch.eye(streams)
        matrices = torch.stack([eye[list(p)] for p in permutations(range(streams))])
        self.register_buffer("permutations", matrices)

    def constrain(self, logits: Tensor) -> Tensor:
        share = logits.softmax(dim=-1)
        mix = share @ self.permutations.to(share.dtype).flatten(1)
        return mix.unflatten(-1, (self.streams, self.streams))

    def structural_zeros(self) -> set[str]:
        if self.streams == 1:
            return self._mix_names(set(range(self.depth)))
        return self._mix_names({0} if self.norm_then_sum else {0, self.depth - 1})
