"""Who is measured: the ways to compute an operation, each under the name its rows carry."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigate.ops import depth_pool, gate_pool
from multigate.ops.backend import why_not
from multigate.ops.depth_pool import cuda as depth_pool_cuda
from multigate.ops.gate_pool import cuda as gate_pool_cuda

from .cases import CASES, EPS, Inputs
from .listing import listing

NOT_TAKEN = "the CUDA kernel does not take this size: Triton's would run."
Forward = Callable[[Inputs], tuple[Tensor, ...]]


class Unsupported(Exception):
    """An arm that cannot do this problem; its message is one sentence."""


class Absent(Exception):
    """An arm whose package is not installed: it has no row."""


@dataclass(frozen=True)
class Arm:
    """One way to compute a case.

    `prepare` is called once for a problem and gives the function to be measured, whose outputs
    autograd can go back through.
    """

    case: str
    name: str
    prepare: Callable[[Inputs], Forward]
    kernel: bool = True
    """Whether it needs a GPU."""
    same: bool = True
    """Whether it computes what the reference does; if not, its outputs need only be finite."""
    note: str = ""
    """How its work differs."""


_ARMS: dict[tuple[str, str], Arm] = {}


def register(arm: Arm) -> Arm:
    """Make an arm known; one of the same case and name is replaced."""
    if arm.case not in CASES:
        raise ValueError(f"the arm {arm.name!r} names no case: use one of {', '.join(CASES)}.")
    _ARMS[arm.case, arm.name] = arm
    return arm


def arms(case: str) -> list[Arm]:
    """Those of a case, in the order they were registered."""
    return [arm for (of, _), arm in _ARMS.items() if of == case]


def load_rivals(folder: Path, say: Callable[[str], object] = print) -> None:
    """The arms that live outside the package: `folder`/paper_fusion.py and peers.py, if there."""
    for name in ("paper_fusion", "peers"):
        path = folder / f"{name}.py"
        if name in sys.modules or not path.exists():
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, "a file that exists has a spec"
        assert spec.loader is not None, "and a Python file a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            del sys.modules[name]
            say(f"{path} is left out: it needs the package {error.name}.")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for exactly this problem."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def eager(case: str) -> Callable[[Inputs], Forward]:
    return lambda x: CASES[case].reference


def compiled_listing(x: Inputs) -> Forward:
    if x.norm_weight is not None:
        raise Unsupported("the paper's listing has no norm after the pool.")
    step = compiled(listing)

    def forward(x: Inputs) -> tuple[Tensor, ...]:
        y, streams = (t.unsqueeze(0) for t in x.rows)
        h, new = step(y, streams, *x.weights, x.size.variant, EPS)
        return h.squeeze(0), new.squeeze(0)

    return forward


def compiled_depth_pool(x: Inputs) -> Forward:
    from multigate.ops.depth_pool.reference import depth_pool as reference

    pool = compiled(reference)
    return lambda x: (pool(x.rows, x.weights[0], 1.0, x.norm_weight, EPS),)


def check_backend(backend: str, x: Inputs) -> None:
    """Refuse where the operation would fall back: a row names the kernel that has run."""
    device = x.rows[0].device
    words = (device.type, device.index, str(x.size.dtype))
    reason = None if backend == "torch" else why_not(backend, *words)
    if reason is not None:
        raise Unsupported(f"{backend} {reason}.")


def our_gate_pool(backend: str) -> Callable[[Inputs], Forward]:
    def forward(x: Inputs) -> tuple[Tensor, ...]:
        y, streams = x.rows
        w_gate, w_pool, bias = x.weights
        return gate_pool(
            y, streams, w_gate, w_pool, bias, x.size.variant, x.norm_weight, EPS, backend=backend
        )

    def prepare(x: Inputs) -> Forward:
        check_backend(backend, x)
        if backend == "cuda" and not gate_pool_cuda.takes(x.rows[0], x.rows[1].unbind(1)):
            raise Unsupported(NOT_TAKEN)
        return forward

    return prepare


def our_depth_pool(backend: str) -> Callable[[Inputs], Forward]:
    def forward(x: Inputs) -> tuple[Tensor, ...]:
        h = depth_pool(x.rows, x.weights[0], norm_weight=x.norm_weight, eps=EPS, backend=backend)
        return (h,)

    def prepare(x: Inputs) -> Forward:
        check_backend(backend, x)
        if backend == "cuda" and not depth_pool_cuda.takes(x.rows):
            raise Unsupported(NOT_TAKEN)
        return forward

    return prepare


register(Arm("gate_pool", "reference", eager("gate_pool"), kernel=False))
register(Arm("gate_pool", "torch", our_gate_pool("torch"), kernel=False))
register(Arm("gate_pool", "compile", compiled_listing))
register(Arm("gate_pool", "triton", our_gate_pool("triton")))
register(Arm("gate_pool", "cuda", our_gate_pool("cuda")))
register(Arm("depth_pool", "reference", eager("depth_pool"), kernel=False))
register(Arm("depth_pool", "torch", our_depth_pool("torch"), kernel=False))
register(Arm("depth_pool", "compile", compiled_depth_pool))
register(Arm("depth_pool", "triton", our_depth_pool("triton")))
register(Arm("depth_pool", "cuda", our_depth_pool("cuda")))
