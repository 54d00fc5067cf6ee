"""How long a training step takes with every residual beside PreNorm's; needs no tyro.

    python benchmarks/steps.py --scales s --residuals prenorm mgr-competitive --streams 4 8

The flags are those of `multigate bench`. Prints the rows and keeps them in benchmarks/results/.
"""

from multigate.bench import BenchConfig, bench
from multigate.bench.flags import parse_flags

if __name__ == "__main__":
    bench(parse_flags(BenchConfig, what="steps"))
