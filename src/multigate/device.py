"""What to train on and how: device, precision and compilation, each with the reason for it."""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gpt import GPTConfig

# Dense bf16/fp16 matrix products of the datasheets, in FLOP/s; the first name that fits counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Compute:
    """The choices of a run."""

    device: torch.device
    precision: str
    compile: bool
    reasons: tuple[str, ...]
    """One line for each choice, for the person who watches."""

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def peak_flops(self) -> float | None:
        """Of the device in this precision, where it is known."""
        if self.device.type != "cuda" or self.precision == "fp32":
            return None
        name = torch.cuda.get_device_name(self.device)
        return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def choose(
    device: str = "auto", precision: str = "auto", compile: str = "auto", local_rank: int = 0
) -> Compute:
    """Resolve "auto"; what was asked for and cannot be had is one sentence."""
    reasons = list[str]()
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        device = next(name for name, there in available.items() if there)
        reasons.append(f"device {device}: the best there is on this machine")
    elif not available[device]:
        raise ValueError(f"this machine has no {device} device: use --device auto or cpu.")
    bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        # MPS is untested: float32 is what every operation has there.
        precision = "bf16" if bf16 else "fp16" if device == "cuda" else "fp32"
        why = {
            "bf16": "the GPU has it",
            "fp16": "the GPU has no bf16; the loss is scaled",
            "fp32": f"on {device} lower precision is slower or untested",
        }
        reasons.append(f"precision {precision}: {why[precision]}")
    chosen = torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)
    compiles = compile == "on" or (compile == "auto" and device == "cuda")
    if compile == "auto":
        why_compile = "it pays on a GPU" if compiles else "starting takes longer than it saves here"
        reasons.append(f"torch.compile {'on' if compiles else 'off'}: {why_compile}")
    return Compute(chosen, precision, compiles, tuple(reasons))


def compiled(model: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Any]:
    """`model` compiled; if its compilation fails, the model as it is, said aloud."""
    forward: Callable[..., Any] = torch.compile(model, dynamic=False)
    proven = False

    def call(*args: Any) -> Any:
        nonlocal forward, proven
        if proven:
            return forward(*args)
        try:
            out = forward(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines() or [""]
            say(f"torch.compile failed ({type(error).__name__}: {first[0]}): going on without it")
            forward = model
            out = model(*args)
        proven = True
        return out

    return call


def flops_per_token(config: GPTConfig, parameters: int) -> float:
    """Of forward and backward: 6 a parameter, and 6 D T a block for causal attention's products."""
    return 6.0 * parameters + 6.0 * config.blocks * config.width * config.context


class LossScale:
    """Keeps float16 gradients in range: halved when one is not finite, doubled after `patience`
    good steps. All on the device, without waiting for it."""

    HALVINGS = 16
    """How often it can be halved from where it starts: so many bad steps need not be a fault."""

    def __init__(self, device: torch.device, patience: int = 1000) -> None:
        self.patience = patience
        self.scale = torch.tensor(2.0**self.HALVINGS, device=device)
        self.good = torch.zeros((), device=device)

    def unscale_(self, gradients: list[Tensor]) -> None:
        torch._foreach_mul_(gradients, 1 / self.scale)

    def update(self, found_inf: Tensor) -> None:
        bad = found_inf > 0
        self.good = torch.where(bad, 0.0, self.good + 1)
        grow = self.good >= self.patience
        factor = torch.where(bad, 0.5, torch.where(grow, 2.0, 1.0))
        self.scale = (self.scale * factor).clamp(1.0, 2.0**24)
        self.good = torch.where(grow, 0.0, self.good)

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale.scale": self.scale, "loss_scale.good": self.good}


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the CPU and when it will be there: later steps need not be waited for."""
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready


def memory(device: torch.device) -> float | None:
    """The most bytes in use so far, on the GPU or by this process; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


def versions() -> dict[str, str]:
    from . import __version__

    return {"multigate": __version__, "torch": str(torch.__version__), "host": platform.platform()}
