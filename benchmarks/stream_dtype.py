"""Do bfloat16 streams cost loss? Trains the same run with bf16 and with float32 streams.

    python benchmarks/stream_dtype.py DATA --residuals mgr-competitive --seeds 0 1

DATA is a folder made by `multigate prepare`; needs a CUDA device for sizes that matter. Prints the
val loss of every run, the loss of the same weights read with the other kind of streams, and the
difference between the two runs of a seed. Runs are kept in --out and go on where they stopped.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from multigate.checkpoint import open_run
from multigate.config import resolve
from multigate.data import open_data
from multigate.device import choose
from multigate.evals import evaluate
from multigate.evaluate import load_model
from multigate.train import train

OTHER = {"bfloat16": "float32", "float32": "bfloat16"}


def run(residual, dtype, seed, args):
    """Val loss with the streams trained with, and with the others."""
    recipe = resolve(args.scale)
    config = replace(
        recipe,
        data=args.data,
        out=args.out,
        name=f"{args.scale}-{residual}-{dtype}-{seed}",
        residual=residual,
        seed=seed,
        steps=args.steps or recipe.steps,
        device=args.device,
        model=replace(recipe.model, stream_dtype=dtype),
    )
    train(config)
    compute = choose(args.device)
    model = load_model(*open_run(config.folder, "last")).to(compute.device)
    split = open_data(args.data, verify=False).split("val")
    losses = []
    for streams in (dtype, OTHER[dtype]):
        model.config = replace(model.config, stream_dtype=streams)
        losses.append(evaluate(model, split, 16, args.tokens, compute.autocast).loss)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--residuals", nargs="+", default=["mgr-competitive"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tokens", type=int, help="of the val text; all if left out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/stream-dtype"))
    args = parser.parse_args()
    for residual in args.residuals:
        for seed in args.seeds:
            val = {}
            for dtype, other in OTHER.items():
                val[dtype], crossed = run(residual, dtype, seed, args)
                print(f"{residual} seed {seed}, {dtype} streams: val {val[dtype]:.4f}", end=", ")
                print(f"the same weights with {other} streams {crossed:.4f}", flush=True)
            difference = val["bfloat16"] - val["float32"]
            print(f"{residual} seed {seed}: bf16 - float32 = {difference:+.4f}", flush=True)


if __name__ == "__main__":
    main()
