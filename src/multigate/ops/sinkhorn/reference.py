"""Sinkhorn's iteration written for reading."""

from torch import Tensor


def sinkhorn(logits: Tensor, steps: int = 20, eps: float = 1e-6) -> Tensor:
    matrix = logits.softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix
