"""How the CUDA kernels of the Multi-Gate step (cuda_kernels/*.cu) are cut and launched."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from multigate.ops import nvrtc

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SHARED = 227 * 1024
"""Bytes of shared memory a block may have."""
IN_FLIGHT = 72 * 1024
"""Bytes a multiprocessor should wait for: fewer leave memory idle, more disturb its order."""


@dataclass(frozen=True)
class Plan:
    """How the work is cut; common.cu explains the words. Results depend on it by rounding only."""

    warps: int
    teams: int
    slots: int
    hold: bool


def rows_read(n: int, backward: bool, grad_streams: bool, grad_h: bool) -> int:
    """Rows of a token that a kernel reads."""
    return n + 1 + (n * grad_streams + grad_h if backward else 0)


def slot_bytes(n: int, rows: int, warps: int, backward: bool) -> int:
    return rows * warps * 512 + (4 * (4 * n + 4) if backward else 0)


def static_bytes(n: int, warps: int, teams: int, backward: bool) -> int:
    """Shared memory of a block beside its rings, from above."""
    groups = -(-(4 * n + 2) // 32)
    return teams * (warps * (256 * groups + 8 + n * (32 if backward else 8)) + 8 * 16 + 4 * n + 8)


def dynamic_bytes(n: int, width: int, rows: int, cut: Plan, backward: bool) -> int:
    """Shared memory of a block's rings, in which the teams of a backward pass end by adding up."""
    ring = cut.teams * cut.slots * slot_bytes(n, rows, cut.warps, backward)
    return max(ring, cut.teams * 12 * width) if backward else ring


