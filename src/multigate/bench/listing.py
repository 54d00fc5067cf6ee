"""The paper's listing of the Multi-Gate step, line for line: what `torch.compile` is given."""

import torch
from torch import Tensor
from torch.nn import functional as F


def listing(
    layer_output: Tensor,
    streams: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor,
    variant: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """layer_output [B, T, D], streams [B, T, N, D] -> h, new streams.

    The one addition is the rounding at the end: with float32 weights the listing would hand
    float32 streams to the next layer.
    """
    width = streams.shape[-1]
    scale = width**-0.5
    normed_s = F.rms_norm(streams, (width,), eps=eps)
    score_s = (normed_s * w1).sum(-1) * scale
    if variant == "competitive":
        beta = (F.pad(score_s, (1, 0), value=0) + b1).softmax(dim=-1)[..., 1:]
    else:
        beta = (score_s + b1).sigmoid()
    new_streams = streams + beta.unsqueeze(-1) * (layer_output.unsqueeze(-2) - streams)

    normed_ns = F.rms_norm(new_streams, (width,), eps=eps)
    score_ns = (normed_ns * w2).sum(-1) * scale
    alpha = score_ns.softmax(dim=-1)
    h = torch.einsum("btn,btnd->btd", alpha, new_streams)
    return h.to(streams.dtype), new_streams.to(streams.dtype)
