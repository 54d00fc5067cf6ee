"""The Multi-Gate step as Triton kernels: one reduction and one sweep a pass.

The new streams are lerps, so their statistics follow from dot products with the old streams s_i and
the output y. With ss_i = s_i.s_i, d1_i = s_i.w_gate, d2_i = s_i.w_pool, q_i = s_i.y, yy = y.y,
yw = y.w_pool and rest_i = 1 - beta_i:

    s'_i.s'_i = rest_i^2 ss_i + 2 rest_i beta_i q_i + beta_i^2 yy
    s'_i.w_pool = rest_i d2_i + beta_i yw

saved.py says what is kept of a token: ss, d1, d2, q and so on.
"""

# The compiler of Triton reads these functions, and Python never runs them.
# mypy: ignore-errors
# ruff: noqa: B007

import triton
import triton.language as tl

from .triton_parts import (
    again,
    beside,
    columns,
    fold,
    gate,
    gate_gradient,
    hoisted,
    numbers_at,
    pool,
    put,
    read,
    store,
    sums_of,
    tokens_of,
    weight,
    zeros,
)

# fmt: off


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    y, streams, w_gate, w_pool, bias, norm_weight, h, new_streams, saved,
    tokens, y_stride, stream_stride, eps,
    N: tl.constexpr, C: tl.constexpr, COMPETITIVE: tl.constexpr, NORM: tl.constexpr,
    AT: tl.constexpr, WIDTHS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, HOIST: tl.constexpr,
    SAVED: tl.constexpr, COLUMNS: tl.constexpr,
):
    biases = numbers_at(bias, N + COMPETITIVE)
    gate_held = hoisted(w_gate, AT, WIDTHS, C, BLOCK, HOIST)
    pool_held = hoisted(w_pool, AT, WIDTHS, C, BLOCK, HOIST)
    norm_held = hoisted(norm_weight, AT, WIDTHS, C, BLOCK, HOIST and NORM)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0), num_stages=STAGES
    ):
        row = beside(tokens_of(block, BLOCK), BLOCK)
        live = row < tokens

        kept = ()
        if KEEP:
            for j in tl.static_range(len(WIDTHS)):
                kept += (read(y, streams, y, y, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, False, False, True),)
        parts = ()
        for k in tl.static_range(4 * N + 2):
            parts += (zeros(LANES, BLOCK),)
        for j in tl.static_range(len(WIDTHS)):
            if KEEP:
                values = kept[j]
            else:
                values = read(y, streams, y, y, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, False, False, False)
            wg = weight(gate_held, j, w_gate, AT[j], WIDTHS[j], C, BLOCK, HOIST)
            wp = weight(pool_held, j, w_pool, AT[j], WIDTHS[j], C, BLOCK, HOIST)
            yj = values[0].to(tl.float32)
            more = ()
            for i in tl.static_range(N):
                s = values[1 + i].to(tl.float32)
                more += (
                    parts[4 * i] + fold(s * s, WIDTHS[j], LANES, VECTOR, BLOCK),
                    parts[4 * i + 1] + fold(s * wg, WIDTHS[j], LANES, VECTOR, BLOCK),
                    parts[4 * i + 2] + fold(s * wp, WIDTHS[j], LANES, VECTOR, BLOCK),
                    parts[4 * i + 3] + fold(s * yj, WIDTHS[j], LANES, VECTOR, BLOCK),
                )
            more += (
                parts[4 * N] + fold(yj * yj, WIDTHS[j], LANES, VECTOR, BLOCK),
                parts[4 * N + 1] + fold(yj * wp, WIDTHS[j], LANES, VECTOR, BLOCK),
            )
            parts = more
        sums = sums_of(parts, 4 * N + 2, BLOCK)
        ss = ()
        d1 = ()
        d2 = ()
        q = ()
        for i in tl.static_range(N):
            ss += (sums[4 * i],)
            d1 += (sums[4 * i + 1],)
            d2 += (sums[4 * i + 2],)
            q += (sums[4 * i + 3],)
        yy = sums[4 * N]
        yw = sums[4 * N + 1]
        beta, rest, _, carry = gate(ss, d1, biases, eps, N, C, COMPETITIVE)
        alpha, _, _ = pool(beta, rest, ss, d2, q, yy, yw, eps, N, C)

        pooled = ()
        square = zeros(LANES, BLOCK)
        for j in tl.static_range(len(WIDTHS)):
            if KEEP:
                values = kept[j]
            else:
                values = read(y, streams, y, y, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, False, False, True)
            yj = again(values[0])
            hj = zeros(WIDTHS[j], BLOCK)
            for i in tl.static_range(N):
                s = beside(rest[i], BLOCK) * again(values[1 + i]) + beside(beta[i], BLOCK) * yj
                hj += beside(alpha[i], BLOCK) * s
                store(new_streams, row * (N * C) + i * C, s, live, AT[j], WIDTHS[j], C, BLOCK)
            if NORM:
                pooled += (hj,)
                square += fold(hj * hj, WIDTHS[j], LANES, VECTOR, BLOCK)
            else:
                store(h, row * C, hj, live, AT[j], WIDTHS[j], C, BLOCK)
        inverse = tl.zeros_like(yy)
        if NORM:
            inverse = tl.rsqrt(sums_of((square,), 1, BLOCK)[0] * (1.0 / C) + eps)
            for j in tl.static_range(len(WIDTHS)):
                wn = weight(norm_held, j, norm_weight, AT[j], WIDTHS[j], C, BLOCK, HOIST)
                hj = pooled[j] * beside(inverse, BLOCK) * wn
                store(h, row * C, hj, live, AT[j], WIDTHS[j], C, BLOCK)

        # One store of a row instead of 6n + 4 stores of a number.
        column = columns(0, COLUMNS, BLOCK)
        line = zeros(COLUMNS, BLOCK)
        numbers = ss + d1 + d2 + q + (yy, yw, inverse, carry) + beta + alpha
        for k in tl.static_range(6 * N + 4):
            line = tl.where(column == k, beside(numbers[k], BLOCK), line)
        tl.store(saved + row * SAVED + column, line, mask=live & (column < SAVED))


