"""The operations with a fused form: one folder each, with a readable reference beside it."""

from .depth_pool import depth_pool
from .gate_pool import gate_pool

__all__ = ["depth_pool", "gate_pool"]
