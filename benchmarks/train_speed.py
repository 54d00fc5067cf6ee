"""How fast `multigate train` is: a whole step, beside the forward and backward pass alone.

    python benchmarks/train_speed.py --scale s --residual prenorm --micro-batch 32
    python benchmarks/train_speed.py --scale mini --residual prenorm --micro-batch 64

Trains on random tokens and prints, from the run's own log: tokens a second of whole steps (loader,
forward, backward, clipping, optimizer, logging), of the same compiled model's forward and backward
alone on one batch that stays on the device, the loader's share of a step, and how long a checkpoint
held training up. Needs a CUDA device; with --device cpu it runs anywhere and shows that it runs.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from multigate.config import resolve
from multigate.data import Loader
from multigate.data.shards import FORMAT, HEADER, open_data
from multigate.data.tokenizer import dtype_for
from multigate.data.writer import ShardWriter, write_json
from multigate.device import choose, flops_per_token
from multigate.gpt import GPT, PRESETS
from multigate.log import read_log
from multigate.train import train


def random_data(folder, vocabulary, tokens):
    """Random tokens, of a tokenizer that does not exist."""
    folder.mkdir(parents=True)
    dtype = dtype_for(vocabulary)
    splits = {}
    for name, count in (("train", tokens), ("val", tokens // 4)):
        ids = np.random.default_rng(len(name)).integers(vocabulary, size=count)
        writer = ShardWriter(folder / f"{name}-00000.bin", dtype.itemsize)
        writer.write(ids.astype(dtype).tobytes())
        shard = writer.finish()
        splits[name] = {"tokens": count, "documents": 1, "bytes": 4 * count, "shards": [shard]}
    tokenizer = {"name": "random", "kind": "none", "file": None, "sha256": ""}
    header = {"format": FORMAT, "tokenizer": tokenizer, "vocab_size": vocabulary, "eot": 0}
    write_json(folder / HEADER, {**header, "dtype": dtype.str, "splits": splits})
    return folder


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def forward_backward(config, data, steps):
    """Tokens a second of the compiled model alone."""
    compute = choose(config.device, config.precision, config.compile)
    model = GPT(config.gpt(data.vocab_size)).to(compute.device)
    call = torch.compile(model, dynamic=False) if compute.compile else model
    rows = data.split("train").rows(range(config.micro_batch), model.config.context)
    rows = torch.from_numpy(rows.astype(np.int64)).to(compute.device)
    times = []
    for _ in range(5 + steps):
        wait(compute.device)
        begin = time.perf_counter()
        with compute.autocast():
            loss = call(rows[:, :-1], rows[:, 1:])
        loss.backward()
        model.zero_grad()
        wait(compute.device)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[5:])
    flops = flops_per_token(model.config, model.parameter_count())
    return rows[:, 1:].numel() / seconds, flops


def whole_steps(config):
    """Of a run: tokens a second, the loader's seconds a step, seconds a checkpoint held it up."""
    waits, fetch = [], Loader.__next__

    def timed(loader):
        begin = time.perf_counter()
        batch = fetch(loader)
        waits.append(time.perf_counter() - begin)
        return batch

    Loader.__next__ = timed
    train(config)
    Loader.__next__ = fetch
    seconds = [config.tokens_per_step / r["tokens_per_second"] for r in read_log(config.folder)[5:]]
    blocked = [r["blocked_seconds"] for r in read_log(config.folder, "checkpoint")]
    return statistics.median(seconds), statistics.median(waits[5:]), blocked


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=PRESETS, default="s")
    parser.add_argument("--residual", default="prenorm")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="auto")
    args = parser.parse_args()
    recipe = resolve(args.scale)
    context = PRESETS[args.scale].context
    vocabulary = PRESETS[args.scale].vocab_size
    with tempfile.TemporaryDirectory() as place:
        tokens = args.micro_batch * args.accumulation * context
        folder = random_data(Path(place) / "data", vocabulary, max(4, args.steps) * tokens + 1)
        config = replace(
            recipe,
            residual=args.residual,
            data=str(folder),
            out=Path(place),
            device=args.device,
            compile=args.compile,
            steps=args.steps,
            tokens_per_step=tokens,
            micro_batch=args.micro_batch,
            eval_every=args.steps + 1,
            save_every=max(1, args.steps // 3),
        )
        alone, flops = forward_backward(config, open_data(folder), min(args.steps, 30))
        torch._dynamo.reset()
        step, loading, blocked = whole_steps(config)
    whole = tokens / step
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, torch {torch.__version__}")
    print(f"{args.scale}, {args.residual}, {args.micro_batch} x {context} x {args.accumulation}:")
    print(f"  forward and backward alone {alone:12,.0f} tok/s {alone * flops / 1e12:6.0f} TFLOP/s")
    print(f"  whole steps                {whole:12,.0f} tok/s {whole * flops / 1e12:6.0f} TFLOP/s")
    print(f"  whole / alone {whole / alone:.3f}")
    print(f"  a step {1e3 * step:.2f} ms, of which the loader {1e3 * loading:.3f} ms")
    print(f"  a checkpoint holds training up for {', '.join(f'{b:.3f}' for b in blocked)} s")


if __name__ == "__main__":
    main()
