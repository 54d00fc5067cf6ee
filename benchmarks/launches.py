"""Which launch of the kernels of gate_pool or depth_pool is the fastest on this GPU.

    python benchmarks/launches.py --backend triton --streams 4 8 --widths 768 1024 --best 5
    python benchmarks/launches.py --case depth_pool --backend cuda --streams 9 25 --passes backward

Triton: warps, tokens a program, registers, one program for every block of tokens or a few that
stay, and tokens kept on the chip or read twice; of depth_pool, how many sources at a time. CUDA:
teams of fewer or more warps, and a ring of fewer or more tokens; gate_pool forward has none. Prints
the fastest beside the one that is used. The kernels are compiled on all cores.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import product

import torch

from multigate.bench.cases import CASES, EPS, Size
from multigate.bench.timing import copy_gb_s, measure, own_stream, sets_needed
from multigate.ops.cuda import SHARED, Plan
from multigate.ops.depth_pool import cuda as depth_cuda
from multigate.ops.depth_pool import many
from multigate.ops.depth_pool import triton as depth_triton
from multigate.ops.depth_pool.plan import MOST_HELD as MOST_SOURCES
from multigate.ops.depth_pool.plan import Plan as DepthLaunch
from multigate.ops.gate_pool import cuda, plan, triton

KERNELS = {
    ("gate_pool", "triton"): triton,
    ("gate_pool", "cuda"): cuda,
    ("depth_pool", "triton"): depth_triton,
    ("depth_pool", "cuda"): depth_cuda,
}
SHAPES = ((1, 1), (2, 2), (4, 4), (2, 1), (4, 1), (8, 1))
"""Warps of a program, and its tokens."""
REGISTERS = (None, 128, 80)
STAGES = (1, 2)
"""Tokens on their way to a program that stays, this one included."""
MOST_HELD = 320
"""Numbers of a token that a thread may hold; with more the compiler would spill them."""
SLABS, TEAMS, ROOM = (1, 2, 3, 4), (1, 2, 4), (56, 64, 72, 80, 96, 128, 168)
"""Chunks of a row a thread, tokens a block, and registers of a thread."""
AHEAD, MOST_WARPS = (1, 2, 3, 4), 24
"""Tokens in the ring of a team, and warps of a block."""
GROUPS, RESIDENT = (1, 2, 3, 4), (1, 2, 3, 4, 6, 8, 12)
"""Of depth_pool by Triton: sources at a time, and programs a multiprocessor."""
FEW = 64
"""Tokens of the call that compiles."""


def triton_launches(passed, n, width):
    """Fields of `Launch`."""
    for (warps, tokens), keep, registers in product(SHAPES, (False, True), REGISTERS):
        lanes = 32 * warps // tokens
        if 8 * lanes > 2 * width or (keep and n * width > MOST_HELD * lanes):
            continue
        resident = max(1, (65536 // 32 // (registers or 128)) // warps)
        # Backward, each program writes its share of the gradients of the weights.
        everywhere = ((triton.EVERY_BLOCK, 1),) if passed == "forward" else ()
        for programs, stages in (*everywhere, *((resident, stages) for stages in STAGES)):
            yield {
                "warps": warps,
                "block": tokens,
                "keep": keep,
                "programs": programs,
                "stages": stages,
                "max_registers": registers,
            }


def sizes(width):
    """Numbers of warps for a row, each with the fewest chunks a thread that it takes."""
    needed = -(-2 * width // 512)
    return {-(-needed // slabs): slabs for slabs in reversed(SLABS)}.items()


def ringless_cuts(n, width):
    """Of the forward pass."""
    for (warps, slabs), teams, room in product(sizes(width), TEAMS, ROOM):
        # A chunk of a row takes 4 registers; a block must find its own.
        if warps * teams <= 65536 // (32 * room) and 4 * slabs * (n + 1) <= room - 32:
            yield Plan(warps, teams, 0, False, room)


def ringed_cuts(what):
    """Of a kernel whose teams walk over their tokens."""
    for warps, slabs in sizes(what.width):
        for teams, ahead in product(range(1, MOST_WARPS // warps + 1), AHEAD):
            taken = what.static_bytes(warps, teams)
            # Weights stay in registers only where a thread has one chunk of them.
            for hold in (True, False)[slabs > 1 :]:
                cut = Plan(warps, teams, ahead * slabs, hold)
                if teams < 16 and taken + what.dynamic_bytes(cut) <= SHARED:
                    yield cut


def grouped_cuts(what):
    """Of depth_pool's kernels for many sources, which have a group of them in a slot."""
    token = what.groups
    rings = (*range(token, 2 * token), *(ahead * token for ahead in AHEAD[1:]))
    for warps, slabs in sizes(what.width):
        for teams, slots in product(range(1, MOST_WARPS // warps + 1), rings):
            cut = Plan(warps, teams, slots, slabs == 1)
            if teams < 16 and what.dynamic_bytes(cut) <= SHARED - many.STATIC:
                yield cut


def depth_triton_launches(passed, count, width):
    for warps, block in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)):
        lanes = 32 * warps
        if 8 * lanes > 2 * width:
            continue
        section = min(1 << (width - 1).bit_length(), 8 * lanes)
        held_numbers = -(-width // section) * section // lanes
        ways = [(group, False) for group in GROUPS if group < count]
        ways = [way for way in ways if 2 * way[0] * held_numbers <= MOST_HELD]
        if count <= MOST_SOURCES and count * held_numbers <= MOST_HELD:
            ways.append((count, True))
        residents = RESIDENT if passed == "backward" else (1,)
        for (group, held), programs in product(ways, residents):
            if programs * block * warps <= 48:
                yield DepthLaunch(section, block, block * warps, group, held, programs)


def gate_launches(backend, passed, n, width):
    if backend == "triton":
        return triton_launches(passed, n, width)
    if passed == "forward":
        return ringless_cuts(n, width)
    # With both gradients given.
    return ringed_cuts(plan.problem(n, width, 2, *[torch.empty(0)] * 2))


def depth_launches(backend, passed, count, width):
    if backend == "triton":
        return depth_triton_launches(passed, count, width)
    what = depth_cuda.problem(count, width, 2, passed == "backward")
    return grouped_cuts(what) if isinstance(what, many.Many) else ringed_cuts(what)


def candidates(case, backend, passed, n, width):
    """The launch in use first, which is None."""
    launches = gate_launches if case == "gate_pool" else depth_launches
    return [None, *launches(backend, passed, n, width)]


class Problem:
    """Inputs of one size, and the passes with a launch of our choice."""

    def __init__(self, case, backend, size, device):
        moved = CASES[case].bytes_moved(size, "forward")
        sets = sets_needed(moved, device)
        self.kernels = KERNELS[case, backend]
        self.inputs = [CASES[case].inputs(size, device) for _ in range(sets)]
        self.saved = [self.forward(i, None) for i in range(sets)]
        self.grads = [[torch.randn_like(t) for t in made[:-1]] for made in self.saved]

    def run(self, passed, launch, i):
        return self.forward(i, launch) if passed == "forward" else self.backward(i, launch)


class GateProblem(Problem):
    def given(self, i):
        x = self.inputs[i]
        y, streams = x.rows
        return y, streams.unbind(1), *x.weights, x.norm_weight

    def forward(self, i, launch):
        return self.kernels.forward(*self.given(i), True, EPS, launch)

    def backward(self, i, launch):
        rest = (self.saved[i][-1], True, EPS, launch)
        return self.kernels.backward(*self.grads[i], *self.given(i), *rest)


class DepthProblem(Problem):
    def given(self, i):
        x = self.inputs[i]
        return x.rows, *x.weights, x.norm_weight

    def forward(self, i, launch):
        return self.kernels.forward(*self.given(i), 1.0, EPS, launch)

    def backward(self, i, launch):
        wanted = [True] * len(self.inputs[i].rows)
        rest = (self.saved[i][-1], 1.0, wanted, True, True, launch)
        grads, *others = self.kernels.backward(*self.grads[i], *self.given(i), *rest)
        return *grads, *others


PROBLEMS = {"gate_pool": GateProblem, "depth_pool": DepthProblem}


def compiles(task):
    """None, or why not; and what it gives is compared with what the launch in use gives."""
    case, backend, passed, n, width, norm, launch = task
    device = torch.device("cuda", 0)
    try:
        problem = PROBLEMS[case](case, backend, Size(n, width, FEW, norm=norm), device)
        results = zip(problem.run(passed, launch, 0), problem.run(passed, None, 0), strict=True)
        for a, b in results:
            if a is not None:
                torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    except Exception as error:
        return str(error).strip().splitlines()[0][:100]
    return None


def workers(backend):
    """Triton keeps what it compiles on disk, where others find it. CUDA's compiler is no Python."""
    if backend == "cuda":
        return ThreadPoolExecutor(os.cpu_count())
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, default="gate_pool")
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 8], help="or sources")
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1024, 1280, 2048, 4096])
    parser.add_argument("--passes", nargs="+", default=["forward"])
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    parser.add_argument("--best", type=int, default=5)
    told = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none here.")
    device = torch.device("cuda", 0)
    tasks = [
        (told.case, told.backend, passed, n, width, told.norm, launch)
        for passed, n, width in product(told.passes, told.streams, told.widths)
        for launch in candidates(told.case, told.backend, passed, n, width)
    ]
    print(f"compiling {len(tasks)} kernels on {os.cpu_count()} cores", flush=True)
    with workers(told.backend) as pool:
        failures = list(pool.map(compiles, tasks))
    copy = copy_gb_s(device)
    for passed, n, width, tokens in product(told.passes, told.streams, told.widths, told.tokens):
        size = Size(n, width, tokens, norm=told.norm)
        moved = CASES[told.case].bytes_moved(size, passed)
        rows = []
        with own_stream(device), torch.no_grad():
            problem = PROBLEMS[told.case](told.case, told.backend, size, device)
            for task, failure in zip(tasks, failures, strict=True):
                launch = task[-1]
                if task[2:5] != (passed, n, width):
                    continue
                if failure is not None:
                    print(f"  {launch}: {failure}", flush=True)
                    continue
                us, _ = measure(
                    partial(problem.run, passed, launch), len(problem.inputs), device, 20
                )
                rows.append((us, launch))
        print(f"{passed} n={n} C={width} tokens={tokens}: {len(rows)} launches", flush=True)
        for us, launch in [rows[0], *sorted(rows[1:], key=lambda row: row[0])[: told.best]]:
            share = moved / us / 1e3 / copy
            print(f"  {us:8.2f} us {share:6.1%}  {launch or 'the one in use'}", flush=True)


if __name__ == "__main__":
    main()
