"""Which residuals the conformance suite runs over: every registered one, and their options."""

import inspect
from dataclasses import dataclass, field

import torch
from torch import nn

import multigate as mg
from multigate.residuals.base import _REGISTRY

DIM, DEPTH, STREAMS = 6, 7, 3

VARIANTS = {
    "highway": [{"gate": "vector"}],
    "denseformer": [{"period": 3, "dilation": 2}, {"period": 1, "dilation": 3}],
    "hc": [{"static": True}, {"streams": 1}],
    "mhc": [{"streams": 1}, {"streams": 4}, {"sinkhorn_steps": 3}],
    "mhc-lite": [{"streams": 1}, {"streams": 4}],
    "attnres-full": [{"scaled": True}, {"key_gain": False}],
    "attnres-block": [{"streams": 1}, {"streams": DEPTH, "scaled": True}],
    "mgr-independent": [{"streams": 1}, {"streams": DEPTH + 1}, {"bias_init": "calibrated"}],
    "mgr-competitive": [
        {"streams": 1},
        {"streams": DEPTH, "bias_init": -3.0},
        {"streams": DEPTH + 3},
    ],
}
"""Options beyond the default that change what is computed."""


@dataclass
class Case:
    name: str
    options: dict = field(default_factory=dict)

    def build(self, dim=DIM, depth=DEPTH, seed=0, dtype=torch.float64, spread=0.7):
        """The residual with random parameters: zeros and ones at initialisation hide mistakes."""
        residual = mg.build_residual(self.name, dim, depth, **self.options).to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in residual.parameters():
                p += spread * torch.randn(p.shape, generator=generator).to(dtype)
        return residual

    def fresh(self, dim=DIM, depth=DEPTH, dtype=torch.float64):
        return mg.build_residual(self.name, dim, depth, **self.options).to(dtype)

    def __str__(self):
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


def takes_streams(name):
    return "streams" in inspect.signature(_REGISTRY[name]).parameters


def all_cases():
    cases = []
    for name in mg.residual_names():
        default = {"streams": STREAMS} if takes_streams(name) else {}
        cases.append(Case(name, default))
        cases += [Case(name, {**default, **variant}) for variant in VARIANTS.get(name, [])]
    return cases


def run(residual, x, ys, norms=None):
    """All h of a residual over given sublayer outputs, and the states before every sublayer."""
    norms = norms or [None] * (len(ys) + 1)
    h, state = residual.start(x, norms[0])
    hs, states = [h], [state]
    for i, y in enumerate(ys):
        h, state = residual.step(i, y, state, norms[i + 1])
        hs.append(h)
        states.append(state)
    return hs, states


def random_inputs(*batch, dim=DIM, depth=DEPTH, seed=1, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(*batch, dim, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(depth + 1)
    ]
    for t in tensors:
        t.requires_grad_(requires_grad)
    return tensors[0], tensors[1:]


class Own(mg.Residual):
    """A residual as a user may write it: a state that is nested, grows and has one tensor twice, an
    h that is not contiguous, and a parameter that all steps share."""

    def __init__(self, dim, depth):
        super().__init__(dim, depth)
        self.gain = nn.Parameter(torch.ones(dim))
        self.shares = nn.ParameterList(torch.ones(()) for _ in range(depth))

    def _start(self, x):
        return x, ((x,), x, x)

    def _step(self, i, y, state):
        (x, *written), older, _ = state
        if y is None:
            return x, ((x, *written), x, x)
        self.note(i, share=self.shares[i])
        written.append(y.to(x.dtype))
        new = (x + self.shares[i] * sum(written) + 0.5 * older).to(x.dtype)
        h = (self.gain * new).to(x.dtype)
        h = h.movedim(-1, 0).contiguous().movedim(0, -1)
        return h, ((new, *written), x, new)


def packed(state):
    """The streams of Multi-Gate Residuals as one tensor [tokens, n, D], as a tuple or not."""
    return state[0] if state[0].ndim == 3 else torch.stack(state, dim=-2)
