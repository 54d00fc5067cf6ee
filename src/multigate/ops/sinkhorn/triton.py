"""Sinkhorn's iteration as Triton kernels: a program takes a block of n x n matrices through all
steps.

With m' = m / S and S = sum(m) + eps over rows or columns, the gradient of m is
(g - sum(g m')) / S. The backward pass goes through the steps once more, keeps the matrix after each
in memory of its own, and goes back.
"""

# The compiler of Triton reads the kernels, not Python: their arguments have no types to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Of the matrices that a program has at a time."""


@triton.jit
def softmax(x, real):
    """Over the columns; 0 where no matrix is."""
    top = tl.max(tl.where(real, x, -3.0e38), 2)
    e = tl.where(real, tl.exp(x - top[:, :, None]), 0.0)
    return tl.where(real, e / tl.sum(e, 2)[:, :, None], 0.0)


@triton.jit
def over(x, ROWS: tl.constexpr):
    """The sum of each row, or of each column, of every matrix, beside its elements."""
    return tl.sum(x, 2)[:, :, None] if ROWS else tl.sum(x, 1)[:, None, :]


@triton.jit
def places(tokens, N: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the elements of a block of matrices are, and which of them there are."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    real = (token < tokens) & (row < N) & (column < N)
    return (token * N + row) * N + column, real


@triton.jit(do_not_specialize=["tokens", "steps"])
def forward_kernel(
    logits, out, tokens, steps, eps, N: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at, real = places(tokens, N, SIZE, BLOCK)
    m = tl.where(real, softmax(tl.load(logits + at, mask=real, other=0.0), real) + eps, 0.0)
    m = m / (over(m, False) + eps)
    for _ in range(steps - 1):
        m = m / (over(m, True) + eps)
        m = m / (over(m, False) + eps)
    tl.store(out + at, m, mask=real)


@triton.jit
def back(g, after, state, real, eps, ROWS: tl.constexpr):
    """The gradient before a step, and the matrix, which is in memory at `state`."""
    before = tl.load(state, mask=real, other=0.0)
    g = (g - over(g * after, ROWS)) / (over(before, ROWS) + eps)
    # Beside the matrices there is nothing but eps to divide by, again and again.
    return tl.where(real, g, 0.0), before


@triton.jit(do_not_specialize=["tokens", "steps"])
def backward_kernel(
    grad,
    logits,
    out,
    states,
    tokens,
    steps,
    eps,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`states` has room for 2 `steps` - 1 matrices a token."""
    at, real = places(tokens, N, SIZE, BLOCK)
    p = softmax(tl.load(logits + at, mask=real, other=0.0), real)
    size = tokens.to(tl.int64) * N * N
    state = states + at
    m = tl.where(real, p + eps, 0.0)
    tl.store(state, m, mask=real)
    m = m / (over(m, False) + eps)
    for _ in range(steps - 1):
        tl.store(state + size, m, mask=real)
        m = m / (over(m, True) + eps)
        tl.store(state + 2 * size, m, mask=real)
        m = m / (over(m, False) + eps)
        state += 2 * size
    # What is read was written by this program, if not by this thread.
    tl.debug_barrier()
    g = tl.load(grad + at, mask=real, other=0.0)
    for _ in range(steps - 1):
        g, m = back(g, m, state, real, eps, False)
        g, m = back(g, m, state - size, real, eps, True)
        state -= 2 * size
    g, m = back(g, m, state, real, eps, False)
    tl.store(out + at, p * (g - over(p * g, True)), mask=real)


def forward(logits: Tensor, steps: int, eps: float) -> Tensor:
    """The matrices of logits [tokens, n, n]."""
    out = torch.empty_like(logits)
    if out.numel():
        grid, sizes = _cut(logits)
        forward_kernel[grid](logits, out, len(logits), steps, eps, **sizes)
    return out


def backward(grad: Tensor, logits: Tensor, steps: int, eps: float) -> Tensor:
    out = torch.empty_like(logits)
    if out.numel():
        grid, sizes = _cut(logits)
        states = logits.new_empty(2 * steps - 1, *logits.shape)
        backward_kernel[grid](grad, logits, out, states, len(logits), steps, eps, **sizes)
    return out


def _cut(logits: Tensor) -> tuple[tuple[int], dict[str, int]]:
    tokens, n, _ = logits.shape
    size = triton.next_power_of_2(n)
    block = max(ELEMENTS // size**2, 1)
    return (triton.cdiv(tokens, block),), {"N": n, "SIZE": size, "BLOCK": block}
