"""Checks that the operations share: one clear sentence for tensors that do not fit together."""

from collections.abc import Mapping

from torch import Tensor


def check_tensors(op: str, tensors: Mapping[str, Tensor], first: str) -> None:
    """All must be floating point and on the device of `first`."""
    device = tensors[first].device
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating point, got {tensor.dtype}.")
        if tensor.device != device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first} is on {device}: "
                "move one of them with .to(device)."
            )
