"""The paper's initial gate bias: its values, where it has none, and where it is put."""

import math

import pytest
import torch

import multigate as mg


@pytest.mark.parametrize(
    ("depth", "streams", "competitive", "calibrated"),
    [
        (24, 4, 2.8382, -3.0000),
        (24, 8, 2.3953, -2.8888),
        (48, 4, 3.2909, -3.3967),
        (48, 8, 3.0663, -3.3486),
        (72, 4, 3.5328, -3.6169),
        (72, 8, 3.3706, -3.5862),
    ],
)
def test_values_at_the_three_scales(depth, streams, competitive, calibrated):
    assert mg.gate_bias_init(depth + 1 - streams, streams) == pytest.approx(competitive, abs=5e-5)

    def biases(name, **options):
        residual = mg.build_residual(name, 8, depth, streams, **options)
        return {tuple(step.b1.tolist()) for step in residual.steps[streams - 1 :]}

    ((b0, *rest),) = biases("mgr-competitive")
    assert b0 == pytest.approx(competitive, abs=5e-5)
    assert rest == [0.0] * streams
    assert biases("mgr-competitive", bias_init="calibrated") == {(b0, *rest)}
    (independent,) = biases("mgr-independent")
    assert independent == pytest.approx([-competitive] * streams, abs=5e-5)
    (independent,) = biases("mgr-independent", bias_init="calibrated")
    assert independent == pytest.approx([calibrated] * streams, abs=5e-5)


def test_a_number_sets_the_bias_itself():
    independent = mg.build_residual("mgr-independent", 8, 6, 2, bias_init=-1.5).steps[-1].b1
    assert independent.tolist() == [-1.5, -1.5]
    competitive = mg.build_residual("mgr-competitive", 8, 6, 2, bias_init=-1.5).steps[-1].b1
    assert competitive.tolist() == [1.5, 0.0, 0.0]


@pytest.mark.parametrize(("depth", "largest"), [(12, 9), (24, 14), (48, 23)])
def test_no_value_above_the_largest_n(depth, largest):
    mg.build_residual("mgr-competitive", 4, depth, largest)
    for streams in range(largest + 1, depth + 1):
        with pytest.raises(ValueError, match=f"at most {largest} streams"):
            mg.build_residual("mgr-competitive", 4, depth, streams)
    for streams in (depth + 1, depth + 9):
        residual = mg.build_residual("mgr-competitive", 4, depth, streams)
        assert {name.split(".")[-1] for name, _ in residual.named_parameters()} == {"w2"}


def test_the_sigmoid_of_the_base_bias_is_kept_at_the_base():
    beta = 1 / (4 + math.exp(mg.gate_bias_init(21, 4)))
    assert beta == pytest.approx(torch.tensor(-3.0).sigmoid().item())
    assert mg.gate_bias_init(10, 1, base_depth=10, base_bias=-2.0) == pytest.approx(2.0)


@pytest.mark.parametrize(("lerp_depth", "streams"), [(0, 4), (5, 0), (-1, 1)])
def test_nonsense_is_refused(lerp_depth, streams):
    with pytest.raises(ValueError, match="at least one lerp step and one stream"):
        mg.gate_bias_init(lerp_depth, streams)


@pytest.mark.parametrize("variant", ["competitive", "independent"])
def test_the_listing(variant):
    """`MultiGateResidual` against the paper's equations, token by token and stream by stream."""
    torch.manual_seed(0)
    module = mg.MultiGateResidual(5, 3, variant, init_bias=1.25).double()
    assert module.b1.tolist() == ([1.25, 0, 0, 0] if variant == "competitive" else [1.25] * 3)
    assert not module.w1.any()
    assert not module.w2.any()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))
    y, streams = torch.randn(2, 4, 5).double(), torch.randn(2, 4, 3, 5).double()
    h, new = module(layer_output=y, streams=streams)
    w1, w2, b1 = (p.tolist() for p in (module.w1, module.w2, module.b1))
    for b in range(2):
        for t in range(4):
            out, s = y[b, t].tolist(), streams[b, t].tolist()

            def phi(v, w):
                rms = math.sqrt(sum(a * a for a in v) / 5 + 1e-6)
                return sum(a * c for a, c in zip(v, w, strict=True)) / rms / math.sqrt(5)

            if variant == "competitive":
                e = [math.exp(phi(s[i], w1) + b1[1 + i]) for i in range(3)]
                beta = [v / (sum(e) + math.exp(b1[0])) for v in e]
            else:
                beta = [1 / (1 + math.exp(-phi(s[i], w1) - b1[i])) for i in range(3)]
            s = [
                [(1 - g) * a + g * c for a, c in zip(v, out, strict=True)]
                for g, v in zip(beta, s, strict=True)
            ]
            e = [math.exp(phi(v, w2)) for v in s]
            pooled = [sum(e[i] * s[i][c] for i in range(3)) / sum(e) for c in range(5)]
            assert new[b, t].flatten().tolist() == pytest.approx(sum(s, []), abs=1e-12)
            assert h[b, t].tolist() == pytest.approx(pooled, abs=1e-12)
