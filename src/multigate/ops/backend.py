"""Which implementation of an operation runs: the readable one in torch, or a fused kernel."""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

from multigate.names import unknown

from . import nvrtc

BACKENDS = ("auto", "torch", "triton", "cuda")
VARIABLE = "MULTIGATE_BACKEND"
"""The environment variable that stands in for the argument `backend` where that is "auto"."""
P = ParamSpec("P")
R = TypeVar("R")
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")

logger = logging.getLogger("multigate")
_assumed: ContextVar[str | None] = ContextVar("assumed", default=None)


def at_trace_time(function: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.compile calls while it traces, taking the answer for a constant.

    This is `torch.compiler.assume_constant_result`, which would import the compiler to leave the
    same mark: seconds for everybody who imports multigate.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@at_trace_time
def choose(
    op: str, kernels: tuple[str, ...], requested: str, device: str, index: int | None, dtype: str
) -> str:
    """The backend of `op` for tensors of a dtype on a device; `kernels` by preference.

    A kernel that is asked for and cannot run gives way to the next that can, and those to torch.
    What was chosen and why is said once. Words and numbers alone, so that torch.compile asks at
    trace time.
    """
    assumed = _assumed.get()
    if assumed is not None:
        # Where CUDA's kernels run, Triton's do too.
        runs = ("cuda", "triton") if assumed == "cuda" else (assumed,)
        able = [kernel for kernel in runs if kernel in kernels and dtype in DTYPES]
        return able[0] if able else "torch"
    wanted = requested if requested != "auto" else os.environ.get(VARIABLE, "auto")
    if wanted not in BACKENDS:
        raise ValueError(unknown("backend", wanted, BACKENDS))
    if wanted == "torch" or device == "meta" or (wanted == "auto" and device == "cpu"):
        return "torch"
    reasons: list[str] = []
    order = sorted(kernels, key=lambda kernel: kernel != wanted)
    for kernel in order:
        reason = why_not(kernel, device, index, dtype)
        if reason is None:
            expected = wanted in ("auto", kernel)
            say(op, kernel, "; ".join(reasons) or "fused kernels can run here", expected)
            return kernel
        reasons.append(f"{kernel} {reason}")
    say(op, "torch", "; ".join(reasons), False)
    return "torch"


@contextmanager
def assuming(backend: str) -> Iterator[None]:
    """Take it that `backend` runs, where it has a kernel for the dtype: for shapes without data.

    A kernel's operator has a stand-in that says what it would return, so that what a GPU keeps can
    be counted without one.
    """
    token = _assumed.set(backend)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def why_not(kernel: str, device: str, index: int | None, dtype: str) -> str | None:
    """What keeps a kind of kernel from running, None if nothing does."""
    if dtype not in DTYPES:
        return f"has no kernel for {dtype}"
    if kernel == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device != "cuda" and not (device == "cpu" and interpreted):
            return f"does not run on {device}"
        return (
            None if find_spec("triton") else "is not installed (pip install 'multigate[kernels]')"
        )
    if device != "cuda":
        return f"does not run on {device}"
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(index)
    if capability < (9, 0):
        return "needs a GPU of compute capability 9.0 or more"
    return nvrtc.why_not(capability)


def instead(op: str, why: str) -> None:
    """Say that Triton does what `op`'s CUDA kernels do not take, or that it is not there."""
    if find_spec("triton") is None:
        raise RuntimeError(
            f"{op}: {why}; this call is another, and Triton, which takes it, is not installed: pip "
            f"install triton, or set {VARIABLE}=torch."
        )
    say(op, "triton", why, False)


@functools.cache
def say(op: str, backend: str, why: str, expected: bool) -> None:
    """One line a choice: a note, or a warning where it is not what was asked for."""
    logger.log(logging.INFO if expected else logging.WARNING, "%s by %s: %s", op, backend, why)
