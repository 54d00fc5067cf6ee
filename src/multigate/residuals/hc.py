"""Hyper-Connections: free mixing of n streams."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multigate.numerics import inverse_rms, wide

from .base import register_residual
from .hyper import HyperStreams


class Maps(nn.Module):
    """The maps of one sublayer: what the paper calls A_m (pre), B (post) and A_r (mix)."""

    def __init__(self, dim: int, streams: int, sublayer: int, static: bool) -> None:
        super().__init__()
        self.pre = nn.Parameter(F.one_hot(torch.tensor(sublayer % streams), streams).float())
        self.post = nn.Parameter(torch.ones(streams))
        self.mix = nn.Parameter(torch.eye(streams))
        if not static:
            self.w_pre = nn.Parameter(torch.zeros(dim))
            self.w_post = nn.Parameter(torch.zeros(dim))
            self.w_mix = nn.Parameter(torch.zeros(streams, dim))
            self.scale_in = nn.Parameter(torch.tensor(0.01))
            self.scale_post = nn.Parameter(torch.tensor(0.01))


@register_residual("hc")
class HyperConnections(HyperStreams):
    """Hyper-Connections (2409.19606), dynamic by default, `static=True` for the static ones.

    On top of learned constants, each stream's coefficients move with that stream's own content:

        pre  = s_a tanh(rms(X) w_pre) + pre0        pre0 = one-hot at (sublayer mod n)
        mix  = s_a tanh(rms(X) W_mix) + mix0        mix0 = identity
        post = s_b tanh(rms(X) w_post) + post0      post0 = ones

    The w start at zero and s_a = s_b = 0.01, so that the model starts as PreNorm exactly (the
    paper also rescales output projections by sqrt(n) at the start; that is left out here).
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        streams: int = 4,
        static: bool = False,
        norm_then_sum: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, depth, streams, norm_then_sum, eps)
        self.static = static
        self.maps = nn.ModuleList(Maps(dim, streams, k, static) for k in range(depth))

    def undecayed(self) -> set[str]:
        """The static maps too: decay would pull the identity they start from towards zero."""
        return super().undecayed() | {f"maps.{k}.mix" for k in range(self.depth)}

    def coefficients(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = cast(Maps, self.maps[sublayer])
        batch, n = streams.shape[:-2], self.streams
        x = wide(streams)
        pre, post, mix = (static.to(x.dtype) for static in (maps.pre, maps.post, maps.mix))
        if self.static:
            return pre.expand(*batch, n), post.expand(*batch, n), mix.expand(*batch, n, n)
        weight = torch.cat([maps.w_pre[None], maps.w_post[None], maps.w_mix])
        moved = F.linear(x, weight.to(x.dtype)) * inverse_rms(x, self.eps).unsqueeze(-1)
        moved = moved.tanh()
        scale_in, scale_post = maps.scale_in.to(x.dtype), maps.scale_post.to(x.dtype)
        pre = pre + scale_in * moved[..., 0]
        post = post + scale_post * moved[..., 1]
        mix = mix + scale_in * moved[..., 2:]
        return pre, post, mix
