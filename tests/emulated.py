"""The CUDA kernels on a CPU: compiled by g++ with cuda_on_cpu.h in place of machine.cu."""

import ctypes
import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
EAGER = ctypes.c_bool


class Kernel:
    """Stands in for `nvrtc.Kernel`."""

    def __init__(self, library, name, shared, eager):
        self._run = getattr(library, f"run_{name}")
        self._eager = EAGER.in_dll(library, "copies_are_eager")
        self._shared = shared
        self._wanted = eager

    def launch(self, grid, block, arguments):
        self._eager.value = self._wanted
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._run(grid, block, self._shared, pointers)


class Module:
    """Stands in for `nvrtc.Module`."""

    def __init__(self, library, eager):
        self._library = library
        self._eager = eager

    def kernel(self, name, shared):
        return Kernel(self._library, name, shared, self._eager)


def compiler(folder, eager):
    """Stands in for `nvrtc.module`; libraries are kept in `folder`."""

    def module(device, source, defines):
        text = (HERE / "cuda_on_cpu.h").read_text() + "\n"
        text += "".join(f"#define {name} {value}\n" for name, value in defines)
        text += source[source.index("// What the one-pass kernels share") :]
        text += 'extern "C" { bool copies_are_eager; }\n'
        for name in re.findall(r'extern "C" __global__ void .*?(\w+)\(const', source, re.DOTALL):
            text += (
                f'extern "C" void run_{name}(int blocks, int threads, int shared, void **given) {{'
                f" eager = copies_are_eager; run({name}, blocks, threads, shared, given); }}\n"
            )
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        library = folder / f"{name}.so"
        if not library.exists():
            made = folder / f"{name}.cpp"
            made.write_text(text)
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
            subprocess.run([*command, str(made), "-o", str(library)], check=True)
        return Module(ctypes.CDLL(str(library)), eager)

    return module
