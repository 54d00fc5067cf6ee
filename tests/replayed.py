"""A CUDA graph for the CPU: the operators of a captured region are listed and can be run again.

As on a GPU, what is captured has no effect on tensors that were there before, a replay reads and
writes the same memory, nothing of Python runs again, and to look at a value is an error.
"""

from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigate import decode


class Graph(TorchDispatchMode):
    """Stands where `torch.cuda.CUDAGraph` does; `with graph:` is its capture."""

    made: list["Graph"]

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0
        Graph.made.append(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\nand more of it")
        # In place: only a replay does it.
        out = args[0] if func._schema.is_mutable else func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.autocast("cpu", enabled=False)
    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def pretend(patch):
    """Have models on the CPU decoded with graphs; the list of those that are made comes back."""
    Graph.made = []
    streams = []

    def capture(graph, *, stream, capture_error_mode):
        assert streams == [stream], "the kernels go to the stream that is captured"
        return graph

    class Stream(nullcontext):
        def __enter__(self):
            streams.append(self.enter_result)

        def __exit__(self, *error):
            streams.pop()

    patch.setattr(decode, "can_capture", lambda model: not decode.is_watched(model))
    patch.setattr(decode, "capture_stream", str)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "stream", Stream)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Graph.made
