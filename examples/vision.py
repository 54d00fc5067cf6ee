"""A small vision transformer with Multi-Gate Residuals: which quarter holds the bright square?

python examples/vision.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multigate as mg

SIZE, PATCH, WIDTH, BLOCKS = 16, 4, 48, 3


class Attention(mg.Sublayer):
    """The norm is the residual's to apply: body gets h as it comes out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class MLP(mg.Sublayer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ViT(nn.Module):
    def __init__(self, residual: str) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH))
        sublayers = [f for _ in range(BLOCKS) for f in (Attention(), MLP())]
        self.stack = mg.Stack(sublayers, residual, dim=WIDTH, out_norm=nn.RMSNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.stack(x).mean(1))


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Noise with a brighter square of 4 x 4 somewhere in one of the quarters."""
    images, quarters = torch.randn(count, 1, SIZE, SIZE), torch.randint(4, (count,))
    for image, quarter in zip(images, quarters.tolist(), strict=True):
        row, column = (torch.randint(5, (2,)) + 8 * torch.tensor(divmod(quarter, 2))).tolist()
        image[0, row : row + 4, column : column + 4] += 1.5
    return images, quarters


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=125)
parser.add_argument("--residual", default="mgr-competitive", help="any of mg.residual_names()")
args = parser.parse_args()
torch.manual_seed(0)
model, test = ViT(args.residual), batch(200)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(args.steps + 1):
    if step in (0, args.steps) or step % 25 == 0:
        with torch.no_grad():
            right = (model(test[0]).argmax(-1) == test[1]).float().mean().item()
        print(f"step {step:3}  right on {right:.1%} of new images")
    images, quarters = batch(32)
    optimizer.zero_grad()
    F.cross_entropy(model(images), quarters).backward()
    optimizer.step()
