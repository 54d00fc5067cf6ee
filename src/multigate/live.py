"""Which tensors are alive, and the fullest moment: what a GPU's allocator would hold then."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .ops.gate_pool.codes import LISTED


class Live(TorchDispatchMode):
    """Counts, while it is on, every storage from the operator that makes it until it is freed.

    A storage belongs to the part that `part` names when it is made, until `give` says otherwise.
    Tensors may be fake: then there are sizes and no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = "working"
        self.now: dict[str, int] = {}
        """Bytes alive of each part."""
        self.peak: dict[str, int] = {}
        """The same at the fullest moment so far."""
        self._most = 0
        self._owners: dict[int, tuple[str, int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _picks_by_mask(func, args):
            # How many it picks only numbers can say. The one mask that matters is that of the
            # memory mode "exact": its list has this much room under torch.compile.
            out = args[0].new_empty(-(-args[0].numel() // LISTED))
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def give(self, tensor: Tensor, part: str) -> None:
        """Let the memory of `tensor` belong to `part` from now on."""
        self._count(tensor)
        key = _key(tensor)
        old, size, alive = self._owners[key]
        self._owners[key] = part, size, alive
        self.now[old] -= size
        self.now[part] = self.now.get(part, 0) + size

    def _count(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._owners:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._owners[key] = self.part, size, weakref.ref(storage, lambda _: self._drop(key))
        self.now[self.part] = self.now.get(self.part, 0) + size
        total = sum(self.now.values())
        if total > self._most:
            self._most, self.peak = total, dict(self.now)

    def _drop(self, key: int) -> None:
        part, size, _ = self._owners.pop(key)
        self.now[part] -= size


def _key(tensor: Tensor) -> int:
    """A storage without memory has no address, but it is an object of its own."""
    return tensor.untyped_storage()._cdata


def _picks_by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether fake tensors are asked for something as long as a mask says."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    first = args[1][0]
    return isinstance(first, FakeTensor) and first.dtype == torch.bool
