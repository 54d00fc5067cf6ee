"""What a kernel saves of a token: float32 numbers, in one row.

Of each stream s.s, then s.w_gate, then s.w_pool, then s.y; y.y, y.w_pool, 1 / rms of h (0 without
a norm), the carry of the gate (0 if it has none); of each stream beta, then alpha; zeros. CUDA's
backward pass reads all of it; Triton's makes the gates and the pool anew of the products, and the
memory modes read beta.
"""

from torch import Tensor


def saved_numbers(n: int) -> int:
    """In whole 16 bytes, which bulk copies want."""
    return -(-(6 * n + 4) // 4) * 4


def saved_gates(saved: Tensor, n: int) -> Tensor:
    """beta [tokens, n]."""
    return saved[:, 4 * n + 4 : 5 * n + 4]
