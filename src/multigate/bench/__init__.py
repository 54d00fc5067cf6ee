"""`multigate bench`: how fast the operations and whole training steps are on this machine."""

from .command import BenchConfig, bench

__all__ = ["BenchConfig", "bench"]
