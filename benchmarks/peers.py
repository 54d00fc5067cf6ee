"""Public fused kernels on the nearest equal work: further arms of `multigate bench`.

    pip install --no-deps liger-kernel==0.8.5 fla-core==0.6.0 einops

fla          flash-linear-attention's AttnRes, the same as depth_pool: softmax pooling over separate
             sources, optionally with the norm behind it. Its key gain is 1, and it computes the
             gradient of it as well.
liger        Liger's AttnRes, the same as depth_pool without the norm. It wants its sources in one
             tensor; stacking them is not timed. Its key gain is 1, with a gradient as well.
liger-mhc    Liger's mHC beside gate_pool: not the same maths, but the same place in a network. From
             n streams and a sublayer's output it makes n new streams and an input: coefficients
             (a matrix product and 20 Sinkhorn rounds), read, write. The bytes it is measured
             against are those of gate_pool.

A package that is not there has no row. Results that can be compared are checked before the timing.
"""

import torch

from multigate.bench.arms import Absent, Arm, Unsupported, register
from multigate.bench.cases import EPS

SINKHORN_ROUNDS = 20


def fla(x):
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError as error:
        raise Absent(f"no row, as fla-core cannot be imported ({error}).") from error
    gain = torch.ones_like(x.weights[0], requires_grad=True)

    def forward(x):
        return (
            fused_attnres(
                x.weights[0], x.rows, gain, output_rms_weight=x.norm_weight, rms_eps=EPS, scale=1.0
            ),
        )

    return forward


def liger(x):
    try:
        from liger_kernel.ops.attn_res import LigerAttnResFunction
    except ImportError as error:
        raise Absent(f"no row, as liger-kernel cannot be imported ({error}).") from error
    if x.norm_weight is not None:
        raise Unsupported("Liger's AttnRes has no norm after the pool.")
    gain = torch.ones_like(x.weights[0], requires_grad=True)
    stacks = {}

    def stacked(x):
        if torch.is_grad_enabled():
            # Its backward pass hands out views and costs nothing.
            return torch.stack(x.rows)
        if id(x) not in stacks:
            stacks[id(x)] = torch.stack(x.rows)
        return stacks[id(x)]

    return lambda x: (LigerAttnResFunction.apply(stacked(x), x.weights[0], gain, EPS),)


def liger_mhc(x):
    try:
        from liger_kernel.ops.mhc import (
            LigerMHCCoeffsFunction,
            LigerMHCPostResFunction,
            LigerMHCPreFunction,
        )
    except ImportError as error:
        raise Absent(f"no row, as liger-kernel cannot be imported ({error}).") from error
    if x.norm_weight is not None:
        raise Unsupported("Liger's mHC has no norm after the read.")
    n, width, streams = x.size.n, x.size.width, x.rows[1]
    coefficients = n * n + 2 * n
    phi = 0.02 * torch.randn(n * width, coefficients, device=streams.device)
    phi = phi.to(streams.dtype).requires_grad_()
    bias = torch.zeros(coefficients, device=streams.device, requires_grad=True)
    scales = [torch.ones((), device=streams.device, requires_grad=True) for _ in range(3)]
    in_float32 = streams.dtype == torch.float32

    def forward(x):
        y, streams = x.rows
        read, write, mix = LigerMHCCoeffsFunction.apply(
            streams, phi, bias, *scales, in_float32, SINKHORN_ROUNDS, EPS, 0.0, 1e-6, 2.0
        )
        h = LigerMHCPreFunction.apply(streams, read)
        return h, LigerMHCPostResFunction.apply(streams, y, write, mix)

    return forward


register(Arm("depth_pool", "fla", fla))
register(Arm("depth_pool", "liger", liger, note="sources stacked beforehand, not timed"))
register(
    Arm("gate_pool", "liger-mhc", liger_mhc, same=False, note="mHC's step, not the same maths")
)
