"""The sublayers of the GPT: attention (plain or over depth, with rotary positions) and the MLP.

Shapes: B batch, T positions, H heads, K numbers a head, D = H K the width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import Places
from .norm import RMSNorm
from .numerics import autocast_is_on, wide
from .residuals import Sublayer

Rotary = tuple[Tensor, Tensor]
DepthEntries = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [B, H, T, K] that earlier sublayers wrote, by sublayer."""


def rotary_table(length: int, head_dim: int, base: float) -> Rotary:
    """cos and sin [T, K/2] of position * base^(-2i/K)."""
    # On the CPU whatever the default device is: not every device has float64.
    with torch.device("cpu"):
        frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) of x [B, H, T, K] by the angle of their position."""
    cos, sin = (table.to(wide(x).dtype) for table in rotary)
    a, b = wide(x).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] -> [B, H, T, K]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def to_compute(x: Tensor, weight: Tensor) -> Tensor:
    """`x` as the matrix product with `weight` needs it; autocast sees to that by itself."""
    return x if autocast_is_on(x.device.type) else x.to(weight.dtype)


def depth_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: list[tuple[Tensor, Tensor]],
    mask: Tensor | None = None,
) -> Tensor:
    """Mixture-of-depths attention (2603.15619): one softmax over two sets of keys.

    Position t attends to k_s for s <= t and to the keys that earlier sublayers wrote at position t.
    With a `mask` (of a cache; truth values, or numbers to add) it attends to the k_s that the mask
    lets it see instead.

    The depth part is summed up by its log-sum-exp, which enters the sequence attention as the
    logit of one extra key: two more channels of q carry it (a rounded half and the rest, so that
    bf16 loses nothing), and one more channel of v brings back the weight that the extra key
    received. The result is exact, and the sequence part stays one call of the fused attention.
    """
    width, scale = q.shape[-1], q.shape[-1] ** -0.5
    logits = torch.stack([(wide(q) * wide(key)).sum(-1) for key, _ in entries], dim=-1) * scale
    total = logits.logsumexp(dim=-1, keepdim=True)
    share = (logits - total).exp()
    deep = torch.stack([wide(value) for _, value in entries], dim=-2)
    deep = (share.unsqueeze(-1) * deep).sum(-2)

    logit = total / scale
    high = logit.to(q.dtype)
    low = (logit - high).detach().to(q.dtype)
    room = 8  # head sizes stay a multiple of 8 for the fused kernels
    # Position 0 is the extra key. Where no mask says otherwise it gets a query row as well, which
    # makes the matrix square and is thrown away.
    square = int(mask is None)
    query = F.pad(torch.cat([q, high, low], dim=-1), (0, room - 2, square, 0))
    mark = F.pad(q.new_ones(2), (width, room - 2)).expand(*q.shape[:-2], 1, -1)
    key = torch.cat([mark, F.pad(k, (0, room))], dim=-2)
    mark = F.pad(v.new_ones(1), (width, room - 1)).expand(*v.shape[:-2], 1, -1)
    value = torch.cat([mark, F.pad(v, (0, room))], dim=-2)
    seen = None
    if mask is not None:
        seen = F.pad(mask, (1, 0), value=float(mask.dtype == torch.bool))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=mask is None, scale=scale
    )[..., square:, :]
    return (out[..., :width] + wide(out[..., width : width + 1]) * deep).to(v.dtype)


class Attention(Sublayer):
    """Causal multi-head attention; with `depth` entries handed in, over those as well.

    Sublayer `index` reads the entries of the sublayers before it and writes its own keys and
    values. With `places` in a cache, x is what comes after the positions that are stored there.
    """

    def __init__(self, width: int, heads: int, index: int, eps: float) -> None:
        super().__init__()
        self.heads, self.index = heads, index
        self.norm = RMSNorm(width, eps)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def body(
        self,
        x: Tensor,
        rotary: Rotary,
        depth: DepthEntries | None = None,
        places: Places | None = None,
    ) -> Tensor:
        x = to_compute(x, self.q.weight)
        # The compiler adds up the gradients of rows inside the three products that make them.
        rows = x.flatten(0, -2)
        q, k, v = (split_heads(f(rows).view_as(x), self.heads) for f in (self.q, self.k, self.v))
        if places is None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        else:
            # For a few positions it is the number of kernels that takes time.
            q, k = rotate(torch.stack([q, k]), rotary)
        entries = [depth[j] for j in sorted(depth) if j < self.index] if depth is not None else []
        if depth is not None:
            depth[self.index] = (k, v)
        mask = None
        if places is not None:
            k, v = places.extend(self.index, k, v)
            mask = places.mask
        if not entries:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        elif mask is None:
            y = depth_attention(q, k, v, entries)
        else:
            y = depth_attention(q, k, v, entries, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(Sublayer):
    """down(relu(up(x))^2); with `writes_depth` it also writes keys and values for attention."""

    def __init__(
        self, width: int, heads: int, index: int, eps: float, writes_depth: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.index = heads, index
        self.norm = RMSNorm(width, eps)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False) if writes_depth else None
        self.v = nn.Linear(width, width, bias=False) if writes_depth else None

    def body(
        self,
        x: Tensor,
        rotary: Rotary,
        depth: DepthEntries | None = None,
        places: Places | None = None,
    ) -> Tensor:
        x = to_compute(x, self.up.weight)
        if depth is not None and self.k is not None and self.v is not None:
            k, v = split_heads(self.k(x), self.heads), split_heads(self.v(x), self.heads)
            depth[self.index] = (rotate(k, rotary), v)
        return self.down(F.relu(self.up(x)).square())
