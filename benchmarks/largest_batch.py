"""How many sequences can one training step take? Searches for each memory mode, on a GPU.

    python benchmarks/largest_batch.py --scale s --streams 4 8

Forward and backward, not compiled, in steps of 4 sequences; PreNorm first. The memory of two small
batches says where to begin.
"""

import argparse
import gc

import torch

from multigate.bench import steps
from multigate.device import choose
from multigate.residuals.memory import MODES

UNIT = 4
SMALL = (16, 32)
SPARE = 1.5 * 2**30


def largest(fits, guess):
    """The largest multiple of UNIT that fits, from a guess."""
    batch = max(guess // UNIT, 1) * UNIT
    while batch and not fits(batch):
        batch -= UNIT
    while fits(batch + UNIT):
        batch += UNIT
    return batch


def peak(scale, residual, streams, memory, batch, compute):
    """Bytes of two steps at their fullest."""
    torch.cuda.reset_peak_memory_stats()
    candidate = steps.candidate(scale, residual, streams, batch, compute, memory)
    for _ in range(2):
        candidate.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="s")
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 8])
    args = parser.parse_args()
    compute = choose("cuda", compile="off")
    free, _ = torch.cuda.mem_get_info()
    arms = [("prenorm", None, "store")]
    arms += [("mgr-competitive", n, memory) for n in args.streams for memory in MODES]
    for arm in arms:

        def measured(batch, arm=arm):
            try:
                return peak(args.scale, *arm, batch, compute)
            except torch.OutOfMemoryError:
                return None
            finally:
                gc.collect()
                torch.cuda.empty_cache()

        few, more = (measured(batch) for batch in SMALL)
        each = (more - few) / (SMALL[1] - SMALL[0])
        guess = int((free - SPARE - (few - SMALL[0] * each)) / each)
        found = largest(lambda batch: measured(batch) is not None, guess)
        print(*arm, f"{more / 2**30:.2f} GiB for {SMALL[1]} sequences, at most {found}", flush=True)


if __name__ == "__main__":
    main()
