"""Building blocks of depth_pool's Triton kernels: rows in sections, and the norms of rows.

A row is cut into sections, tiles of a power of two, so that no width is padded to the next one. All
sums are float32.
"""

# The compiler of Triton reads these functions, not Python: their arguments have no types to check.
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
    """1 / rms of each token, rounded: the gradient through the norm of the pooled row,
    g (1 - (pooled inverse)^2), may cancel.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(dot(row, row, SECTIONS), WIDTH) + eps))


@triton.jit
def source_inverse(row, eps, WIDTH: tl.constexpr, SECTIONS: tl.constexpr):
    """1 / rms of each token, to a rounding or two: it stands in a logit, of which exp is taken.

    The GPU's own root is off by three; one step of Newton's, r + r/2 (1 - x r^2), mends it. Exact
    roots and quotients for every source would branch, and that takes so many registers that fewer
    programs have room.
    """
    square = dot(row, row, SECTIONS) * (1.0 / WIDTH) + eps
    root = tl.rsqrt(square)
    mended = root + 0.5 * root * (1.0 - square * root * root)
    # Of an infinite square the root is 0, and the step would be none.
    return tl.where(root > 0.0, mended, root)
