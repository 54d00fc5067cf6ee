"""The Multi-Gate step fused as the paper describes it: three reads and one write of the streams.

The stages are those of its section on kernel fusion, in one kernel:

    1. read s: its norm and the gate's score         -> beta
    2. read s, write s' = s + beta (y - s): its norm and the pool's score     -> alpha
    3. read s': h = sum_i alpha_i s'_i

and backward, one stage for each thing that the next one needs:

    1. read s: dalpha_i = dh . s'_i
    2. read s and ds': dbeta_i = G_i . (y - s_i), with G_i the whole gradient of s'_i
    3. read s and ds', write ds, dy, and this program's share of dw_gate, dw_pool and dbias

A later read of a token may still be in a cache: what counts is what the clock says. This is the
"paper" arm of `multigate bench`. Everything is computed in float32; weight gradients are summed in
a fixed order. There is no norm after the pool, as in the paper.
"""

import torch
import triton
import triton.language as tl

from multigate.bench.arms import Arm, Unsupported, register
from multigate.bench.cases import EPS

EACH = 8
"""Neighbouring channels of a thread: 16 bytes of bfloat16."""
SCALARS = 6
"""Kept of each stream for the backward pass: 1/rms and score, old and new, beta, alpha."""


@triton.jit
def _part(x, BLOCK: tl.constexpr, SECTION: tl.constexpr, EACH: tl.constexpr):
    """Sums of a thread's own channels, so that the exchange between threads comes once."""
    return tl.sum(tl.reshape(x, [BLOCK, SECTION // EACH, EACH]), axis=2)


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros([BLOCK, SIZE], tl.float32),)
    return zeros


@triton.jit
def _row_sums(parts, COUNT: tl.constexpr):
    sums = ()
    for i in tl.static_range(COUNT):
        sums += (tl.sum(parts[i], axis=1),)
    return sums


@triton.jit
def _softmax(logits, COUNT: tl.constexpr):
    top = logits[0]
    for i in tl.static_range(1, COUNT):
        top = tl.maximum(top, logits[i])
    total = tl.zeros_like(top)
    raised = ()
    for i in tl.static_range(COUNT):
        raised += (tl.exp(logits[i] - top),)
        total += raised[i]
    shares = ()
    for i in tl.static_range(COUNT):
        shares += (raised[i] / total,)
    return shares


@triton.jit
def _forward(y, streams, w_gate, w_pool, bias, h, new_streams, saved, tokens, eps,
             N: tl.constexpr, C: tl.constexpr, COMPETITIVE: tl.constexpr, BLOCK: tl.constexpr,
             SECTION: tl.constexpr, EACH: tl.constexpr, SCALARS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = token[:, None]
    channel = tl.arange(0, SECTION)[None, :]
    scale: tl.constexpr = C**-0.5

    squares = _zeros(N, BLOCK, SECTION // EACH)
    dots = _zeros(N, BLOCK, SECTION // EACH)
    for start in range(0, C, SECTION):
        at = start + channel
        live = (row < tokens) & (at < C)
        w = tl.load(w_gate + at, at < C, other=0.0).to(tl.float32)
        more_squares = ()
        more_dots = ()
        for i in tl.static_range(N):
            s = tl.load(
                streams + (row * N + i) * C + at, live, other=0.0, eviction_policy="evict_last"
            ).to(tl.float32)
            more_squares += (squares[i] + _part(s * s, BLOCK, SECTION, EACH),)
            more_dots += (dots[i] + _part(s * w, BLOCK, SECTION, EACH),)
        squares = more_squares
        dots = more_dots
    squares = _row_sums(squares, N)
    dots = _row_sums(dots, N)
    inverse = ()
    score = ()
    logits = ()
    if COMPETITIVE:
        logits += (tl.zeros([BLOCK], tl.float32) + tl.load(bias),)
    for i in tl.static_range(N):
        inverse += (tl.rsqrt(squares[i] / C + eps),)
        score += (dots[i] * inverse[i] * scale,)
        logits += (score[i] + tl.load(bias + i + COMPETITIVE),)
    beta = ()
    if COMPETITIVE:
        shares = _softmax(logits, N + 1)
        for i in tl.static_range(N):
            beta += (shares[i + 1],)
    else:
        for i in tl.static_range(N):
            beta += (tl.sigmoid(logits[i]),)

    squares = _zeros(N, BLOCK, SECTION // EACH)
    dots = _zeros(N, BLOCK, SECTION // EACH)
    for start in range(0, C, SECTION):
        at = start + channel
        live = (row < tokens) & (at < C)
        w = tl.load(w_pool + at, at < C, other=0.0).to(tl.float32)
        out = tl.load(y + row * C + at, live, other=0.0).to(tl.float32)
        more_squares = ()
        more_dots = ()
        for i in tl.static_range(N):
            where = (row * N + i) * C + at
            s = tl.load(streams + where, live, other=0.0, eviction_policy="evict_first")
            s = s.to(tl.float32)
            s += beta[i][:, None] * (out - s)
            tl.store(new_streams + where, s.to(new_streams.dtype.element_ty), live)
            more_squares += (squares[i] + _part(s * s, BLOCK, SECTION, EACH),)
            more_dots += (dots[i] + _part(s * w, BLOCK, SECTION, EACH),)
        squares = more_squares
        dots = more_dots
    squares = _row_sums(squares, N)
    dots = _row_sums(dots, N)
    new_inverse = ()
    new_score = ()
    for i in tl.static_range(N):
        new_inverse += (tl.rsqrt(squares[i] / C + eps),)
        new_score += (dots[i] * new_inverse[i] * scale,)
    alpha = _softmax(new_score, N)

    for i in tl.static_range(N):
        line = saved + token * (SCALARS * N) + SCALARS * i
        tl.store(line, inverse[i], token < tokens)
        tl.store(line + 1, score[i], token < tokens)
        tl.store(line + 2, new_inverse[i], token < tokens)
        tl.store(line + 3, new_score[i], token < tokens)
        tl.store(line + 4, beta[i], token < tokens)
        tl.store(line + 5, alpha[i], token < tokens)

    # Other threads of this program may have written what is read now.
    tl.debug_barrier()
    for start in range(0, C, SECTION):
        at = start + channel
        live = (row < tokens) & (at < C)
        pooled = tl.zeros([BLOCK, SECTION], tl.float32)
        for i in tl.static_range(N):
            s = tl.load(new_streams + (row * N + i) * C + at, live, other=0.0)
            pooled += alpha[i][:, None] * s.to(tl.float32)
        tl.store(h + row * C + at, pooled.to(h.dtype.element_ty), live)


@triton.jit
def _backward(grad_h, grad_streams, y, streams, w_gate, w_pool, saved, dy, dstreams,
              gate_parts, pool_parts, bias_parts, tokens,
              N: tl.constexpr, C: tl.constexpr, COMPETITIVE: tl.constexpr, BLOCK: tl.constexpr,
              SECTION: tl.constexpr, EACH: tl.constexpr, SCALARS: tl.constexpr):  # fmt: skip
    """G_i = ds'_i + alpha_i dh + c_i w_pool - e_i s'_i,  dy = sum_i beta_i G_i,
    ds_i = (1 - beta_i) G_i + k_i w_gate - m_i s_i,  dw_gate = sum k_i s_i,  dw_pool = sum c_i s'_i

    with c, e (k, m) the gradient of the pool's (the gate's) score through its dot and its norm.
    """
    SECTIONS: tl.constexpr = (C + SECTION - 1) // SECTION
    scale: tl.constexpr = C**-0.5
    channel = tl.arange(0, SECTION)[None, :]
    gate_sums = _zeros(SECTIONS, BLOCK, SECTION)
    pool_sums = _zeros(SECTIONS, BLOCK, SECTION)
    bias_sums = ()
    for _ in tl.static_range(N + COMPETITIVE):
        bias_sums += (tl.zeros([BLOCK], tl.float32),)

    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0)):
        token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        row = token[:, None]
        inverse = ()
        score = ()
        new_inverse = ()
        new_score = ()
        beta = ()
        alpha = ()
        for i in tl.static_range(N):
            line = saved + token * (SCALARS * N) + SCALARS * i
            inverse += (tl.load(line, token < tokens, other=0.0),)
            score += (tl.load(line + 1, token < tokens, other=0.0),)
            new_inverse += (tl.load(line + 2, token < tokens, other=0.0),)
            new_score += (tl.load(line + 3, token < tokens, other=0.0),)
            beta += (tl.load(line + 4, token < tokens, other=0.0),)
            alpha += (tl.load(line + 5, token < tokens, other=0.0),)

        dots = _zeros(N, BLOCK, SECTION // EACH)
        for start in range(0, C, SECTION):
            at = start + channel
            live = (row < tokens) & (at < C)
            out = tl.load(y + row * C + at, live, other=0.0).to(tl.float32)
            g = tl.load(grad_h + row * C + at, live, other=0.0).to(tl.float32)
            more = ()
            for i in tl.static_range(N):
                s = tl.load(
                    streams + (row * N + i) * C + at, live, other=0.0, eviction_policy="evict_last"
                ).to(tl.float32)
                s += beta[i][:, None] * (out - s)
                more += (dots[i] + _part(g * s, BLOCK, SECTION, EACH),)
            dots = more
        dalpha = _row_sums(dots, N)
        mean = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(N):
            mean += alpha[i] * dalpha[i]
        c = ()
        e = ()
        for i in tl.static_range(N):
            dscore = alpha[i] * (dalpha[i] - mean)
            c += (dscore * new_inverse[i] * scale,)
            e += (dscore * new_score[i] * new_inverse[i] * new_inverse[i] / C,)

        dots = _zeros(N, BLOCK, SECTION // EACH)
        for start in range(0, C, SECTION):
            at = start + channel
            live = (row < tokens) & (at < C)
            w = tl.load(w_pool + at, at < C, other=0.0).to(tl.float32)
            out = tl.load(y + row * C + at, live, other=0.0).to(tl.float32)
            g = tl.load(grad_h + row * C + at, live, other=0.0).to(tl.float32)
            more = ()
            for i in tl.static_range(N):
                where = (row * N + i) * C + at
                s = tl.load(streams + where, live, other=0.0).to(tl.float32)
                whole = tl.load(grad_streams + where, live, other=0.0, eviction_policy="evict_last")
                new = s + beta[i][:, None] * (out - s)
                whole = whole.to(tl.float32) + alpha[i][:, None] * g
                whole += c[i][:, None] * w - e[i][:, None] * new
                more += (dots[i] + _part(whole * (out - s), BLOCK, SECTION, EACH),)
            dots = more
        dbeta = _row_sums(dots, N)
        dlogits = ()
        if COMPETITIVE:
            mean = tl.zeros([BLOCK], tl.float32)
            carry = tl.zeros([BLOCK], tl.float32) + 1.0
            for i in tl.static_range(N):
                mean += beta[i] * dbeta[i]
                carry -= beta[i]
            dlogits += (-carry * mean,)
            for i in tl.static_range(N):
                dlogits += (beta[i] * (dbeta[i] - mean),)
        else:
            for i in tl.static_range(N):
                dlogits += (beta[i] * (1.0 - beta[i]) * dbeta[i],)
        k = ()
        m = ()
        for i in tl.static_range(N):
            dscore = dlogits[i + COMPETITIVE]
            k += (dscore * inverse[i] * scale,)
            m += (dscore * score[i] * inverse[i] * inverse[i] / C,)
        more = ()
        for i in tl.static_range(N + COMPETITIVE):
            more += (bias_sums[i] + dlogits[i],)
        bias_sums = more

        more_gate = ()
        more_pool = ()
        for j in tl.static_range(SECTIONS):
            at = j * SECTION + channel
            live = (row < tokens) & (at < C)
            wg = tl.load(w_gate + at, at < C, other=0.0).to(tl.float32)
            wp = tl.load(w_pool + at, at < C, other=0.0).to(tl.float32)
            out = tl.load(y + row * C + at, live, other=0.0).to(tl.float32)
            g = tl.load(grad_h + row * C + at, live, other=0.0).to(tl.float32)
            dout = tl.zeros([BLOCK, SECTION], tl.float32)
            dwg = gate_sums[j]
            dwp = pool_sums[j]
            for i in tl.static_range(N):
                where = (row * N + i) * C + at
                s = tl.load(streams + where, live, other=0.0, eviction_policy="evict_first")
                whole = tl.load(
                    grad_streams + where, live, other=0.0, eviction_policy="evict_first"
                )
                s = s.to(tl.float32)
                new = s + beta[i][:, None] * (out - s)
                whole = whole.to(tl.float32) + alpha[i][:, None] * g
                whole += c[i][:, None] * wp - e[i][:, None] * new
                dout += beta[i][:, None] * whole
                dwg += k[i][:, None] * s
                dwp += c[i][:, None] * new
                ds = (1.0 - beta[i][:, None]) * whole + k[i][:, None] * wg - m[i][:, None] * s
                tl.store(dstreams + where, ds.to(dstreams.dtype.element_ty), live)
            tl.store(dy + row * C + at, dout.to(dy.dtype.element_ty), live)
            more_gate += (dwg,)
            more_pool += (dwp,)
        gate_sums = more_gate
        pool_sums = more_pool

    program = tl.program_id(0)
    for j in tl.static_range(SECTIONS):
        at = j * SECTION + tl.arange(0, SECTION)
        tl.store(gate_parts + program * C + at, tl.sum(gate_sums[j], axis=0), at < C)
        tl.store(pool_parts + program * C + at, tl.sum(pool_sums[j], axis=0), at < C)
    for i in tl.static_range(N + COMPETITIVE):
        tl.store(bias_parts + program * (N + COMPETITIVE) + i, tl.sum(bias_sums[i], axis=0))


def forward_layout(width):
    """A warp a token up to 1280 channels, so that no sum leaves its warp; above, four warps."""
    warp = 32 * EACH
    narrow = width <= 5 * warp
    return {"BLOCK": 4 if narrow else 1, "SECTION": warp if narrow else 4 * warp, "num_warps": 4}


def backward_layout(n, width):
    """A token a program: its threads hold the sums of dw over all its tokens. The limits on
    registers are where programs side by side gain more than a few spilled bytes cost."""
    warps = 4 if width <= 1280 else 8
    shape = {"BLOCK": 1, "SECTION": warps * 32 * EACH, "num_warps": warps}
    if n <= 4:
        shape["maxnreg"] = 128
    elif width <= 1024:
        shape["maxnreg"] = 168
    return shape


class PaperFusion(torch.autograd.Function):
    """(y [T, C], streams [T, n, C], w_gate, w_pool, bias, competitive) -> h, new streams."""

    @staticmethod
    def forward(ctx, y, streams, w_gate, w_pool, bias, competitive, eps=EPS):
        tokens, n, width = streams.shape
        h, new_streams = torch.empty_like(y), torch.empty_like(streams)
        saved = torch.empty((tokens, SCALARS * n), dtype=torch.float32, device=y.device)
        shape = forward_layout(width)
        _forward[(triton.cdiv(tokens, shape["BLOCK"]),)](
            y, streams, w_gate, w_pool, bias, h, new_streams, saved, tokens, eps,
            n, width, competitive, EACH=EACH, SCALARS=SCALARS, **shape,
        )  # fmt: skip
        ctx.save_for_backward(y, streams, w_gate, w_pool, bias, saved)
        ctx.competitive = competitive
        return h, new_streams

    @staticmethod
    def backward(ctx, grad_h, grad_streams):
        y, streams, w_gate, w_pool, bias, saved = ctx.saved_tensors
        tokens, n, width = streams.shape
        shape = backward_layout(n, width)
        programs = 2
        if y.is_cuda:
            programs = 4 * torch.cuda.get_device_properties(y.device).multi_processor_count
        programs = min(programs, triton.cdiv(tokens, shape["BLOCK"]))
        dy, dstreams = torch.empty_like(y), torch.empty_like(streams)
        parts = [
            torch.empty((programs, size), dtype=torch.float32, device=y.device)
            for size in (width, width, bias.numel())
        ]
        _backward[(programs,)](
            grad_h.contiguous(), grad_streams.contiguous(), y, streams, w_gate, w_pool, saved,
            dy, dstreams, *parts, tokens,
            n, width, ctx.competitive, EACH=EACH, SCALARS=SCALARS, **shape,
        )  # fmt: skip
        sums = [
            part.sum(0).to(of.dtype) for part, of in zip(parts, (w_gate, w_pool, bias), strict=True)
        ]
        return dy, dstreams, *sums, None, None


def prepare(x):
    if x.norm_weight is not None:
        raise Unsupported("the paper's fusion has no norm after the pool.")
    return lambda x: PaperFusion.apply(*x.rows, *x.weights, x.size.variant == "competitive")


register(Arm("gate_pool", "paper", prepare))
