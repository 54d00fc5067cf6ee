"""Every CUDA kernel on small problems, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py --one-team

Blocks have as many teams as in use, or one: racecheck does not know that the barriers of a team
have names, and takes what two teams write one after the other for a race.
"""

import argparse
from dataclasses import replace

import torch

from multigate.ops import cuda as launch
from multigate.ops.depth_pool import cuda as depth
from multigate.ops.gate_pool import cuda as gate
from multigate.ops.gate_pool import plan

EPS = 1e-6
STEPS = (
    (1, 40, True, True),
    (4, 768, False, True),
    (8, 1280, True, False),
    (16, 264, False, False),
)
"""Streams, width, gate (competitive or not) and norm, with a ring and without."""
POOLS = ((2, 264, True), (9, 768, False), (20, 264, True), (49, 256, False))
"""Sources, width and norm, for the kernels for few and for many."""


def steps(tokens, device, dtype, cut_of):
    """gate_pool: forward and backward, inverted, exact, replayed."""
    for n, width, competitive, norm in STEPS:
        y = torch.randn(tokens, width, device=device).to(dtype)
        streams = torch.randn(tokens, n, width, device=device).to(dtype)
        w_gate, w_pool, gain = (torch.randn(width, device=device) for _ in range(3))
        bias = torch.randn(n + competitive, device=device)
        weights = (w_gate, w_pool, bias, gain if norm else None)
        grads = (torch.randn_like(y), torch.randn_like(streams))
        each, rest = streams.unbind(1), (competitive, EPS)
        backward = plan.problem(n, width, y.element_size(), *grads)
        forward = plan.problem(n, width, y.element_size())
        back = cut_of(plan.backward_plan(device, backward, norm))
        free = cut_of(plan.forward_plan(device, forward, norm, ring=False))
        ringed = cut_of(plan.forward_plan(device, forward, norm, ring=True))

        _, new, saved = gate.forward(y, each, *weights, *rest, free)
        gate.backward(*grads, y, each, *weights, saved, *rest, back)
        kept, places = gate.keep(each, saved, 50_000)
        call = (*grads, y, new.unbind(1), weights, saved)
        gate.invert_backward(*call, kept, places, *rest, back)
        if gate.codes_fit(n, dtype):
            *_, exact, _ = gate.exact_forward(y, each, weights, *rest, streams.numel(), ringed)
            gate.exact_backward(*call, exact, *rest, back)
        gate.replay(streams, [y, y], [saved] * 2)


def pools(tokens, device, dtype, cut_of):
    """depth_pool: forward and backward."""
    shared = launch.shared_memory(device)
    for count, width, norm in POOLS:
        sources = [torch.randn(tokens, width, device=device).to(dtype) for _ in range(count)]
        query, gain = (torch.randn(width, device=device) for _ in range(2))
        weights = (query, gain if norm else None)
        forward, backward = (
            cut_of(depth.problem(count, width, dtype.itemsize, passed).plan(shared))
            for passed in (False, True)
        )
        h, saved = depth.forward(sources, *weights, 0.3, EPS, forward)
        wanted = [i % 3 != 1 for i in range(count)]
        depth.backward(h, sources, *weights, saved, 0.3, wanted, cut=backward)


def main(device, tokens, one_team):
    def cut_of(cut):
        return replace(cut, teams=1) if one_team else cut

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        torch.manual_seed(0)
        steps(tokens, device, dtype, cut_of)
        pools(tokens, device, dtype, cut_of)
        print(f"every kernel has run in {dtype}".replace("torch.", ""), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-team", action="store_true")
    told = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this runs the kernels of a GPU, and there is none here.")
    # More tokens than blocks, so that a block has several.
    gpu = torch.device("cuda", 0)
    main(gpu, 2 * launch.multiprocessors(gpu) + 37, told.one_team)
    torch.cuda.synchronize()
