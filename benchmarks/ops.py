"""How fast the fused operations are beside what they are compared with; needs no tyro.

    python benchmarks/ops.py --widths 768 1024 --streams 4 --backends torch compile triton cuda
    python benchmarks/ops.py --what sweep --cases gate_pool

The flags are those of `multigate bench`. Prints the rows and keeps them in benchmarks/results/.
"""

from multigate.bench import BenchConfig, bench
from multigate.bench.flags import parse_flags

if __name__ == "__main__":
    bench(parse_flags(BenchConfig, what="ops"))
