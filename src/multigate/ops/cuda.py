"""How the one-pass CUDA kernels are cut, compiled and launched. What they share: cuda_kernels/."""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import nvrtc

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SHARED = 227 * 1024
"""Bytes of shared memory that a block of Hopper's may have."""
IN_FLIGHT = 72 * 1024
"""Bytes a multiprocessor should wait for: fewer leave memory idle, more disturb its order."""


@dataclass(frozen=True)
class Plan:
    """How the work is cut; team.cu explains the words. Results depend on it by rounding only."""

    warps: int
    teams: int
    slots: int
    """0: no ring, which the forward step can do without: a team has one token, and ends."""
    hold: bool
    registers: int = 0
    """The most that a thread of the forward step may have; 0: as many as the compiler likes."""


@dataclass(frozen=True)
class Problem:
    """What a kernel does: the numbers that decide how its work is cut."""

    n: int
    """Streams or sources."""
    width: int
    itemsize: int
    rows: int
    """Rows of a token that are read."""
    sums: int
    """Dot products of a token."""
    backward: bool
    saved: int = 0
    """Float32 numbers of a token that are read beside its rows."""

    def slot_bytes(self, warps: int) -> int:
        """Of one slab: a chunk of 16 bytes a thread and row."""
        return self.rows * warps * 512 + 4 * self.saved

    def static_bytes(self, warps: int, teams: int) -> int:
        """Shared memory of a block beside its rings, from above."""
        exchange = 128 * -(-self.sums // 32) + 4 + 32 * self.n
        return teams * (warps * exchange + 8 * 16) + 16

    def dynamic_bytes(self, cut: Plan) -> int:
        """Of a block's rings, in which the teams of a backward pass end by adding up."""
        ring = cut.teams * cut.slots * self.slot_bytes(cut.warps)
        return max(ring, cut.teams * self.gradient_bytes()) if self.backward else ring

    def gradient_bytes(self) -> int:
        """Of a team's sums of weight gradients, from above: three rows and a bias."""
        return 4 * (3 * self.width + self.n + 1)


@functools.cache
def plan(problem: Problem, shared: int = SHARED, warps: int | None = None) -> Plan | None:
    """A cut that was fast on an H200; None where a token does not fit into `shared` bytes.

    A thread has one chunk of a row where there are registers for that many warps, or as many as
    teams of so many `warps` need.
    """
    p = problem
    most = 16 if not p.backward or p.n <= 4 else 12 if p.n <= 8 else 8
    needed = -(-p.width * p.itemsize // 512)
    slabs = -(-needed // (warps or most))
    warps = warps or -(-needed // slabs)
    token = slabs * p.slot_bytes(warps)
    if p.backward:
        teams = min(most // warps, 15)
        if p.n > 8 and (warps, slabs) == (5, 1):
            # One team alone leaves memory idle. (Of six or seven warps it has not been timed.)
            teams = 2
        ahead = 2 if teams > 1 else 3
    else:
        tokens = max(round(IN_FLIGHT / token), 2)
        if warps > 4:
            teams = max(1, min(-(-tokens // 2), (20 if p.n <= 2 else most) // warps))
        else:
            teams = min(tokens, (32 if p.n <= 2 else 24) // warps, 15)
        ahead = max(tokens // teams, 2 if warps > 4 else 1)
    while teams:
        room = (shared - p.static_bytes(warps, teams)) // teams
        ahead = min(ahead, room // token, 4)
        if ahead and not (p.backward and room < p.gradient_bytes()):
            return Plan(warps, teams, ahead * slabs, hold=slabs == 1)
        teams, ahead = teams - 1, 1
    return None


def plan_on(device: torch.device, problem: Problem, warps: int | None = None) -> Plan | None:
    """`plan` for the shared memory that a device has."""
    return plan(problem, shared_memory(device), warps)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a block may have there."""
    return nvrtc.shared_memory(device.index) if device.type == "cuda" else SHARED


def suits(dtype: torch.dtype, width: int) -> bool:
    """Whether rows can be moved by chunks: known numbers, in whole 16 bytes."""
    size = torch.finfo(dtype).bits // 8
    return dtype in DTYPES and width > 0 and width * size % 16 == 0


def readable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Rows [tokens, C] of one stride where bulk copies can find them: copies, if they are not."""
    first = tensors[0]
    if first.stride(0) * first.element_size() % 16 or any(t.data_ptr() % 16 for t in tensors):
        return [ready(t) for t in tensors]
    return tensors


def ready(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, of a dtype and at a multiple of 16 bytes: a copy where it is not."""
    tensor = tensor.to(dtype or tensor.dtype).contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def weights(*tensors: Tensor | None) -> list[Tensor | None]:
    """Ready, in float32."""
    return [None if t is None else ready(t, torch.float32) for t in tensors]


def blocks(tokens: int, device: torch.device) -> int:
    """As many as run at once, if there are tokens for them."""
    return min(tokens, multiprocessors(device))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def source(folder: Path, *parts: str) -> str:
    """What all kernels share, then an op's own parts, of which the last is the pass itself."""
    everybody = Path(__file__).with_name("cuda_kernels")
    ends = {"forward": ["pooled"], "backward": ["finish"]}
    common = ["machine", "team", *ends.get(parts[-1].removesuffix("_many"), [])]
    files = [*(everybody / f"{c}.cu" for c in common), *(folder / f"{p}.cu" for p in parts)]
    return "".join(file.read_text() for file in files)


def compiled(
    device: torch.device,
    text: str,
    n: int,
    width: int,
    dtype: torch.dtype,
    cut: Plan,
    switches: Mapping[str, int],
) -> nvrtc.Module:
    """The kernels of a source for n rows of some width, on one device."""
    defines = {
        "N": n,
        "C": width,
        "DTYPE": DTYPES[dtype],
        "WARPS": cut.warps,
        "TEAMS": cut.teams,
        "SLOTS": cut.slots,
        "HOLD": int(cut.hold),
        "REGISTERS": cut.registers,
        **{name: int(on) for name, on in switches.items()},
    }
    return nvrtc.module(device, text, tuple(defines.items()))


@functools.cache
def _rows_type(n: int) -> type[ctypes.Structure]:
    fields = [("at", ctypes.c_uint64 * n), ("step", ctypes.c_int64)]
    return type("Rows", (ctypes.Structure,), {"_fields_": fields})


def rows(tensors: Sequence[Tensor | None], room: int = 0) -> ctypes.Structure:
    """n tensors [tokens, C] of one row stride as team.cu's Rows; None is a null pointer.

    `room`: the pointers that the structure has, if more than there are tensors.
    """
    made = _rows_type(max(room, len(tensors)))()
    made.at[: len(tensors)] = [0 if t is None else t.data_ptr() for t in tensors]
    present = [t for t in tensors if t is not None]
    made.step = present[0].stride(0) * present[0].element_size() if present else 0
    return made


def pointer(tensor: Tensor | None) -> ctypes.c_uint64:
    return ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())


class Pieces(ctypes.Structure):
    """finish.cu's: where the sums of the partials go."""

    _fields_ = (("at", ctypes.c_uint64 * 4), ("size", ctypes.c_int * 4))


def finish(
    kernel: nvrtc.Kernel, partials: Tensor, pieces: Sequence[tuple[Tensor | None, int]]
) -> None:
    """Add up the rows of `partials` into tensors of the given sizes; None leaves a piece out."""
    made = Pieces()
    for i, (tensor, size) in enumerate(pieces):
        made.at[i], made.size[i] = 0 if tensor is None else tensor.data_ptr(), size
    rows, columns = partials.shape
    arguments = [pointer(partials), made, ctypes.c_int(columns), ctypes.c_int(rows)]
    kernel.launch(-(-columns // 32), 256, arguments)
