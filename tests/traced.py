"""A small GPT run by hand in float64: what the analysis must find, without its probe."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import multigate as mg


@dataclass
class Traced:
    """A forward pass over all tokens at once."""

    hidden: list[Tensor] = field(default_factory=list)
    """h_0 .. h_depth, each [samples, T, D], no norm applied."""
    outputs: list[Tensor | None] = field(default_factory=list)
    streams: list[Tensor | None] = field(default_factory=list)
    """After start and after every step; None where the residual has none side by side."""
    logits: Tensor | None = None


def small(residual="prenorm", blocks=4, seed=0, **changes):
    """A GPT with random parameters: zeros and ones at initialisation hide mistakes."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 50, "width": 16, "heads": 2, "context": 32, **changes}
    model = mg.GPT(mg.preset("tiny", residual=residual, blocks=blocks, **sizes)).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    return model


def sample(samples=7, length=12, seed=1):
    return torch.randint(50, (samples, length), generator=torch.Generator().manual_seed(seed))


def by_hand(model, tokens, skipped=()):
    """The loop of `Stack` and `GPT`, written out; every sublayer applies its own norm."""
    found, residual = Traced(), model.stack.residual
    length = tokens.shape[1]
    rotary = model.rope_cos[:length], model.rope_sin[:length]
    entries = None if model.config.attention == "plain" else {}
    h, state = residual.start(model.embed.weight[tokens])
    found.hidden.append(h)
    found.streams.append(_streams(residual, state))
    for i, sublayer in enumerate(model.stack.sublayers):
        y = None if i in skipped else sublayer(h, rotary, entries)
        h, state = residual.step(i, y, state)
        found.hidden.append(h)
        found.outputs.append(y)
        found.streams.append(_streams(residual, state))
    size = (h.square().mean(-1, keepdim=True) + model.config.eps).sqrt()
    found.logits = (h / size * model.stack.out_norm.weight) @ model.embed.weight.T
    return found


def of_one_size(trace, name):
    """The hidden states, with the mean of the streams in the place of their sum at the end."""
    ends_with_a_sum = name in ("hc", "mhc", "mhc-lite")
    return [*trace.hidden[:-1], trace.streams[-1].mean(2) if ends_with_a_sum else trace.hidden[-1]]


def loss_by_hand(model, tokens, skipped=()):
    """Mean over all predicted tokens of -log p(next token)."""
    logits = by_hand(model, tokens[:, :-1], skipped).logits
    chosen = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (logits.exp().sum(-1).log() - chosen).mean()


def _streams(residual, state):
    """From how each family lays its state out."""
    if residual.name.startswith("mgr"):
        return state[0] if state[0].ndim == 4 else torch.stack(state, dim=2)
    return state[0] if residual.name in ("hc", "mhc", "mhc-lite") else None
