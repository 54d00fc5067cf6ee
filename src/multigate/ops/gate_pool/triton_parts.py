"""Building blocks of the Multi-Gate kernels: sections of a token, sums over threads, the gate.

A program takes BLOCK tokens at a time. The width is cut into sections of WIDTH channels, powers of
two that start at AT, so that 768 = 512 + 256 and 1280 = 1024 + 256 need no padding. LANES threads
share a token: a section lies as [repeats, LANES, EACH], where EACH neighbouring channels are one
access of a thread, which adds up all of its own before anything is exchanged.

With BLOCK = 1 the numbers of a token are scalars: tensors of one number have a layout, and the
compiler would move whole sections to meet it.
"""

# The compiler of Triton reads these functions, and Python never runs them.
# mypy: ignore-errors

import triton
import triton.language as tl

# fmt: off


@triton.jit
def tokens_of(block, BLOCK: tl.constexpr):
    if BLOCK > 1:
        return (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    else:
        return tl.cast(block, tl.int64)


@triton.jit
def beside(number, BLOCK: tl.constexpr):
    """A number a token, ready to meet a section."""
    if BLOCK > 1:
        return number[:, None]
    else:
        return number


@triton.jit
def columns(AT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = AT + tl.arange(0, WIDTH)
    if BLOCK > 1:
        return column[None, :]
    else:
        return column


@triton.jit
def zeros(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if BLOCK > 1:
        return tl.zeros([BLOCK, WIDTH], tl.float32)
    else:
        return tl.zeros([WIDTH], tl.float32)


@triton.jit
def load(pointer, offset, live, AT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
         BLOCK: tl.constexpr, LAST: tl.constexpr):
    """The section of the rows at `offset`, as stored, and zeros where nothing is.

    LAST: it will not be read again. (The two policies also keep the compiler from merging a second
    read with the first.)
    """
    column = columns(AT, WIDTH, BLOCK)
    where = pointer + offset + column
    policy: tl.constexpr = "evict_first" if LAST else "evict_last"
    if AT + WIDTH > C:
        return tl.load(where, mask=live & (column < C), other=0.0, eviction_policy=policy)
    elif BLOCK > 1:
        return tl.load(where, mask=live, other=0.0, eviction_policy=policy)
    else:
        return tl.load(where, eviction_policy=policy)


@triton.jit
def store(pointer, offset, value, live, AT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
          BLOCK: tl.constexpr):
    column = columns(AT, WIDTH, BLOCK)
    where = pointer + offset + column
    value = value.to(pointer.dtype.element_ty)
    if AT + WIDTH > C:
        tl.store(where, value, mask=live & (column < C))
    elif BLOCK > 1:
        tl.store(where, value, mask=live)
    else:
        tl.store(where, value)


@triton.jit
def read(y, streams, grad_h, grad_streams, row, live, y_stride, stream_stride,
         AT: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
         BLOCK: tl.constexpr, GRAD_H: tl.constexpr, GRAD_STREAMS: tl.constexpr,
         LAST: tl.constexpr):
    """A section of a token: y, its n streams, then grad_h and its n grad_streams if there are."""
    values = (load(y, row * y_stride, live, AT, WIDTH, C, BLOCK, LAST),)
    for i in tl.static_range(N):
        values += (load(streams[i], row * stream_stride, live, AT, WIDTH, C, BLOCK, LAST),)
    if GRAD_H:
        values += (load(grad_h, row * C, live, AT, WIDTH, C, BLOCK, LAST),)
    if GRAD_STREAMS:
        for i in tl.static_range(N):
            at = row * (N * C) + i * C
            values += (load(grad_streams, at, live, AT, WIDTH, C, BLOCK, LAST),)
    return values


@triton.jit
def again(value):
    """`value` as float32, by another way than the first time.

    Else the compiler merges the two casts and carries a token through the reduction as float32, in
    twice as many registers.
    """
    if value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def read_weight(pointer, AT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
                BLOCK: tl.constexpr):
    """The section of a weight, one copy a token so that it lies where the streams lie."""
    column = columns(AT, WIDTH, BLOCK)
    if BLOCK > 1:
        column = tl.broadcast_to(column, [BLOCK, WIDTH])
    where = pointer + column
    if AT + WIDTH > C:
        value = tl.load(where, mask=column < C, other=0.0, eviction_policy="evict_last")
    else:
        value = tl.load(where, eviction_policy="evict_last")
    return value.to(tl.float32)


@triton.jit
def hoisted(pointer, AT: tl.constexpr, WIDTHS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
            HOIST: tl.constexpr):
    """The sections of a weight to hold over all tokens: all of them or none."""
    sections = ()
    if HOIST:
        for j in tl.static_range(len(WIDTHS)):
            sections += (read_weight(pointer, AT[j], WIDTHS[j], C, BLOCK),)
    return sections


@triton.jit
def weight(held, j: tl.constexpr, pointer, AT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
           BLOCK: tl.constexpr, HOIST: tl.constexpr):
    if HOIST:
        return held[j]
    else:
        return read_weight(pointer, AT, WIDTH, C, BLOCK)


@triton.jit
def numbers_at(pointer, COUNT: tl.constexpr):
    numbers = ()
    for i in tl.static_range(COUNT):
        numbers += (tl.load(pointer + i).to(tl.float32),)
    return numbers


@triton.jit
def fold(product, WIDTH: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
         BLOCK: tl.constexpr):
    """The sum over the channels of a thread: WIDTH numbers become LANES."""
    EACH: tl.constexpr = VECTOR if WIDTH // LANES > VECTOR else WIDTH // LANES
    REPEATS: tl.constexpr = WIDTH // LANES // EACH
    if BLOCK > 1:
        return tl.sum(tl.sum(tl.reshape(product, [BLOCK, REPEATS, LANES, EACH]), axis=3), axis=1)
    elif REPEATS > 1:
        return tl.sum(tl.sum(tl.reshape(product, [REPEATS, LANES, EACH]), axis=2), axis=0)
    elif EACH > 1:
        return tl.sum(tl.reshape(product, [LANES, EACH]), axis=1)
    else:
        return product


@triton.jit
def join4(parts, at: tl.constexpr):
    left = tl.join(parts[at], parts[at + 1])
    return tl.join(left, tl.join(parts[at + 2], parts[at + 3]))


@triton.jit
def split4(joined):
    ab, cd = tl.split(joined)
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return (a, b, c, d)


@triton.jit
def sums_of(parts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over the threads of each of `parts`, eight (four, two) of them an exchange."""
    AXIS: tl.constexpr = 1 if BLOCK > 1 else 0
    sums = ()
    for at in tl.static_range(0, COUNT // 8 * 8, 8):
        low, high = tl.split(tl.sum(tl.join(join4(parts, at), join4(parts, at + 4)), axis=AXIS))
        sums += split4(low) + split4(high)
    if COUNT % 8 >= 4:
        sums += split4(tl.sum(join4(parts, COUNT // 8 * 8), axis=AXIS))
    if COUNT % 4 >= 2:
        pair = tl.join(parts[COUNT // 4 * 4], parts[COUNT // 4 * 4 + 1])
        first, second = tl.split(tl.sum(pair, axis=AXIS))
        sums += (first, second)
    if COUNT % 2 == 1:
        sums += (tl.sum(parts[COUNT - 1], axis=AXIS),)
    return sums


@triton.jit
def softmax(logits, N: tl.constexpr):
    top = logits[0]
    for i in tl.static_range(1, N):
        top = tl.maximum(top, logits[i])
    raised = ()
    total = tl.zeros_like(top)
    for i in tl.static_range(N):
        raised += (tl.exp(logits[i] - top),)
        total += raised[i]
    scale = 1.0 / total
    shares = ()
    for i in tl.static_range(N):
        shares += (raised[i] * scale,)
    return shares


@triton.jit
def gate(ss, d1, bias, eps, N: tl.constexpr, C: tl.constexpr, COMPETITIVE: tl.constexpr):
    """beta_i, 1 - beta_i, the inverse rms of s_i, and the share of the carry (competitive)."""
    inverse = ()
    logits = ()
    if COMPETITIVE:
        logits += (tl.zeros_like(ss[0]) + bias[0],)
    for i in tl.static_range(N):
        inverse += (tl.rsqrt(ss[i] * (1.0 / C) + eps),)
        logits += (d1[i] * inverse[i] * (C**-0.5) + bias[i + COMPETITIVE],)
    beta = ()
    rest = ()
    carry = tl.zeros_like(ss[0])
    if COMPETITIVE:
        shares = softmax(logits, N + 1)
        carry = shares[0]
        for i in tl.static_range(N):
            beta += (shares[i + 1],)
            rest += (1.0 - shares[i + 1],)
    else:
        for i in tl.static_range(N):
            # Both from exp(-|z|): nothing overflows, and the smaller of the two is not rounded off.
            small = tl.exp(-tl.abs(logits[i]))
            large = 1.0 / (1.0 + small)
            small *= large
            beta += (tl.where(logits[i] > 0, large, small),)
            rest += (tl.where(logits[i] > 0, small, large),)
    return beta, rest, inverse, carry


@triton.jit
def pool(beta, rest, ss, d2, q, yy, yw, eps, N: tl.constexpr, C: tl.constexpr):
    """alpha_i, the inverse rms of s'_i, and s'_i.w_pool."""
    inverse = ()
    dots = ()
    logits = ()
    for i in tl.static_range(N):
        square = rest[i] * (rest[i] * ss[i] + 2.0 * beta[i] * q[i]) + beta[i] * beta[i] * yy
        # Where y cancels a stream, rounding can leave less than nothing.
        inverse += (tl.rsqrt(tl.maximum(square, 0.0) * (1.0 / C) + eps),)
        dots += (rest[i] * d2[i] + beta[i] * yw,)
        logits += (dots[i] * inverse[i] * (C**-0.5),)
    return softmax(logits, N), inverse, dots


@triton.jit
def gate_gradient(dbeta, beta, rest, carry, N: tl.constexpr, COMPETITIVE: tl.constexpr):
    """Gradients of the gate's logits, that of the carry first (competitive)."""
    logits = ()
    if COMPETITIVE:
        mean = tl.zeros_like(carry)
        for i in tl.static_range(N):
            mean += beta[i] * dbeta[i]
        logits += (-carry * mean,)
        for i in tl.static_range(N):
            logits += (beta[i] * (dbeta[i] - mean),)
    else:
        for i in tl.static_range(N):
            logits += (beta[i] * rest[i] * dbeta[i],)
    return logits


@triton.jit
def put(line, sums, AT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """A section of a row of partial sums."""
    column = AT + tl.arange(0, WIDTH)
    if BLOCK > 1:
        sums = tl.sum(sums, axis=0)
    tl.store(line + column, sums, mask=column < C)
