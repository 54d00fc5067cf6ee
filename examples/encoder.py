"""A plain PyTorch transformer encoder with Multi-Gate Residuals: it learns to turn a list around.

python examples/encoder.py
"""

import argparse

import torch
from torch import Tensor, nn

import multigate as mg

LENGTH, SYMBOLS, WIDTH, BLOCKS = 8, 10, 48, 3


class Attention(nn.Module):
    """norm and attention; the residual is not its business."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        h = self.norm(h)
        return self.attention(h, h, h, need_weights=False)[0]


def mlp() -> nn.Module:
    wide = 4 * WIDTH
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)
    )


class Encoder(nn.Module):
    def __init__(self, residual: str) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        sublayers = [f for _ in range(BLOCKS) for f in (Attention(), mlp())]
        self.stack = mg.Stack(sublayers, residual, dim=WIDTH, out_norm=nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.stack(self.symbols(ids) + self.places))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--residual", default="mgr-competitive", help="any of mg.residual_names()")
args = parser.parse_args()
torch.manual_seed(0)
model = Encoder(args.residual)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, args.steps + 1):
    ids = torch.randint(SYMBOLS, (32, LENGTH))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (1, args.steps) or step % 20 == 0:
        print(f"step {step:3}  loss {loss.item():.3f}")
ids = torch.randint(SYMBOLS, (1, LENGTH))
print(f"{ids[0].tolist()} turned around: {model(ids)[0].argmax(-1).tolist()}")
