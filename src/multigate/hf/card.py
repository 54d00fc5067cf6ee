"""The model card of an exported run: what it is, how good, how to use it."""

from pathlib import Path
from typing import Any

from multigate.data.tokenizer import Tokenizer
from multigate.gpt import GPT
from multigate.log import read_log

from .run import Trained

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [multigate, {residual}]
---
# {name}

A GPT with the residual `{residual}`, trained with [multigate](https://arxiv.org/abs/2605.23259) \
{version}.

| | |
|---|---|
{rows}

## Use it

Without multigate, by the code in this folder (PyTorch and Transformers are enough):

```python
from transformers import pipeline

write = pipeline("text-generation", model="{name}", trust_remote_code=True)
print(write("The", max_new_tokens=40)[0]["generated_text"])
```

With `multigate.hf` imported no code of this folder runs, and on a GPU the fused kernels are used:

```python
import multigate.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`multigate train --init {name} ...` goes on training from these weights. The model has not been
tuned to follow instructions or to be safe: it continues text like that which it was trained on.
"""


def card(name: str, trained: Trained) -> str:
    """The text of README.md for a checkpoint of a run."""
    path, state, gpt, tokenizer = trained
    rows = {**described(gpt, tokenizer), **numbers(path, state)}
    return CARD.format(
        name=name,
        residual=gpt.config.residual,
        version=state["versions"]["multigate"],
        rows="\n".join(f"| {what} | {value} |" for what, value in rows.items()),
    )


def described(gpt: GPT, tokenizer: Tokenizer) -> dict[str, str]:
    c, streams = gpt.config, gpt.stack.residual.streams
    options = "".join(f", {name} {value}" for name, value in c.options().items())
    return {
        "residual": c.residual + (f", streams {streams}" if streams > 1 else "") + options,
        "attention": c.attention,
        "parameters": f"{gpt.parameter_count():,}",
        "blocks x width (heads)": f"{c.blocks} x {c.width} ({c.heads})",
        "context": f"{c.context:,} tokens",
        "tokenizer": f"{Path(tokenizer.name).name}, {tokenizer.vocab_size:,} ids of a vocabulary "
        f"of {c.vocab_size:,}",
    }


def numbers(path: Path, state: dict[str, Any]) -> dict[str, str]:
    """What the run's log says about the checkpoint."""
    rows, step, settings = dict[str, str](), state["step"], state.get("config", {})
    tokens = settings.get("tokens_per_step")
    seen = "" if tokens is None else f", {step * tokens:,} tokens of {Path(state['data']).name}"
    rows["trained for"] = f"{step:,} steps{seen}"
    for event, what in (("train", "train loss"), ("val", "val loss")):
        found = [r for r in read_log(path.parent.parent, event) if r["step"] <= step]
        if found:
            last = found[-1]
            rows[what] = f"{last['loss']:.4f} nats a token, at step {last['step']:,}"
            if "bits_per_byte" in last:
                rows["val bits per byte"] = f"{last['bits_per_byte']:.4f}"
    return rows
