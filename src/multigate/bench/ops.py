"""Measure the arms of an operation: check against the reference first, then time."""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from multigate.device import DTYPES

from .arms import Absent, Arm, Forward, Unsupported
from .cases import CASES, Case, Inputs, Size
from .timing import measure, own_stream, poison, sets_needed

Row = dict[str, Any]
CHECKED = 64
"""Tokens at either end that are compared with the reference."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Of ||a - b|| / ||b|| against float64; the paper's listing rounds between its lines."""


class Wrong(Exception):
    """An arm that computes something else than the reference."""


def measure_arm(
    arm: Arm,
    size: Size,
    passes: Sequence[str],
    device: torch.device,
    copy_gb_s: float,
    repeats: int = 100,
) -> Iterator[Row]:
    """A row for every pass; what fails has `error` in place of a time. `Absent` is the caller's."""
    for passed in passes:
        row: Row = {
            "case": arm.case,
            "pass": passed,
            "backend": arm.name,
            "n": size.n,
            "width": size.width,
            "tokens": size.tokens,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == size.dtype),
            "variant": size.variant if arm.case == "gate_pool" else None,
            "norm": size.norm,
        }
        try:
            if arm.kernel and device.type != "cuda":
                raise Unsupported("it needs a CUDA device.")
            # Donated buffers would let a compiled backward pass run only once.
            with (
                functorch.patch(donated_buffer=False),
                own_stream(device),
            ):
                us, how = time_pass(arm, size, passed, device, repeats)
            moved = CASES[arm.case].bytes_moved(size, passed)
            row |= {"us": us, "share_of_copy": moved / us / 1e3 / copy_gb_s, "timing": how}
        except Absent:
            raise
        except Exception as error:
            row["error"] = sentence(error)
        if arm.note:
            row["note"] = arm.note
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        yield row


def sentence(error: Exception) -> str:
    """The first line of an error, with its kind where the words alone would not say."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    if isinstance(error, Unsupported | Wrong | ValueError):
        return first
    return f"{type(error).__name__}: {first}"


def time_pass(
    arm: Arm, size: Size, passed: str, device: torch.device, repeats: int
) -> tuple[float, str]:
    case = CASES[arm.case]
    torch.manual_seed(0)
    sets = sets_needed(case.bytes_moved(size, passed), device)
    inputs = [case.inputs(size, device) for _ in range(sets)]
    forward = arm.prepare(inputs[0])
    if passed == "forward":
        check_forward(arm, case, forward, inputs[0])
        call = forward_call(forward, inputs)
    else:
        check_backward(arm, case, forward, inputs[0])
        call = backward_call(forward, inputs)
    return measure(call, sets, device, repeats)


def forward_call(forward: Forward, inputs: Sequence[Inputs]) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        with torch.no_grad():
            return forward(inputs[i])

    return call


def backward_call(forward: Forward, inputs: Sequence[Inputs]) -> Callable[[int], Any]:
    """The backward pass alone, through graphs that are made once and kept."""
    made = []
    for x in inputs:
        leaves = trainable(x)
        outputs = forward(leaves)
        made.append((outputs, leaves.leaves(), [torch.randn_like(o) for o in outputs]))

    def call(i: int) -> Any:
        outputs, leaves, gradients = made[i]
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)

    return call


def trainable(x: Inputs) -> Inputs:
    return x.mapped(lambda t: t.detach().requires_grad_(), lambda t: t.detach().requires_grad_())


def ends(x: Tensor) -> Tensor:
    """The first and the last rows: a kernel that goes wrong does so at the ends."""
    return x if len(x) <= 2 * CHECKED else torch.cat([x[:CHECKED], x[-CHECKED:]])


def exact(x: Inputs) -> Inputs:
    """The ends of `x` in float64."""
    return x.mapped(lambda t: ends(t.detach()).double(), lambda t: t.detach().double())


def check_forward(arm: Arm, case: Case, forward: Forward, x: Inputs) -> None:
    with torch.no_grad():
        poison(list(x.rows))
        outputs = forward(x)
        check_finite(outputs)
        if not arm.same:
            return
        for name, output, wanted in zip(
            ("h", "the new streams"), outputs, case.reference(exact(x)), strict=False
        ):
            compare(name, ends(output), wanted, x.size.dtype)


def check_backward(arm: Arm, case: Case, forward: Forward, x: Inputs) -> None:
    """With gradients that are zero but at the ends: so are the sums over all tokens known."""
    leaves, wanted_leaves = trainable(x), trainable(exact(x))
    outputs = forward(leaves)
    gradients = [torch.randn_like(o) for o in outputs]
    for g in gradients:
        g[CHECKED : max(CHECKED, len(g) - CHECKED)] = 0
    poison(leaves.leaves())
    found = torch.autograd.grad(outputs, leaves.leaves(), gradients, allow_unused=True)
    check_finite([g for g in found if g is not None])
    if not arm.same:
        return
    wanted = torch.autograd.grad(
        case.reference(wanted_leaves),
        wanted_leaves.leaves(),
        [ends(g).double() for g in gradients],
        allow_unused=True,
    )
    names = (*x.names, "norm_weight")
    for i, (name, a, b) in enumerate(zip(names, found, wanted, strict=False)):
        if a is not None and b is not None:
            compare(f"the gradient of {name}", ends(a) if i < len(x.rows) else a, b, x.size.dtype)
        elif b is not None and bool(b.any()):
            raise Wrong(f"there is no gradient of {name}.")


def check_finite(tensors: Sequence[Tensor]) -> None:
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise Wrong("a result is not finite.")


def compare(name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Raise `Wrong` unless ||found - wanted|| <= tolerance ||wanted||; NaN is wrong, too."""
    tolerance = TOLERANCE[dtype]
    difference = float((found.double() - wanted).norm())
    size = float(wanted.norm())
    if not difference <= tolerance * size:
        ratio = difference / size if size else difference
        raise Wrong(f"{name} is off by {ratio:.1e}, and {tolerance:.0e} is allowed: not timed.")
