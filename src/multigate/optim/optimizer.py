"""Muon and AdamW as one optimizer, with the learning rate's course, the clip, and named state."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .config import OptimConfig, learning_rate_share
from .groups import parameter_groups
from .muon import Muon
from .sharded import assign, global_norm, is_sharded, local

FUSED = ("cpu", "cuda")
"""Devices on which torch's fused AdamW leaves a step out without waiting for the reason."""


class Optimizer:
    """Muon on the matrices of the sublayers, AdamW on everything else.

    Made by `build_optimizer`. A step of training:

        optimizer.zero_grad()
        loss.backward()
        optimizer.set_step(step)
        norm = optimizer.clip()
        optimizer.step(not_finite(norm))

    Model and optimizer are left alone by a step whose gradients are not finite; nothing above
    waits for the device.
    """

    def __init__(
        self,
        groups: dict[str, dict[str, nn.Parameter]],
        config: OptimConfig,
        steps: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.steps = config, steps
        self.parameters = {name: p for group in groups.values() for name, p in group.items()}
        self.muon = _muon(groups["muon"], config, dtype)
        self.adamw = _adamw(groups["decayed"], groups["undecayed"], config)
        self.set_step(0)

    def set_step(self, step: int) -> float:
        """Set the learning rates for `step` of the run; the share of their peaks that they are."""
        share = learning_rate_share(step, self.steps, self.config.warmup, self.config.floor)
        self.set_share(share)
        return share

    def set_share(self, share: float) -> None:
        """Set both learning rates to this share of their peaks."""
        for optimizer, peak in (
            (self.muon, self.config.lr_muon),
            (self.adamw, self.config.lr_adamw),
        ):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = peak * share

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Shrink all gradients by one factor if their norm is above `clip`; the norm before.

        A norm that is not finite leaves them as they are: the step is to be left out.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = global_norm(gradients)
        if self.config.clip > 0 and gradients:
            factor = (self.config.clip / (norm + 1e-6)).clamp(max=1.0)
            factor = factor.masked_fill(~norm.isfinite(), 1.0)
            torch._foreach_mul_([local(g) for g in gradients], factor)
        return norm

    def step(self, found_inf: Tensor | None = None) -> None:
        """One step of both; if `found_inf` is not 0, parameters and state stay as they are."""
        if self.muon is not None:
            self.muon.step(found_inf)
        if self.adamw is not None:
            _step_adamw(self.adamw, found_inf)

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """All state as `momentum.<parameter>`, `exp_avg.<parameter>` and so on; not copies."""
        return dict(self._state())

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over a state of the same names and shapes, sharded in whatever way."""
        own = self.state()
        for names, what in ((own.keys() - state, "lacks"), (state.keys() - own, "has")):
            if names:
                raise ValueError(
                    f"this optimizer state {what} {min(names)!r}"
                    f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}, unlike the "
                    "optimizer it is loaded into: build model and optimizer with the settings it "
                    "was saved with."
                )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the optimizer state {name!r} has shape {tuple(state[name].shape)} but the "
                    f"model needs {tuple(tensor.shape)}: build the model with the settings it was "
                    "saved with."
                )
        for name, tensor in own.items():
            assign(tensor, state[name])

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.parameters.items():
            for optimizer in (self.muon, self.adamw):
                if optimizer is not None and p in optimizer.state:
                    for kind, tensor in optimizer.state[p].items():
                        yield f"{kind}.{name}", tensor


def build_optimizer(
    model: nn.Module, config: OptimConfig, steps: int, dtype: torch.dtype | None = None
) -> Optimizer:
    """The optimizer of `model` for a run of `steps`; `dtype` is that of `orthogonalise`.

    Hand in the model itself, after it was moved to its device and sharded.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"build_optimizer: steps must be a whole number of at least 1, got {steps!r}."
        )
    return Optimizer(parameter_groups(model, config.muon), config, steps, dtype)


def not_finite(norm: Tensor) -> Tensor:
    """1.0 if the norm of the gradients is infinite or NaN, else 0.0: `found_inf` for the step."""
    return (~norm.isfinite()).float()


def _muon(
    matrices: dict[str, nn.Parameter], config: OptimConfig, dtype: torch.dtype | None
) -> Muon | None:
    if not matrices:
        return None
    return Muon(
        matrices.values(),
        lr=config.lr_muon,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        method=config.method,
        scale=config.scale,
        dtype=dtype,
    )


def _adamw(
    decayed: dict[str, nn.Parameter], undecayed: dict[str, nn.Parameter], config: OptimConfig
) -> torch.optim.AdamW | None:
    """AdamW with its state made at once. Sharded and whole tensors do not mix within a group."""
    groups = []
    for params, decay in ((decayed, config.weight_decay), (undecayed, 0.0)):
        for sharded in (False, True):
            members = [p for p in params.values() if is_sharded(p) == sharded]
            if members:
                groups.append({"params": members, "weight_decay": decay})
    if not groups:
        return None
    fused = all(p.device.type in FUSED for p in (*decayed.values(), *undecayed.values()))
    betas = (float(config.beta1), float(config.beta2))
    adamw = torch.optim.AdamW(groups, lr=config.lr_adamw, betas=betas, eps=config.eps, fused=fused)
    for group in adamw.param_groups:
        for p in group["params"]:
            adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return adamw


def _step_adamw(adamw: torch.optim.AdamW, found_inf: Tensor | None) -> None:
    if adamw.param_groups[0]["fused"]:
        # Where torch's own GradScaler puts it; the kernel compares it with 1.
        adamw.found_inf = None if found_inf is None else (found_inf != 0).float()  # type: ignore[attr-defined]
        adamw.step()
    elif found_inf is None or not found_inf.item():
        adamw.step()
