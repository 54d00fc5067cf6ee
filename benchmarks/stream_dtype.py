"""Do bfloat16 streams cost loss? Trains the mini GPT with bf16 and with float32 streams.

    python benchmarks/stream_dtype.py TEXT_FOLDER TOKENIZER_JSON --seeds 0 1

TEXT_FOLDER holds train*.jsonl.xz and val*.jsonl.xz with a "text" field; needs a CUDA device and the
package `tokenizers`. Prints the validation loss of every run, the loss of the same weights read
with the other kind of streams, and the difference between the two runs of a seed.
"""

import argparse
import json
import lzma
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import multigate as mg
from multigate.train import TrainConfig, train

OTHER = {"bfloat16": "float32", "float32": "bfloat16"}


def tokens_of(folder, split, tokenizer):
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = []
    for file in sorted(folder.glob(f"{split}*.jsonl.xz")):
        with lzma.open(file, "rt") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        for encoding in tokenizer.encode_batch_fast(texts):
            ids += [*encoding.ids, end]
    return np.array(ids, dtype=np.uint16)


@torch.no_grad()
def val_loss(model, tokens, batch=16):
    length = model.config.context
    rows = [tokens[k : k + length + 1] for k in range(0, len(tokens) - length - 1, length)]
    rows = torch.from_numpy(np.stack(rows).astype(np.int64)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        total = sum(model(r[:, :-1], r[:, 1:]) * len(r) for r in rows.split(batch))
    return (total / len(rows)).item()


def run(residual, dtype, seed, steps, lr, train_tokens, val_tokens):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    config = mg.preset("mini", residual=residual, stream_dtype=dtype)
    model = mg.GPT(config).cuda()
    settings = TrainConfig(
        steps=steps, batch=64, warmup=100, lr=lr, seed=seed, bf16=True, compile=True
    )
    tail = []

    def report(progress):
        tail.append(progress.loss)
        if progress.step % 100 == 0:
            speed = f"{progress.tokens_per_second:,.0f} tok/s"
            print(f"  step {progress.step} {progress.loss:.4f} {speed}")

    train(model, train_tokens, settings, report)
    loss = val_loss(model, val_tokens)
    model.config = replace(config, stream_dtype=OTHER[dtype])
    return loss, val_loss(model, val_tokens), float(np.mean(tail[-100:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--residuals", nargs="+", default=["mgr-competitive"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    args = parser.parse_args()
    for residual in args.residuals:
        count = mg.GPT(mg.preset("mini", residual=residual)).parameter_count()
        print(f"mini, {residual}: {count:,} parameters, {args.steps} steps, seeds {args.seeds}")
    if args.dry_run:
        return
    from tokenizers import Tokenizer

    begin = time.time()
    tokenizer = Tokenizer.from_file(args.tokenizer)
    train_tokens, val_tokens = (tokens_of(args.text, s, tokenizer) for s in ("train", "val"))
    print(f"{len(train_tokens):,} + {len(val_tokens):,} tokens in {time.time() - begin:.0f} s")
    print(torch.cuda.get_device_name(), torch.__version__)
    for residual in args.residuals:
        for seed in args.seeds:
            losses = {}
            for dtype in ("bfloat16", "float32"):
                val, other, tail = run(
                    residual, dtype, seed, args.steps, args.lr, train_tokens, val_tokens
                )
                losses[dtype] = val
                print(
                    f"{residual} seed {seed} {dtype} streams: val {val:.4f} (read with "
                    f"{OTHER[dtype]} streams {other:.4f}), train {tail:.4f}"
                )
            difference = losses["bfloat16"] - losses["float32"]
            print(f"{residual} seed {seed}: bf16 - float32 = {difference:+.4f}", flush=True)


if __name__ == "__main__":
    main()
