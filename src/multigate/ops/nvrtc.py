"""CUDA C++ compiled at first use, by NVRTC, which every CUDA build of torch brings along."""

import ctypes
import functools
import site
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Argument = Any
"""A ctypes value: a number, or an array or structure passed by value."""


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    name = f"libnvrtc.so.{major}"
    wheels = [p for s in site.getsitepackages() for p in Path(s).glob(f"nvidia/*/lib/{name}")]
    for candidate in (name, *map(str, wheels), "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise OSError(f"{name} was not found")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def why_not(capability: tuple[int, int]) -> str | None:
    """What keeps kernels for a GPU from being compiled here; None where nothing does."""
    try:
        nvrtc = _nvrtc()
        _driver()
    except OSError as error:
        return f"cannot be compiled ({error})"
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    number = 10 * capability[0] + capability[1]
    if number not in known:
        return f"cannot be compiled (torch's NVRTC does not know sm_{number})"
    return None


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {what} failed: {(text.value or b'?').decode()}.")


def shared_memory(device: int) -> int:
    """The most bytes of shared memory that a block may ask for."""
    found, max_shared_memory_per_block_optin = ctypes.c_int(), 97
    status = _driver().cuDeviceGetAttribute(
        ctypes.byref(found), max_shared_memory_per_block_optin, device
    )
    _check(status, "asking for the size of the shared memory")
    return found.value


def compile_cubin(source: str, defines: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Machine code of `source` for one kind of GPU, with the macros `defines` set."""
    nvrtc = _nvrtc()
    options = [f"-D{name}={value}".encode() for name, value in defines.items()]
    options += [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"-std=c++17"]
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        lines = log.value.decode().strip().splitlines()
        # Warnings may come before it.
        why = next((line for line in lines if "error" in line), f"error {failed} of NVRTC")
        raise RuntimeError(f"a CUDA kernel could not be compiled: {why}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _have_context() -> None:
    """Make torch's context current: a new thread, such as autograd's, may not have one yet."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        device = torch.cuda.current_device()
        retained = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _check(retained, "finding the context")
        _check(_driver().cuCtxSetCurrent(context), "setting the context")


class Module:
    """Compiled kernels, loaded on the current device."""

    def __init__(self, cubin: bytes) -> None:
        _have_context()
        self._module = ctypes.c_void_p()
        # Loading is no part of a graph that may be under capture.
        relaxed = ctypes.c_int(2)
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
        loaded = _driver().cuModuleLoadData(ctypes.byref(self._module), cubin)
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
        _check(loaded, "loading a kernel")

    def kernel(self, name: str, shared: int) -> "Kernel":
        """The kernel called `name`, with `shared` bytes of dynamic shared memory."""
        function = ctypes.c_void_p()
        found = _driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _check(found, f"finding the kernel {name}")
        return Kernel(function, shared)


def module(device: torch.device, source: str, defines: tuple[tuple[str, int], ...]) -> Module:
    """Compile a source for a device, which must be the current one, and load it."""
    return Module(compile_cubin(source, dict(defines), torch.cuda.get_device_capability(device)))


class Kernel:
    """One kernel, to be launched on the current stream."""

    def __init__(self, function: ctypes.c_void_p, shared: int) -> None:
        self._function = function
        self._shared = shared
        max_dynamic_shared_size = 8
        status = _driver().cuFuncSetAttribute(function, max_dynamic_shared_size, shared)
        _check(status, f"asking for {shared} bytes of shared memory")

    def launch(self, grid: int, block: int, arguments: Sequence[Argument]) -> None:
        _have_context()
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, grid, 1, 1, block, 1, 1, self._shared, stream, pointers, None
        )
        _check(status, "launching a kernel")
