"""A Llama of Transformers with Multi-Gate Residuals: it learns to go on with a row of numbers.

pip install "multigate[hf]"
python examples/decoder.py
"""

import argparse

import torch
from transformers import LlamaConfig

from multigate.hf import with_residual

NUMBERS, LENGTH = 11, 12


def rows(count: int) -> torch.Tensor:
    """a, a + b, a + 2 b, ... modulo 11: from the third number on there is only one answer."""
    first, step = torch.randint(NUMBERS, (2, count, 1))
    return (first + step * torch.arange(LENGTH)) % NUMBERS


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--residual", default="mgr-competitive", help="any of mg.residual_names()")
args = parser.parse_args()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=NUMBERS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
)
model = with_residual(config, args.residual)
residual = model.stack.residual
extra = sum(p.numel() for p in residual.parameters())
print(
    f"{type(model).__name__}: {model.num_parameters():,} parameters, the residual's are {extra:,}"
)

# Weight decay would pull gates and queries towards zero.
kept = {p for name, p in residual.named_parameters() if name in residual.undecayed()}
groups = [
    {"params": [p for p in model.parameters() if p not in kept], "weight_decay": 0.1},
    {"params": list(kept), "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
for step in range(1, args.steps + 1):
    ids = rows(64)
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (1, args.steps) or step % 20 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}")

model.eval()
test = rows(200)
prompt = test[:, :2]
text = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH - 2, do_sample=False
)
print(f"{prompt[0].tolist()} goes on with {text[0, 2:].tolist()}")
print(f"right in {(text == test).all(1).float().mean():.1%} of 200 rows")
