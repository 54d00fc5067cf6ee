"""depth_pool as Triton kernels over m sources, each [tokens, width].

A row is cut into sections, tiles of a power of two, so that no width is padded to the next one. A
program takes a block of tokens. Where a token's m rows fit into registers the kernel is given the
sources as a tuple and is compiled for this m. Otherwise it walks over them a group at a time, with
the next group on its way, and finds them in a table of addresses: one kernel for every m. The table
is written by a kernel too, so nothing is copied from the host. All sums are float32.

`saved` is float32 [saved_rows(m), tokens]: the largest logit, 1 / sum_i exp(logit_i - largest), the
inverse rms of the pooled row (0 without a norm weight), then of each source its inverse rms and its
logit, then zeros.
"""

# The compiler of Triton reads the kernels, not Python: their arguments have no types to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,import-untyped"

import triton
import triton.language as tl


@triton.jit
def load_row(base, here, WIDTH: tl.constexpr, SECTION: tl.constexpr):
    """A row of each token as tiles [tokens, SECTION] of the dtype in memory, 0 where not `here`."""
    tiles = ()
    for s in tl.static_range((WIDTH + SECTION - 1) // SECTION):
        columns = s * SECTION + tl.arange(0, SECTION)[None, :]
        inside = here[:, None]
        if (s + 1) * SECTION > WIDTH:
            inside = inside & (columns < WIDTH)
        tiles += (tl.load(base + columns, mask=inside, other=0.0),)
    return tiles


@triton.jit
def store_row(base, here, tiles, WIDTH: tl.constexpr, SECTION: tl.constexpr):
    for s in tl.static_range((WIDTH + SECTION - 1) // SECTION):
        columns = s * SECTION + tl.arange(0, SECTION)[None, :]
        inside = here[:, None]
        if (s + 1) * SECTION > WIDTH:
            inside = inside & (columns < WIDTH)
        tl.store(base + columns, tiles[s].to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_weight(base, WIDTH: tl.constexpr, SECTION: tl.constexpr):
    """A vector that all tokens share, as float32 tiles [1, SECTION]."""
    tiles = ()
    for s in tl.static_range((WIDTH + SECTION - 1) // SECTION):
        columns = s * SECTION + tl.arange(0, SECTION)[None, :]
        tiles += (tl.load(base + columns, mask=columns < WIDTH, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def zero_row(BLOCK: tl.constexpr, WIDTH: tl.constexpr, SECTION: tl.constexpr):
    tiles = ()
    for _ in tl.static_range((WIDTH + SECTION - 1) // SECTION):
        tiles += (tl.zeros([BLOCK, SECTION], tl.float32),)
    return tiles


@triton.jit
def store_sum(base, tiles, WIDTH: tl.constexpr, SECTION: tl.constexpr):
    """The sum of a row over the tokens of a block."""
    for s in tl.static_range((WIDTH + SECTION - 1) // SECTION):
        columns = s * SECTION + tl.arange(0, SECTION)
        tl.store(base + columns, tl.sum(tiles[s], 0), mask=columns < WIDTH)


@triton.jit
def dot(a, b, SECTIONS: tl.constexpr):
    """a . b of each token: over the sections first, then one reduction."""
    products = a[0].to(tl.float32) * b[0].to(tl.float32)
    for s in tl.static_range(1, SECTIONS):
        products += a[s].to(tl.float32) * b[s].to(tl.float32)
    return tl.sum(products, 1)


@triton.jit
def inverse_rms(row, eps, WIDTH: tl.constexpr, SECTIONS: tl.constexpr):
    """1 / rms of each token, rounded and not approximate: a source's stands in a logit, of which
    exp is taken, and the gradient through the pooled row's, g (1 - (pooled inverse)^2), may cancel.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(dot(row, row, SECTIONS), WIDTH) + eps))


@triton.jit
def find(table, k, count, like, ALIGN: tl.constexpr):
    """The address of tensor k by the table."""
    address = tl.load(table + k, mask=k < count, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), ALIGN)


@triton.jit
def load_group(
    where,
    first,
    WIDTH: tl.constexpr,
    SECTION: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The rows of the sources from number `first` on; past the last source they are 0."""
    sources, like, starts, alive, count = where
    rows = ()
    for j in tl.static_range(GROUP):
        base = sources[j] if HELD else find(sources, first + j, count, like, ALIGN)
        rows += (load_row(base + starts, alive & (first + j < count), WIDTH, SECTION),)
    return rows


@triton.jit(do_not_specialize=["tokens", "count"])
def forward_kernel(
    sources,
    query,
    norm_weight,
    h,
    saved,
    tokens,
    count,
    row_stride,
    scale,
    eps,
    WIDTH: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """h = sum_i alpha_i v_i, reading each source once: the sums are rescaled as the top grows."""
    SECTIONS: tl.constexpr = (WIDTH + SECTION - 1) // SECTION
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = token < tokens
    starts = (token * row_stride)[:, None]
    stats = saved + token
    step = tl.cast(tokens, tl.int64)
    q = load_weight(query, WIDTH, SECTION)
    for spare in range(3 + 2 * count, (2 * count + 6) // 4 * 4):
        tl.store(stats + spare * step, tl.zeros([BLOCK], tl.float32), mask=alive)

    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = zero_row(BLOCK, WIDTH, SECTION)
    where = (sources, h, starts, alive, count)
    ahead = load_group(where, 0, WIDTH, SECTION, GROUP, HELD, ALIGN)
    for first in range(0, GROUP if HELD else count, GROUP):
        group = ahead
        if not HELD:
            ahead = load_group(where, first + GROUP, WIDTH, SECTION, GROUP, HELD, ALIGN)
        logits = ()
        grown = top
        for j in tl.static_range(GROUP):
            inverse = inverse_rms(group[j], eps, WIDTH, SECTIONS)
            # + 0.0 rounds it here: else exp(logit - top) is of a fused multiply-add, of another
            # logit than the one that is kept, and the weights of the backward pass have no sum 1.
            logit = dot(group[j], q, SECTIONS) * inverse * scale + 0.0
            here = alive & (first + j < count)
            tl.store(stats + (3 + 2 * (first + j)) * step, inverse, mask=here)
            tl.store(stats + (4 + 2 * (first + j)) * step, logit, mask=here)
            logit = tl.where(first + j < count, logit, float("-inf"))
            logits += (logit,)
            grown = tl.maximum(grown, logit)

        shrink = tl.exp(top - grown)
        top = grown
        total = total * shrink
        weights = ()
        for j in tl.static_range(GROUP):
            weight = tl.exp(logits[j] - top)
            total += weight
            weights += (weight[:, None],)
        updated = ()
        for s in tl.static_range(SECTIONS):
            tile = sums[s] * shrink[:, None]
            for j in tl.static_range(GROUP):
                tile += weights[j] * group[j][s].to(tl.float32)
            updated += (tile,)
        sums = updated

    share = tl.div_rn(1.0, total)
    pooled = ()
    for s in tl.static_range(SECTIONS):
        pooled += (sums[s] * share[:, None],)
    inverse = tl.zeros([BLOCK], tl.float32)
    if norm_weight is not None:
        inverse = inverse_rms(pooled, eps, WIDTH, SECTIONS)
        gain = load_weight(norm_weight, WIDTH, SECTION)
        normed = ()
        for s in tl.static_range(SECTIONS):
            normed += (pooled[s] * inverse[:, None] * gain[s],)
        pooled = normed
    tl.store(stats, top, mask=alive)
    tl.store(stats + step, share, mask=alive)
    tl.store(stats + 2 * step, inverse, mask=alive)
    store_row(h + (token * WIDTH)[:, None], alive, pooled, WIDTH, SECTION)


@triton.jit
def read_stats(seen, k):
    """alpha_k, the inverse rms and the logit of source k; alpha_k is 0 where there is none."""
    stats, step, alive, count, top, share = seen
    here = alive & (k < count)
    inverse = tl.load(stats + (3 + 2 * k) * step, mask=here, other=0.0)
    logit = tl.load(stats + (4 + 2 * k) * step, mask=here, other=0.0)
    return tl.where(here, tl.exp(logit - top) * share, 0.0), inverse, logit


@triton.jit
def add_group(pooled, group, seen, first, SECTIONS: tl.constexpr, GROUP: tl.constexpr):
    """pooled + sum of alpha_k v_k over a group."""
    for j in tl.static_range(GROUP):
        alpha, _, _ = read_stats(seen, first + j)
        updated = ()
        for s in tl.static_range(SECTIONS):
            updated += (pooled[s] + alpha[:, None] * group[j][s].to(tl.float32),)
        pooled = updated
    return pooled


@triton.jit
def write_group(
    where,
    dquery,
    group,
    vectors,
    scale,
    seen,
    first,
    WIDTH: tl.constexpr,
    SECTION: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The gradients of a group of sources, and dquery with their part added."""
    SECTIONS: tl.constexpr = (WIDTH + SECTION - 1) // SECTION
    grads, like, starts, alive, count = where
    g, pooled, q = vectors
    for j in tl.static_range(GROUP):
        alpha, inverse, logit = read_stats(seen, first + j)
        # v_i - o first: the difference of two dot products would cancel where one source has
        # nearly all the weight.
        away = ()
        for s in tl.static_range(SECTIONS):
            away += (group[j][s].to(tl.float32) - pooled[s],)
        slope = alpha * dot(away, g, SECTIONS)
        pull = (slope * scale * inverse)[:, None]
        shrink = (slope * logit * inverse * inverse / WIDTH)[:, None]
        tiles = ()
        updated = ()
        for s in tl.static_range(SECTIONS):
            v = group[j][s].to(tl.float32)
            tiles += (alpha[:, None] * g[s] + pull * q[s] - shrink * v,)
            updated += (dquery[s] + pull * v,)
        dquery = updated
        if HELD:
            if grads[j] is not None:
                store_row(grads[j] + starts, alive, tiles, WIDTH, SECTION)
        else:
            target = find(grads, first + j, count, like, ALIGN)
            here = alive & (first + j < count) & (target.to(tl.int64) != 0)
            store_row(target + starts, here, tiles, WIDTH, SECTION)
    return dquery


@triton.jit(do_not_specialize=["tokens", "count"])
def backward_kernel(
    sources,
    grads,
    grad_h,
    query,
    norm_weight,
    saved,
    query_parts,
    norm_parts,
    tokens,
    count,
    row_stride,
    scale,
    WIDTH: tl.constexpr,
    SECTION: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """With o = sum_i alpha_i v_i, g its gradient and r_i the inverse rms of source i:

        e_i    = alpha_i g . (v_i - o)                       the gradient of logit_i
        dv_i   = alpha_i g + e_i (scale r_i query - logit_i r_i^2 v_i / D)
        dquery = sum e_i scale r_i v_i

    A first sweep makes o and a second one the gradients, except those that are None, or 0 in the
    table. A program walks over its blocks of tokens in order and writes one row of each of the
    parts.
    """
    SECTIONS: tl.constexpr = (WIDTH + SECTION - 1) // SECTION
    SINGLE: tl.constexpr = HELD and GROUP == 1
    step = tl.cast(tokens, tl.int64)
    q = load_weight(query, WIDTH, SECTION)
    dquery = zero_row(BLOCK, WIDTH, SECTION)
    dnorm = zero_row(BLOCK, WIDTH, SECTION)
    program = tl.program_id(0)
    for block in range(program, tl.cdiv(tokens, BLOCK), tl.num_programs(0)):
        token = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        alive = token < tokens
        places = (token * WIDTH)[:, None]
        stats = saved + token
        top = tl.load(stats, mask=alive, other=0.0)
        share = tl.load(stats + step, mask=alive, other=0.0)
        seen = (stats, step, alive, count, top, share)
        incoming = load_row(grad_h + places, alive, WIDTH, SECTION)

        source = (sources, grad_h, (token * row_stride)[:, None], alive, count)
        target = (grads, grad_h, places, alive, count)
        held = load_group(source, 0, WIDTH, SECTION, GROUP, HELD, ALIGN)
        pooled = zero_row(BLOCK, WIDTH, SECTION)
        if HELD:
            pooled = add_group(pooled, held, seen, 0, SECTIONS, GROUP)
        else:
            ahead = held
            for first in range(0, count, GROUP):
                group = ahead
                ahead = load_group(source, first + GROUP, WIDTH, SECTION, GROUP, HELD, ALIGN)
                pooled = add_group(pooled, group, seen, first, SECTIONS, GROUP)

        g = ()
        if norm_weight is None:
            for s in tl.static_range(SECTIONS):
                g += (incoming[s].to(tl.float32),)
        else:
            inverse = tl.load(stats + 2 * step, mask=alive, other=0.0)[:, None]
            gain = load_weight(norm_weight, WIDTH, SECTION)
            gained = ()
            for s in tl.static_range(SECTIONS):
                gained += (incoming[s].to(tl.float32) * gain[s],)
            along = dot(gained, pooled, SECTIONS)[:, None] * inverse * inverse / WIDTH
            updated = ()
            for s in tl.static_range(SECTIONS):
                g += (inverse * (gained[s] - along * pooled[s]),)
                updated += (dnorm[s] + incoming[s].to(tl.float32) * pooled[s] * inverse,)
            dnorm = updated

        if SINGLE:
            # The weight of a single source is 1 whatever the query says.
            if grads[0] is not None:
                store_row(grads[0] + places, alive, g, WIDTH, SECTION)
        elif HELD:
            vectors = (g, pooled, q)
            dquery = write_group(
                target, dquery, held, vectors, scale, seen, 0, WIDTH, SECTION, GROUP, HELD, ALIGN
            )
        else:
            vectors = (g, pooled, q)
            ahead = load_group(source, 0, WIDTH, SECTION, GROUP, HELD, ALIGN)
            for first in range(0, count, GROUP):
                group = ahead
                ahead = load_group(source, first + GROUP, WIDTH, SECTION, GROUP, HELD, ALIGN)
                dquery = write_group(
                    target,
                    dquery,
                    group,
                    vectors,
                    scale,
                    seen,
                    first,
                    WIDTH,
                    SECTION,
                    GROUP,
                    HELD,
                    ALIGN,
                )

    if query_parts is not None:
        store_sum(query_parts + program * WIDTH, dquery, WIDTH, SECTION)
    if norm_parts is not None:
        store_sum(norm_parts + program * WIDTH, dnorm, WIDTH, SECTION)


@triton.jit
def table_kernel(tensors, table, COUNT: tl.constexpr):
    """table[k] = the address of tensor k, 0 for None."""
    for k in tl.static_range(COUNT):
        if tensors[k] is None:
            tl.store(table + k, tl.zeros([], tl.int64))
        else:
            tl.store(table + k, tensors[k].to(tl.int64))
