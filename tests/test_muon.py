"""Muon: its orthogonalisation, its equations, and other implementations of it."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from multigate.optim import Muon, orthogonalise

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5
SHAPES = [(6, 4), (4, 6), (5, 5), (6, 4), (3, 9), (5, 5)]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(values, rows, columns):
    u = torch.linalg.qr(random(rows, len(values), seed=1))[0]
    v = torch.linalg.qr(random(columns, len(values), seed=2))[0]
    return u, v, u @ torch.diag(values) @ v.T


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (24, 60), (60, 24)])
@pytest.mark.parametrize(
    ("method", "smallest", "low", "high"),
    [("polar-express", 1e-3, 0.85, 1.15), ("newton-schulz", 1e-2, 0.68, 1.14)],
)
def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values(
    rows, columns, method, smallest, low, high
):
    values = torch.logspace(math.log10(5 * smallest), 0, 24, dtype=torch.float64)
    values[0] = smallest * values[1:].norm() / math.sqrt(1 - smallest**2)
    u, v, x = with_singular_values(values, rows, columns)
    for size in (1e-2, 1.0, 1e6):
        core = u.T @ orthogonalise(size * x, method) @ v
        levelled = core.diagonal()
        assert (core - levelled.diag()).abs().max() < 1e-12
        assert low < levelled.min() < 0.95 < levelled.max() < high


def test_newton_schulz_leaves_the_smallest_lower():
    """The price of one triple for all steps: 0.47 at 1e-3, where Polar Express is within 0.15."""
    _, _, x = with_singular_values(torch.tensor([1.0, 1e-3], dtype=torch.float64), 8, 8)
    smallest = torch.linalg.svdvals(orthogonalise(x, "newton-schulz"))[1]
    assert smallest == pytest.approx(0.47, abs=0.01)
    assert torch.linalg.svdvals(orthogonalise(x))[1] > 0.85


def polynomial(x, coefficients, safety, eps):
    """The iteration in numpy, always on the left, one matrix."""
    if x.shape[0] > x.shape[1]:
        return polynomial(x.T, coefficients, safety, eps).T
    x = x / (safety * math.sqrt((x**2).sum()) + eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 4)])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_orthogonalise_is_the_iteration(shape, size):
    x = size * random(2, 3, *shape)
    for method, *iteration in (
        ("polar-express", POLAR_EXPRESS, 1.01, 1e-6),
        ("newton-schulz", NEWTON_SCHULZ, 1.0, 1e-7),
    ):
        out = orthogonalise(x, method)
        for i in range(2):
            for j in range(3):
                expected = polynomial(x[i, j].numpy(), *iteration)
                np.testing.assert_allclose(out[i, j], expected, rtol=1e-10, atol=1e-12)
                alone = orthogonalise(x[i, j], method)
                torch.testing.assert_close(out[i, j], alone, rtol=1e-12, atol=1e-13)


def test_a_tall_matrix_costs_what_a_wide_one_does():
    flops = []
    for shape in ((2, 4, 40), (2, 40, 4)):
        with FlopCounterMode(display=False) as counter:
            orthogonalise(random(*shape))
        flops.append(counter.get_total_flops())
    # Five times X X^T, A A and B X, each two operations a multiplication.
    assert flops == [5 * 2 * (2 * 4 * 4 * 40 + 2 * 4 * 4 * 4 + 2 * 4 * 4 * 40)] * 2


def test_orthogonalise_in_the_asked_precision():
    x = random(8, 12, dtype=torch.float32)
    exact = orthogonalise(x.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(orthogonalise(x).double(), exact, rtol=0, atol=1e-5)
    rough = orthogonalise(x, dtype=torch.bfloat16)
    assert rough.dtype == torch.bfloat16
    assert 1e-4 < (rough.double() - exact).abs().max() < 0.05
    assert orthogonalise(x.bfloat16()).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(orthogonalise(x), orthogonalise(x, dtype=torch.float32))
        torch.testing.assert_close(orthogonalise(x).double(), exact, rtol=0, atol=1e-5)


def test_orthogonalise_of_nothing_is_nothing():
    for dtype in (torch.float32, torch.bfloat16):
        out = orthogonalise(torch.zeros(2, 4, 6), dtype=dtype)
        assert torch.equal(out, torch.zeros(2, 4, 6, dtype=dtype))


def reference_steps(p, gradients, config, method, scale, nesterov):
    """The equations of Muon, one matrix, in numpy."""
    lr, decay, mu = config
    rows, columns = p.shape
    factor = {
        "original": max(1, rows / columns) ** 0.5,
        "match-rms-adamw": 0.2 * max(rows, columns) ** 0.5,
    }[scale]
    iteration = {
        "polar-express": (POLAR_EXPRESS, 1.01, 1e-6),
        "newton-schulz": (NEWTON_SCHULZ, 1.0, 1e-7),
    }[method]
    p, m = p.copy(), np.zeros_like(p)
    for g in gradients:
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m if nesterov else m
        p = p * (1 - lr * decay) - lr * factor * polynomial(u, *iteration)
    return p, m


def muon_after(params, gradients, **options):
    """Parameters after one step for each set of gradients, and the optimizer."""
    params = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = Muon(params, **options)
    for gs in gradients:
        for p, g in zip(params, gs, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    return params, optimizer


def matrices(steps, shapes=SHAPES, dtype=torch.float64):
    params = [random(*shape, seed=k).to(dtype) for k, shape in enumerate(shapes)]
    gradients = [
        [random(*shape, seed=100 * t + k).to(dtype) for k, shape in enumerate(shapes)]
        for t in range(1, steps + 1)
    ]
    return params, gradients


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("method", ["polar-express", "newton-schulz"])
@pytest.mark.parametrize("scale", ["original", "match-rms-adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_its_equations(steps, method, scale, nesterov):
    params, gradients = matrices(steps)
    after, optimizer = muon_after(
        params,
        gradients,
        lr=0.05,
        weight_decay=0.3,
        momentum=0.8,
        method=method,
        scale=scale,
        nesterov=nesterov,
    )
    for k, p in enumerate(params):
        own = [gs[k].numpy() for gs in gradients]
        expected, m = reference_steps(p.numpy(), own, (0.05, 0.3, 0.8), method, scale, nesterov)
        np.testing.assert_allclose(after[k].detach(), expected, rtol=0, atol=1e-11)
        np.testing.assert_allclose(optimizer.state[after[k]]["momentum"], m, rtol=0, atol=1e-13)


def stepped(optimizer, params, gradients):
    for gs in gradients:
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return params


def torch_muon_after(params, gradients, **options):
    params = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.Muon(params, lr=0.05, weight_decay=0.3, momentum=0.9, **options)
    return stepped(optimizer, params, gradients)


@pytest.mark.parametrize("scale", ["original", "match-rms-adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(scale, nesterov, monkeypatch):
    """To the precision of its bfloat16; with our orthogonalisation inside it, exactly."""
    params, gradients = matrices(4)
    options = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9}
    options |= {"method": "newton-schulz", "scale": scale, "nesterov": nesterov}
    adjust = {"adjust_lr_fn": scale.replace("-", "_"), "nesterov": nesterov}
    ours, _ = muon_after(params, gradients, **options)
    for p, mine, theirs in zip(
        params, ours, torch_muon_after(params, gradients, **adjust), strict=True
    ):
        assert (mine - theirs).norm() < 0.02 * (mine - p).norm()
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz",
        lambda u, *_: orthogonalise(u, "newton-schulz"),
    )
    exact = torch_muon_after(params, gradients, **adjust)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def peer_after(params, gradients, **options):
    peers = pytest.importorskip("pytorch_optimizer")
    params = [torch.nn.Parameter(p.clone()) for p in params]
    group = {"params": params, "use_muon": True, "lr": 0.05, "weight_decay": 0.3}
    optimizer = peers.Muon([group], momentum=0.9, **options)
    return stepped(optimizer, params, gradients)


@pytest.mark.parametrize("scale", ["original", "match-rms-adamw"])
def test_muon_is_pytorch_optimizers(scale, monkeypatch):
    """Its own Polar Express (other safety margin, no 1.01, bfloat16) is near; with ours, exact."""
    params, gradients = matrices(4)
    # It bounds the norm from below by a small number, where we add one: large norms hide that.
    gradients = [[1e4 * g for g in gs] for gs in gradients]
    adjusted = {"use_adjusted_lr": scale == "match-rms-adamw"}
    ours, _ = muon_after(params, gradients, lr=0.05, weight_decay=0.3, momentum=0.9, scale=scale)
    near = peer_after(params, gradients, ns_coeffs="polar_express", **adjusted)
    for p, mine, theirs in zip(params, ours, near, strict=True):
        assert (mine - theirs).norm() < 0.15 * (mine - p).norm()
        assert F.cosine_similarity((mine - p).view(-1), (theirs - p).view(-1), dim=0) > 0.99
    base = pytest.importorskip("pytorch_optimizer.optimizer.muon.base")
    iterate = base.zero_power_via_newton_schulz_5
    monkeypatch.setattr(
        base,
        "zero_power_via_newton_schulz_5",
        lambda x, **how: iterate(x, **how, safety_factor=1.01, dtype=torch.float64),
    )
    exact = peer_after(params, gradients, ns_coeffs=POLAR_EXPRESS, **adjusted)
    for p, mine, theirs in zip(params, ours, exact, strict=True):
        assert (mine - theirs).norm() < 1e-8 * (mine - p).norm()


def test_equal_shapes_are_orthogonalised_at_once(monkeypatch):
    params, gradients = matrices(3)
    together, _ = muon_after(params, gradients)
    for k, p in enumerate(params):
        alone, _ = muon_after([p], [[gs[k]] for gs in gradients])
        torch.testing.assert_close(together[k], alone[0], rtol=0, atol=1e-13)
    seen = []
    monkeypatch.setattr(
        "multigate.optim.muon.orthogonalise",
        lambda x, *how: seen.append(tuple(x.shape)) or orthogonalise(x, *how),
    )
    muon_after(params, gradients[:1])
    assert sorted(seen) == [(1, 3, 9), (1, 4, 6), (2, 5, 5), (2, 6, 4)]


def test_parameters_without_gradient_are_left_alone():
    params, gradients = matrices(2)
    gradients[1][0] = None
    after, optimizer = muon_after(params, gradients)
    once, before = muon_after(params, gradients[:1])
    assert torch.equal(after[0], once[0])
    assert torch.equal(optimizer.state[after[0]]["momentum"], before.state[once[0]]["momentum"])
    twice, _ = muon_after(params[3:4], [gs[3:4] for gs in gradients])
    torch.testing.assert_close(after[3], twice[0], rtol=0, atol=1e-13)


def test_decay_is_by_the_learning_rate_alone():
    """No gradient, no scale: what is left of a matrix is 1 - lr wd, whatever its shape."""
    params = [random(9, 1), random(1, 9)]
    for scale in ("original", "match-rms-adamw"):
        zeros = [[torch.zeros_like(p) for p in params]]
        after, _ = muon_after(params, zeros, lr=0.5, weight_decay=0.25, scale=scale)
        for p, q in zip(params, after, strict=True):
            torch.testing.assert_close(q.detach(), p * (1 - 0.5 * 0.25), rtol=1e-14, atol=0)


def test_wrong_inputs_are_said():
    with pytest.raises(ValueError, match=r"matrices only, got a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="unknown method 'svd'"):
        Muon([torch.nn.Parameter(torch.zeros(3, 3))], method="svd")
    with pytest.raises(ValueError, match="unknown scale 'none'"):
        Muon([torch.nn.Parameter(torch.zeros(3, 3))], scale="none")
    with pytest.raises(ValueError, match="unknown method 'svd'"):
        orthogonalise(torch.zeros(3, 3), "svd")
    for x in (torch.zeros(3), torch.zeros(3, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="needs matrices"):
            orthogonalise(x)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["polar-express", "newton-schulz"])
@pytest.mark.parametrize("shape", [(3, 96, 96), (2, 64, 256), (2, 256, 64)])
def test_bfloat16_on_the_gpu(method, shape):
    x = random(*shape)
    out = orthogonalise(x.float().cuda(), method)
    assert out.dtype == torch.bfloat16
    exact = orthogonalise(x, method)
    assert (out.cpu().double() - exact).norm() < 0.02 * exact.norm()
    single = orthogonalise(x.float().cuda(), method, torch.float32).cpu().double()
    assert (single - exact).norm() < 2e-3 * exact.norm()