@triton.jit(do_not_specialize=["tokens"])
def backward_kernel(
    grad_h, grad_streams, y, streams, w_gate, w_pool, bias, norm_weight, saved,
    dy, dstreams, partials, tokens, y_stride, stream_stride, eps,
    N: tl.constexpr, C: tl.constexpr, COMPETITIVE: tl.constexpr, NORM: tl.constexpr,
    GRAD_H: tl.constexpr, GRAD_STREAMS: tl.constexpr, SAVED: tl.constexpr,
    AT: tl.constexpr, WIDTHS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, HOIST: tl.constexpr,
):
    """With g the gradient of h before its norm, g'_i that of s'_i, r_i and r'_i their inverse rms:

        c_i = dscore_i r'_i / sqrt(C),   e_i = c_i (s'_i.w_pool) r'_i^2 / C
        G_i = g'_i + alpha_i g + c_i w_pool - e_i s'_i,   dbeta_i = G_i.(y - s_i)
        k_i = dz_i r_i / sqrt(C),   m_i = k_i d1_i r_i^2 / C
        ds_i = (1 - beta_i) G_i + k_i w_gate - m_i s_i,   dy = sum_i beta_i G_i
        dw_gate = sum k_i s_i,   dw_pool = sum c_i s'_i

    Every number follows from `saved` and the dots g.s_i, g.y and g'_i.(y - s_i). Behind a norm,
    x = h r_h w_norm, the dots are those of f = dx w_norm, and h.s_i, for
    g = r_h f - h (f.h) r_h^3 / C.
    """
    # With one stream alpha is 1 whatever its score: nothing flows through it.
    SCORES: tl.constexpr = GRAD_H and N > 1
    NORMED: tl.constexpr = GRAD_H and NORM
    DOTS: tl.constexpr = GRAD_H + GRAD_STREAMS + NORMED
    biases = numbers_at(bias, N + COMPETITIVE)
    gate_held = hoisted(w_gate, AT, WIDTHS, C, BLOCK, HOIST)
    pool_held = hoisted(w_pool, AT, WIDTHS, C, BLOCK, HOIST and SCORES)
    norm_held = hoisted(norm_weight, AT, WIDTHS, C, BLOCK, HOIST and NORMED)
    gate_sums = ()
    pool_sums = ()
    norm_sums = ()
    for j in tl.static_range(len(WIDTHS)):
        gate_sums += (zeros(WIDTHS[j], BLOCK),)
        if SCORES:
            pool_sums += (zeros(WIDTHS[j], BLOCK),)
        if NORMED:
            norm_sums += (zeros(WIDTHS[j], BLOCK),)
    bias_sums = ()
    for i in tl.static_range(N + COMPETITIVE):
        if BLOCK > 1:
            bias_sums += (tl.zeros([BLOCK], tl.float32),)
        else:
            bias_sums += (0.0,)

    for block in tl.range(
        tl.program_id(0), tl.cdiv(tokens, BLOCK), tl.num_programs(0), num_stages=STAGES
    ):
        token = tokens_of(block, BLOCK)
        row = beside(token, BLOCK)
        live = row < tokens

        kept = ()
        if KEEP:
            for j in tl.static_range(len(WIDTHS)):
                kept += (read(y, streams, grad_h, grad_streams, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, GRAD_H, GRAD_STREAMS, True),)
        numbers = ()
        for k in tl.static_range(4 * N + 3):
            at = saved + token * SAVED + k
            if BLOCK > 1:
                # 1 where no token is: its numbers stay finite, and its gradients are zeros.
                numbers += (tl.load(at, mask=token < tokens, other=1.0),)
            else:
                numbers += (tl.load(at),)
        ss = ()
        d1 = ()
        d2 = ()
        q = ()
        for i in tl.static_range(N):
            ss += (numbers[i],)
            d1 += (numbers[N + i],)
            d2 += (numbers[2 * N + i],)
            q += (numbers[3 * N + i],)
        yy = numbers[4 * N]
        yw = numbers[4 * N + 1]
        inverse_h = numbers[4 * N + 2]
        beta, rest, inverse, carry = gate(ss, d1, biases, eps, N, C, COMPETITIVE)
        alpha, new_inverse, new_d2 = pool(beta, rest, ss, d2, q, yy, yw, eps, N, C)
        # h = from_y y + sum_i from_s_i s_i
        from_s = ()
        from_y = tl.zeros_like(yy)
        for i in tl.static_range(N):
            from_s += (alpha[i] * rest[i],)
            from_y += alpha[i] * beta[i]

        parts = ()
        for k in tl.static_range(N * DOTS + GRAD_H):
            parts += (zeros(LANES, BLOCK),)
        for j in tl.static_range(len(WIDTHS)):
            if KEEP:
                values = kept[j]
            else:
                values = read(y, streams, grad_h, grad_streams, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, GRAD_H, GRAD_STREAMS, False)
            yj = values[0].to(tl.float32)
            if GRAD_H:
                g = values[1 + N].to(tl.float32)
            if NORMED:
                g *= weight(norm_held, j, norm_weight, AT[j], WIDTHS[j], C, BLOCK, HOIST)
                h = beside(from_y, BLOCK) * yj
                for i in tl.static_range(N):
                    h += beside(from_s[i], BLOCK) * values[1 + i].to(tl.float32)
            more = ()
            for i in tl.static_range(N):
                s = values[1 + i].to(tl.float32)
                if GRAD_H:
                    more += (parts[i * DOTS] + fold(g * s, WIDTHS[j], LANES, VECTOR, BLOCK),)
                if NORMED:
                    more += (parts[i * DOTS + 1] + fold(h * s, WIDTHS[j], LANES, VECTOR, BLOCK),)
                if GRAD_STREAMS:
                    product = values[1 + N + GRAD_H + i].to(tl.float32) * (yj - s)
                    product = fold(product, WIDTHS[j], LANES, VECTOR, BLOCK)
                    more += (parts[(i + 1) * DOTS - 1] + product,)
            if GRAD_H:
                more += (parts[N * DOTS] + fold(g * yj, WIDTHS[j], LANES, VECTOR, BLOCK),)
            parts = more
        sums = sums_of(parts, N * DOTS + GRAD_H, BLOCK)

        zero = tl.zeros_like(yy)
        g_dot_s = ()
        if GRAD_H:
            g_dot_y = sums[N * DOTS]
            if NORMED:
                along_h = from_y * g_dot_y
                h_dot_y = from_y * yy
                for i in tl.static_range(N):
                    along_h += from_s[i] * sums[i * DOTS]
                    h_dot_y += from_s[i] * q[i]
                along_h *= inverse_h * inverse_h * inverse_h * (1.0 / C)
                g_dot_y = inverse_h * g_dot_y - along_h * h_dot_y
                for i in tl.static_range(N):
                    g_dot_s += (inverse_h * sums[i * DOTS] - along_h * sums[i * DOTS + 1],)
            else:
                for i in tl.static_range(N):
                    g_dot_s += (sums[i * DOTS],)
        c = ()
        e = ()
        if SCORES:
            dalpha = ()
            mean = zero
            for i in tl.static_range(N):
                dalpha += (rest[i] * g_dot_s[i] + beta[i] * g_dot_y,)
                mean += alpha[i] * dalpha[i]
            for i in tl.static_range(N):
                c += (alpha[i] * (dalpha[i] - mean) * new_inverse[i] * (C**-0.5),)
                e += (c[i] * new_d2[i] * new_inverse[i] * new_inverse[i] * (1.0 / C),)
        dbeta = ()
        for i in tl.static_range(N):
            total = zero
            if GRAD_STREAMS:
                total += sums[(i + 1) * DOTS - 1]
            if GRAD_H:
                total += alpha[i] * (g_dot_y - g_dot_s[i])
            if SCORES:
                along = rest[i] * (q[i] - ss[i]) + beta[i] * (yy - q[i])
                total += c[i] * (yw - d2[i]) - e[i] * along
            dbeta += (total,)
        dlogits = gate_gradient(dbeta, beta, rest, carry, N, COMPETITIVE)
        more = ()
        for i in tl.static_range(N + COMPETITIVE):
            more += (bias_sums[i] + dlogits[i],)
        bias_sums = more
        k = ()
        m = ()
        for i in tl.static_range(N):
            k += (dlogits[i + COMPETITIVE] * inverse[i] * (C**-0.5),)
            m += (k[i] * d1[i] * inverse[i] * inverse[i] * (1.0 / C),)

        more_gate = ()
        more_pool = ()
        more_norm = ()
        for j in tl.static_range(len(WIDTHS)):
            if KEEP:
                values = kept[j]
            else:
                values = read(y, streams, grad_h, grad_streams, row, live, y_stride, stream_stride,
                              AT[j], WIDTHS[j], N, C, BLOCK, GRAD_H, GRAD_STREAMS, True)
            wg = weight(gate_held, j, w_gate, AT[j], WIDTHS[j], C, BLOCK, HOIST)
            dwg = gate_sums[j]
            if SCORES:
                wp = weight(pool_held, j, w_pool, AT[j], WIDTHS[j], C, BLOCK, HOIST)
                dwp = pool_sums[j]
            yj = again(values[0])
            if GRAD_H:
                g = again(values[1 + N])
            if NORMED:
                h = beside(from_y, BLOCK) * yj
                for i in tl.static_range(N):
                    h += beside(from_s[i], BLOCK) * again(values[1 + i])
                g *= beside(inverse_h, BLOCK)
                more_norm += (norm_sums[j] + g * h,)
                g *= weight(norm_held, j, norm_weight, AT[j], WIDTHS[j], C, BLOCK, HOIST)
                g -= beside(along_h, BLOCK) * h
            dyj = zeros(WIDTHS[j], BLOCK)
            for i in tl.static_range(N):
                s = again(values[1 + i])
                G = zeros(WIDTHS[j], BLOCK)
                if GRAD_STREAMS:
                    G = again(values[1 + N + GRAD_H + i])
                if GRAD_H:
                    G += beside(alpha[i], BLOCK) * g
                if SCORES:
                    moved = beside(rest[i], BLOCK) * s + beside(beta[i], BLOCK) * yj
                    G += beside(c[i], BLOCK) * wp - beside(e[i], BLOCK) * moved
                    dwp += beside(c[i], BLOCK) * moved
                dyj += beside(beta[i], BLOCK) * G
                dwg += beside(k[i], BLOCK) * s
                ds = beside(rest[i], BLOCK) * G + beside(k[i], BLOCK) * wg
                ds -= beside(m[i], BLOCK) * s
                store(dstreams, row * (N * C) + i * C, ds, live, AT[j], WIDTHS[j], C, BLOCK)
            store(dy, row * C, dyj, live, AT[j], WIDTHS[j], C, BLOCK)
            more_gate += (dwg,)
            if SCORES:
                more_pool += (dwp,)
        gate_sums = more_gate
        pool_sums = more_pool
        norm_sums = more_norm

    # A row of partials: dw_gate [C], dw_pool [C], dnorm [C] if there is a norm, dbias.
    line = partials + tl.program_id(0).to(tl.int64) * ((2 + NORM) * C + N + COMPETITIVE)
    for j in tl.static_range(len(WIDTHS)):
        nothing = zeros(WIDTHS[j], BLOCK)
        put(line, gate_sums[j], AT[j], WIDTHS[j], C, BLOCK)
        put(line + C, pool_sums[j] if SCORES else nothing, AT[j], WIDTHS[j], C, BLOCK)
        if NORM:
            put(line + 2 * C, norm_sums[j] if NORMED else nothing, AT[j], WIDTHS[j], C, BLOCK)
    for i in tl.static_range(N + COMPETITIVE):
        total = bias_sums[i]
        if BLOCK > 1:
            total = tl.sum(total, axis=0)
        tl.store(line + (2 + NORM) * C + i, total)


@triton.jit(do_not_specialize=["programs"])
def total_kernel(partials, dw_gate, dw_pool, dnorm, dbias, programs, C: tl.constexpr,
                 BIASES: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
                 WIDTH: tl.constexpr):
    """The sum of the partials over the programs, always in the same order."""
    SIZE: tl.constexpr = (2 + NORM) * C + BIASES
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < programs) & (column < SIZE)[None, :]
        sums += tl.load(partials + row.to(tl.int64) * SIZE + column[None, :], inside, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(dw_gate + column, total, mask=column < C)
    tl.store(dw_pool + column - C, total, mask=(column >= C) & (column < 2 * C))
    if NORM:
        tl.store(dnorm + column - 2 * C, total, mask=(column >= 2 * C) & (column < 3 * C))
    at = column - (2 + NORM) * C
    tl.store(dbias + at, total, mask=(at >= 0) & (at < BIASES))
