"""Recorded coefficients are the ones that were used: h and the streams follow from them."""

import pytest
import torch

from cases import DEPTH, Case, packed, random_inputs, run


def recorded(name, **options):
    residual = Case(name, options).build()
    x, ys = random_inputs(4)
    with residual.recording() as steps:
        hs, states = run(residual, x, ys)
    return ys, hs, states, steps


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["mgr-independent", "mgr-competitive"])
@pytest.mark.parametrize("streams", [1, 3, DEPTH + 1])
def test_multigate(name, streams):
    ys, hs, states, steps = recorded(name, streams=streams, bias_init=-2.0)
    for i in range(DEPTH):
        before, after = map(packed, states[i : i + 2])
        alpha = steps[i]["alpha"]
        close(alpha.sum(-1), torch.ones(4, dtype=torch.float64))
        close((alpha.unsqueeze(-1) * after).sum(-2), hs[i + 1])
        assert ("beta" in steps[i]) == (i >= streams - 1)
        if "beta" in steps[i]:
            beta = steps[i]["beta"].unsqueeze(-1)
            close((1 - beta) * before + beta * ys[i].unsqueeze(-2), after)


@pytest.mark.parametrize(
    ("name", "options"), [("attnres-full", {}), ("attnres-block", {"streams": 3})]
)
def test_attention_residuals(name, options):
    _, hs, states, steps = recorded(name, **options)
    for i in range(DEPTH):
        closed, block = states[i + 1]
        sources = torch.stack(closed + block, dim=-2)
        close((steps[i]["alpha"].unsqueeze(-1) * sources).sum(-2), hs[i + 1])


@pytest.mark.parametrize("name", ["hc", "mhc", "mhc-lite"])
def test_hyper_connections(name):
    ys, hs, states, steps = recorded(name, streams=3)
    for i in range(DEPTH):
        before, after = states[i][0], states[i + 1][0]
        close((steps[i - 1]["pre"].unsqueeze(-1) * before).sum(-2), hs[i])
        post, mix = steps[i]["post"], steps[i]["mix"]
        mixed = torch.einsum("tjk,tjd->tkd", mix, before)
        close(post.unsqueeze(-1) * ys[i].unsqueeze(-2) + mixed, after)
    assert "pre" not in steps[DEPTH - 1]


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_highway(gate):
    ys, hs, _, steps = recorded("highway", gate=gate)
    for i in range(DEPTH):
        beta = steps[i]["beta"]
        close((1 - beta) * hs[i] + beta * ys[i], hs[i + 1])


def test_denseformer():
    _, hs, states, steps = recorded("denseformer")
    assert sorted(steps) == [1, 3, 5, 6]
    for i, coefficients in steps.items():
        _, *outputs = states[i + 1]
        close(sum(w * v for w, v in zip(coefficients["weights"], outputs, strict=True)), hs[i + 1])


def test_prenorm_has_none():
    assert recorded("prenorm")[3] == {}
