"""Sampling from a GPT."""

import torch
from torch import Tensor

from .gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    new_tokens: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue token ids `prompt` [B, T] by `new_tokens` sampled ones: [B, T + new_tokens].

    Temperature 0 takes the likeliest token. Every token is computed from the last `context` ones.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"generate needs a prompt of shape [batch, positions], got {tuple(prompt.shape)}."
        )
    if temperature < 0:
        raise ValueError(f"the temperature must not be negative, got {temperature}.")
    tokens = prompt
    for _ in range(new_tokens):
        logits = model(tokens[:, -model.config.context :])[:, -1].float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            share = (logits / temperature).softmax(-1)
            new = torch.multinomial(share, 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