@functools.cache
def plan(n: int, width: int, itemsize: int, backward: bool, rows: int) -> Plan | None:
    """A cut that was fast on an H200; None where a token does not fit into shared memory.

    A thread has one chunk of a row where there are registers for that many warps.
    """
    most = 16 if not backward or n <= 4 else 12 if n <= 8 else 8
    needed = -(-width * itemsize // 512)
    slabs = -(-needed // most)
    warps = -(-needed // slabs)
    token = slabs * slot_bytes(n, rows, warps, backward)
    if backward:
        teams = 12 // warps if 12 % warps == 0 and most > 8 else most // warps
        ahead = 2 if teams > 1 else 3
    else:
        tokens = max(round(IN_FLIGHT / token), 2)
        teams = min(tokens, 24 // warps, 15)
        if warps > 4:
            teams = max(1, min(-(-tokens // 2), most // warps))
        ahead = max(tokens // teams, 2 if warps > 4 else 1)
    while teams:
        room = (SHARED - static_bytes(n, warps, teams, backward)) // teams
        ahead = min(ahead, room // token, 4)
        if ahead and not (backward and room < 12 * width):
            return Plan(warps, teams, ahead * slabs, hold=slabs == 1)
        teams, ahead = teams - 1, 1
    return None


def takes(y: Tensor, streams: Sequence[Tensor]) -> bool:
    """Whether these kernels do this problem: rows of whole chunks, aligned, of one dtype."""
    n, width, itemsize = len(streams), y.shape[1], y.element_size()
    rows = rows_read(n, True, True, True)
    return (
        y.dtype in DTYPES
        and y.dtype == streams[0].dtype
        and width * itemsize % 16 == 0
        and y.data_ptr() % 16 == 0
        and streams[0].stride(0) * itemsize % 16 == 0
        and all(s.data_ptr() % 16 == 0 for s in streams)
        and plan(n, width, itemsize, True, rows) is not None
    )


def forward(
    y: Tensor,
    streams: Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [tokens, C], new streams [tokens, n, C] and the saved dot products of flattened inputs."""
    n, (tokens, width) = len(streams), y.shape
    h = torch.empty_like(y)
    new_streams = y.new_empty(tokens, n, width)
    saved = y.new_empty(tokens, 4 * n + 4, dtype=torch.float32)
    if tokens == 0:
        return h, new_streams, saved
    rows = rows_read(n, False, False, False)
    cut = cut or _plan(n, y, False, rows)
    switches = (competitive, norm_weight is not None, False, False)
    kernel, _ = _kernels(y.device.index, n, width, y.dtype, False, rows, cut, switches)
    arguments = [
        _rows(streams),
        *map(_pointer, (y, w_gate, w_pool, bias, norm_weight, h, new_streams, saved)),
        ctypes.c_int64(tokens),
        ctypes.c_float(eps),
    ]
    kernel.launch(_blocks(y, cut), 32 * cut.warps * cut.teams, arguments)
    return h, new_streams, saved


def backward(
    grad_h: Tensor | None,
    grad_streams: Tensor | None,
    y: Tensor,
    streams: Sequence[Tensor],
    w_gate: Tensor,
    w_pool: Tensor,
    bias: Tensor,
    norm_weight: Tensor | None,
    saved: Tensor,
    competitive: bool,
    eps: float,
    cut: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of y, the streams (packed) and, in float32, of the weights."""
    n, (tokens, width) = len(streams), y.shape
    dy = torch.empty_like(y)
    dstreams = y.new_empty(tokens, n, width)
    weights = (w_gate, w_pool, bias, norm_weight)
    if tokens == 0:
        zeros = [None if w is None else torch.zeros_like(w) for w in weights]
        return dy, dstreams, *zeros  # type: ignore[return-value]
    dw_gate, dw_pool, dbias = map(torch.empty_like, weights[:3])
    dnorm = None if norm_weight is None else torch.empty_like(norm_weight)
    rows = rows_read(n, True, grad_streams is not None, grad_h is not None)
    cut = cut or _plan(n, y, True, rows)
    switches = (
        competitive,
        norm_weight is not None,
        grad_streams is not None,
        grad_h is not None,
    )
    kernel, finish = _kernels(y.device.index, n, width, y.dtype, True, rows, cut, switches)
    blocks = _blocks(y, cut)
    columns = 3 * width + len(bias)
    partials = y.new_empty(blocks, columns, dtype=torch.float32)
    arguments = [
        _rows(streams),
        *map(_pointer, (y, grad_streams, grad_h, *weights, saved, dstreams, dy, partials)),
        ctypes.c_int64(tokens),
        ctypes.c_float(eps),
    ]
    kernel.launch(blocks, 32 * cut.warps * cut.teams, arguments)
    sums = [*map(_pointer, (partials, dw_gate, dw_pool, dnorm, dbias)), ctypes.c_int(blocks)]
    finish.launch(-(-columns // 32), 256, sums)
    return dy, dstreams, dw_gate, dw_pool, dbias, dnorm


def _plan(n: int, y: Tensor, backward: bool, rows: int) -> Plan:
    found = plan(n, y.shape[1], y.element_size(), backward, rows)
    assert found is not None, "takes() has refused what does not fit"
    return found


def _blocks(y: Tensor, cut: Plan) -> int:
    return min(y.shape[0], _multiprocessors(y.device.index))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _source(name: str) -> str:
    folder = Path(__file__).with_name("cuda_kernels")
    return "".join((folder / f"{part}.cu").read_text() for part in ("common", name))


@functools.cache
def _kernels(
    device: int,
    n: int,
    width: int,
    dtype: torch.dtype,
    backward: bool,
    rows: int,
    cut: Plan,
    switches: tuple[bool, bool, bool, bool],
) -> tuple[nvrtc.Kernel, nvrtc.Kernel]:
    """The compiled kernel of a pass, and the one that adds up its weight gradients."""
    name = "backward" if backward else "forward"
    defines = {
        "N": n,
        "C": width,
        "DTYPE": DTYPES[dtype],
        "WARPS": cut.warps,
        "TEAMS": cut.teams,
        "SLOTS": cut.slots,
        "HOLD": int(cut.hold),
    }
    names = ("COMPETITIVE", "NORM", "GRAD_STREAMS", "GRAD_H")
    defines |= {switch: int(on) for switch, on in zip(names, switches, strict=True)}
    capability = torch.cuda.get_device_capability(device)
    module = nvrtc.Module(nvrtc.compile_cubin(_source(name), defines, capability))
    kernel = module.kernel(name, dynamic_bytes(n, width, rows, cut, backward))
    return kernel, module.kernel("finish", 0) if backward else kernel


@functools.cache
def _rows_type(n: int) -> type[ctypes.Structure]:
    fields = [("at", ctypes.c_uint64 * n), ("step", ctypes.c_int64)]
    return type("Rows", (ctypes.Structure,), {"_fields_": fields})


def _rows(streams: Sequence[Tensor]) -> ctypes.Structure:
    rows = _rows_type(len(streams))()
    rows.at[:] = [s.data_ptr() for s in streams]
    rows.step = streams[0].stride(0) * streams[0].element_size()
    return rows


def _pointer(tensor: Tensor | None) -> ctypes.c_uint64:
    return ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())
