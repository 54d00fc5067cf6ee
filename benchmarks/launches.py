"""Which launch of gate_pool's Triton kernels is the fastest on this GPU.

    python benchmarks/launches.py --streams 4 8 --widths 768 1024 --best 5

Tries warps, tokens a program, registers, one program for every block of tokens or a few that stay,
and tokens kept on the chip or read twice, and prints the fastest beside the one that is used. The
kernels are compiled in as many processes as there are cores.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import torch

from multigate.bench.cases import CASES, EPS, Size, gate_inputs
from multigate.bench.timing import copy_gb_s, measure, own_stream, sets_needed
from multigate.ops.gate_pool import triton as kernels

SHAPES = ((1, 1), (2, 2), (4, 4), (2, 1), (4, 1), (8, 1))
"""Warps of a program, and its tokens."""
REGISTERS = (None, 128, 80)
STAGES = (1, 2)
"""Tokens on their way to a program that stays, this one included."""
MOST_HELD = 320
"""Numbers of a token that a thread may hold; with more the compiler would spill them."""
FEW = 64
"""Tokens of the call that compiles."""


def candidates(passed, n, width):
    """Fields of `Launch`, the launch in use first."""
    yield {}
    for (warps, tokens), keep, registers in product(SHAPES, (False, True), REGISTERS):
        lanes = 32 * warps // tokens
        if 8 * lanes > 2 * width or (keep and n * width > MOST_HELD * lanes):
            continue
        resident = max(1, (65536 // 32 // (registers or 128)) // warps)
        # Backward, each program writes its share of the gradients of the weights.
        everywhere = ((kernels.EVERY_BLOCK, 1),) if passed == "forward" else ()
        for programs, stages in (*everywhere, *((resident, stages) for stages in STAGES)):
            yield {
                "warps": warps,
                "block": tokens,
                "keep": keep,
                "programs": programs,
                "stages": stages,
                "max_registers": registers,
            }


class Problem:
    """Inputs of one size, and the passes with a launch of our choice."""

    def __init__(self, size, device):
        moved = CASES["gate_pool"].bytes_moved(size, "forward")
        self.inputs = [gate_inputs(size, device) for _ in range(sets_needed(moved, device))]
        self.saved = [self.forward(i, None) for i in range(len(self.inputs))]
        self.grads = [[torch.randn_like(t) for t in made[:2]] for made in self.saved]

    def forward(self, i, launch):
        x = self.inputs[i]
        y, streams = x.rows
        return kernels.forward(y, streams.unbind(1), *x.weights, None, True, EPS, launch)

    def backward(self, i, launch):
        x = self.inputs[i]
        y, streams = x.rows
        rest = (*x.weights, None, self.saved[i][2], True, EPS, launch)
        return kernels.backward(*self.grads[i], y, streams.unbind(1), *rest)

    def run(self, passed, launch, i):
        return self.forward(i, launch) if passed == "forward" else self.backward(i, launch)


def compiles(task):
    """None, or why not. Triton keeps what it compiles on disk, where others find it."""
    passed, n, width, launch = task
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    problem = Problem(Size(n, width, FEW), device)
    try:
        results = zip(problem.run(passed, launch, 0), problem.run(passed, None, 0), strict=True)
        for a, b in results:
            if a is not None:
                torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    except Exception as error:
        return str(error).strip().splitlines()[0][:100]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024, 1280, 2048, 4096])
    parser.add_argument("--passes", nargs="+", default=["forward"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--best", type=int, default=5)
    told = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none here.")
    device = torch.device("cuda", 0)
    sizes = list(product(told.passes, told.streams, told.widths))
    tasks = [(*size, launch) for size in sizes for launch in candidates(*size)]
    print(f"compiling {len(tasks)} kernels in {os.cpu_count()} processes", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        failures = list(pool.map(compiles, tasks))
    copy = copy_gb_s(device)
    for passed, n, width in sizes:
        torch.manual_seed(0)
        size = Size(n, width, told.tokens)
        moved = CASES["gate_pool"].bytes_moved(size, passed)
        rows = []
        with own_stream(device), torch.no_grad():
            problem = Problem(size, device)
            for (*of, launch), failure in zip(tasks, failures, strict=True):
                if tuple(of) == (passed, n, width) and failure is None:
                    call = partial(problem.run, passed, launch)
                    us, _ = measure(call, len(problem.inputs), device, 20)
                    rows.append((us, launch))
        print(f"{passed} n={n} C={width}: {len(rows)} launches", flush=True)
        for us, launch in [rows[0], *sorted(rows[1:], key=lambda row: row[0])[: told.best]]:
            words = " ".join(f"{k}={v}" for k, v in launch.items()) or "the one in use"
            print(f"  {us:7.1f} us {moved / us / 1e3 / copy:6.1%}  {words}", flush=True)


if __name__ == "__main__":
    main()
