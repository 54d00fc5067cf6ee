"""Plain PyTorch without its gradients by hand."""

import sys
from contextlib import contextmanager

import pytest


@contextmanager
def by_autograd():
    """The operations have autograd's gradients of the reference, as where they are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("depth_pool", "gate_pool", "gate_pool.passes"):
            patch.setattr(sys.modules[f"multigate.ops.{name}"], "by_hand", lambda: False)
        yield
