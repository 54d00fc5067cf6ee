"""`Stack`: any callables, any residual, arguments and extra outputs passed on."""

import pytest
import torch
from torch import nn

import multigate as mg
from cases import Case, all_cases
from multigate.norm import RMSNorm

DIM = 8


def test_plain_functions_and_modules_side_by_side():
    """PreNorm in closed form: 1.5 x twice, then a linear map added."""
    linear = nn.Linear(DIM, DIM)
    stack = mg.Stack([lambda h: 0.5 * h, lambda h: 0.5 * h, linear], residual="prenorm", dim=DIM)
    x = torch.randn(3, DIM)
    torch.testing.assert_close(stack(x), 2.25 * x + linear(2.25 * x))
    assert set(dict(stack.named_parameters())) == {
        "sublayers.2.weight",
        "sublayers.2.bias",
    }


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_the_stack_is_the_loop(case):
    residual = case.build()
    weights = torch.randn(7, 6, 6, dtype=torch.float64)
    sublayers = [lambda h, w=w: torch.tanh(h @ w) for w in weights]
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    h, state = residual.start(x)
    for i in range(7):
        h, state = residual.step(i, torch.tanh(h @ weights[i]), state)
    assert torch.equal(mg.Stack(sublayers, residual)(x), h)


def test_arguments_reach_every_sublayer_and_extras_come_back():
    seen = []

    def talkative(h, scale, *, shift):
        seen.append((scale, shift))
        return scale * h, "attention weights", shift

    def quiet(h, scale, *, shift):
        return h + shift

    stack = mg.Stack([talkative, quiet, talkative], residual="prenorm", dim=DIM)
    x = torch.ones(DIM)
    h, extras = stack(x, 2.0, shift=1.0)
    assert seen == [(2.0, 1.0)] * 2
    assert extras == [("attention weights", 1.0), (), ("attention weights", 1.0)]
    # 1 -> 1 + 2 = 3 -> 3 + 4 = 7 -> 7 + 14 = 21
    torch.testing.assert_close(h, torch.full((DIM,), 21.0))


class Normed(mg.Sublayer):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        self.calls = []

    def body(self, x, factor=1.0):
        self.calls.append(x.detach())
        return factor * torch.tanh(self.linear(x))


@pytest.mark.parametrize("name", mg.residual_names())
def test_norms_are_handed_over_and_change_nothing(name):
    """The residual applies each sublayer's norm and the output's; the result is as if they did."""
    torch.manual_seed(0)
    sublayers = [Normed() for _ in range(5)]
    out_norm = RMSNorm(DIM)
    residual = mg.build_residual(name, DIM, 5)
    handed = mg.Stack(sublayers, residual, out_norm=out_norm)
    own = mg.Stack([lambda h, s=s: s(h) for s in sublayers], residual)
    x = torch.randn(3, DIM)
    result = handed(x)
    inputs = [s.calls.pop() for s in sublayers]
    torch.testing.assert_close(result, out_norm(own(x)), rtol=1e-5, atol=1e-5)
    for given, s in zip(inputs, sublayers, strict=True):
        torch.testing.assert_close(given, s.calls.pop(), rtol=1e-5, atol=1e-5)


def test_hooks_of_a_sublayer_still_fire():
    sublayer = Normed()
    stack = mg.Stack([sublayer, nn.Linear(DIM, DIM)], "prenorm", DIM)
    fired = []
    sublayer.register_forward_hook(lambda *_: fired.append(1))
    stack(torch.randn(2, DIM))
    assert fired == [1]


def test_norm_then_sum():
    """The mHC-lite authors' ending: each stream through the final norm, then the sum."""
    norm = RMSNorm(6).double()
    residual = Case("mhc-lite", {"streams": 3, "norm_then_sum": True}).build(depth=2)
    x = torch.randn(4, 6, dtype=torch.float64)
    h, state = residual.start(x)
    h, state = residual.step(0, torch.tanh(h), state)
    y = torch.tanh(h)
    out, (streams,) = residual.step(1, y, state, norm)
    torch.testing.assert_close(out, sum(norm(streams[:, k]) for k in range(3)))
    with pytest.raises(ValueError, match="norm_then_sum needs the output norm"):
        residual.step(1, y, state)
