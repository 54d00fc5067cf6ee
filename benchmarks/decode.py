"""How fast is generation? Beside PreNorm's, without a graph, and without a cache.

    python benchmarks/decode.py --scale s --batch 1 32 --tokens 512

A model with random weights continues prompts of 64 tokens greedily, under autocast; the prompts
are read within the time. The residuals take turns, and of their rounds the fastest counts. Without
a cache every token takes a forward pass over all before it (and up to 63 after it, so that few
shapes occur: for some kernels the first call with a shape takes long).
"""

import argparse
import time
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F

import multigate as mg
from multigate import decode
from multigate.device import choose

PROMPT = 64


def seconds(function, *given):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function(*given)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.no_grad()
def without_cache(model, prompts, count, each=1):
    """With `each` only one token in so many is computed: that calls every shape once."""
    begin = prompts.shape[1]
    tokens = F.pad(prompts, (0, count))
    positions = torch.arange(begin + count, device=tokens.device)
    for end in range(begin, begin + count, each):
        length = -(-end // PROMPT) * PROMPT
        logits = model(tokens[:, :length], last=positions[end - 1 : end])[:, 0]
        tokens[:, end] = logits.argmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="s")
    parser.add_argument("--residuals", nargs="+", default=["prenorm", "mgr-competitive"])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    compute = choose("cuda")
    generate = partial(mg.generate, temperature=0)
    models = {}
    for name in args.residuals:
        torch.manual_seed(0)
        streams = args.streams if name.startswith("mgr") else None
        config = mg.preset(args.scale, residual=name, streams=streams)
        models[name] = mg.GPT(config).to(compute.device).eval()
    for batch in args.batch:
        prompts = torch.randint(256, (batch, PROMPT), device=compute.device)
        best = dict.fromkeys(models, float("inf"))
        for number in range(args.rounds + 1):
            for name, model in models.items():
                with compute.autocast():
                    took = seconds(generate, model, prompts, args.tokens)
                # The first round compiles kernels.
                best[name] = min(best[name], took) if number else best[name]
        for name, model in models.items():
            with compute.autocast():
                with mock.patch.object(decode, "can_capture", return_value=False):
                    plain = seconds(generate, model, prompts, args.tokens)
                without_cache(model, prompts, args.tokens, each=PROMPT)
                none = seconds(without_cache, model, prompts, args.tokens)
            rate = batch * args.tokens / best[name]
            print(
                f"{args.scale} {name}, batch {batch}: {rate:,.0f} tokens/s, "
                f"{best[args.residuals[0]] / best[name]:.2f} of {args.residuals[0]}'s; "
                f"without a graph {batch * args.tokens / plain:,.0f}, "
                f"without a cache {batch * args.tokens / none:,.0f}, "
                f"{none / best[name]:.1f} times as long",
                flush=True,
            )


if __name__ == "__main__":
    main()
