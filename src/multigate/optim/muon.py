"""Muon: momentum, orthogonalised.

    m <- mu m + (1 - mu) g
    u  = (1 - mu) g + mu m        (without Nesterov: u = m)
    p <- p (1 - lr wd) - lr scale orthogonalise(u)

`scale` makes up for the shape r x c: "original" sqrt(max(1, r/c)), or "match-rms-adamw"
0.2 sqrt(max(r, c)), with which an update is as large as one of AdamW usually is.
"""

import math
from collections.abc import Hashable, Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from multigate.names import unknown

from .config import Method, Scale
from .orthogonal import ITERATIONS, orthogonalise
from .sharded import gather, layout, local, scatter


class Muon(torch.optim.Optimizer):
    """Muon for matrices; those of equal shape are orthogonalised together.

    The momentum has the dtype of its parameter, and is sharded as that is; what is orthogonalised
    is whole on every rank. `dtype` is that of `orthogonalise`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        method: Method = "polar-express",
        scale: Scale = "original",
        dtype: torch.dtype | None = None,
    ) -> None:
        if method not in ITERATIONS:
            raise ValueError(unknown("method", method, get_args(Method)))
        if scale not in get_args(Scale):
            raise ValueError(unknown("scale", scale, get_args(Scale)))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "method": method,
            "scale": scale,
            "dtype": dtype,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim != 2:
                raise ValueError(
                    f"Muon trains matrices only, got a parameter of shape {tuple(p.shape)}: give "
                    "it to AdamW."
                )
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None) -> None:  # type: ignore[override]
        """One step; if `found_inf` is not 0, everything stays as it is, whatever the gradients are.

        `found_inf` is a tensor of one number; it is not waited for.
        """
        for group in self.param_groups:
            alike: dict[Hashable, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.shape, p.dtype, p.device, layout(p)), []).append(p)
            for params in alike.values():
                self._update(params, group, found_inf)

    def _update(
        self, params: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        like, lr, mu = params[0], group["lr"], group["momentum"]
        values = [local(p) for p in params]
        momenta = [local(self.state[p]["momentum"]) for p in params]
        # Gradients of a step to be left out may be NaN, and 0 x NaN is NaN: they are emptied. Then
        # go = 0 makes every factor below 1 and every summand 0.
        update = torch.stack([local(p.grad) for p in params if p.grad is not None])
        go = torch.ones((), dtype=like.dtype, device=like.device)
        if found_inf is not None:
            skip = found_inf.to(like.device, non_blocking=True) != 0
            update.masked_fill_(skip, 0)
            go.masked_fill_(skip, 0)
        torch._foreach_mul_(momenta, 1 - (1 - mu) * go)
        torch._foreach_add_(momenta, update.unbind(), alpha=1 - mu)
        if group["nesterov"]:
            torch._foreach_lerp_(update.unbind(), momenta, mu)
        else:
            torch._foreach_copy_(update.unbind(), momenta)
        whole = orthogonalise(gather(update, like), group["method"], group["dtype"])
        # A factor of three dimensions, unlike a number, takes bfloat16 up to the parameter's dtype.
        factor = (-lr * shape_scale(like.shape, group["scale"])) * go.view(1, 1, 1)
        torch.mul(scatter(whole, like), factor, out=update)
        torch._foreach_mul_(values, 1 - lr * group["weight_decay"] * go)
        torch._foreach_add_(values, update.unbind())


def shape_scale(shape: torch.Size, scale: Scale) -> float:
    """What an orthogonal update of this shape is multiplied by."""
    rows, columns = shape
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
