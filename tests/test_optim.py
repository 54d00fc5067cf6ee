"""The optimizer as one: groups, AdamW, clip, steps that are skipped, and state."""

import math
import re

import pytest
import torch

import multigate as mg
from multigate.optim import OptimConfig, build_optimizer, not_finite, parameter_groups


def small(residual="mgr-competitive", seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "blocks": 2, "width": 32, "heads": 2, "context": 16, **changes}
    return mg.GPT(mg.preset("tiny", residual=residual, **sizes))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def set_gradients(model, seed, dtype=torch.float32):
    for k, p in enumerate(model.parameters()):
        p.grad = random(*p.shape, seed=1000 * seed + k, dtype=dtype).to(p.device)


def learn(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.set_step(step)
        optimizer.step(not_finite(optimizer.clip()))


def everything(model, optimizer):
    tensors = {**dict(model.named_parameters()), **optimizer.state()}
    return {name: t.detach().clone() for name, t in tensors.items()}


def assert_identical(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_the_share_moves_both_learning_rates():
    model = small()
    config = OptimConfig(lr_muon=0.4, lr_adamw=0.2, warmup=3, floor=0.5)
    optimizer = build_optimizer(model, config, steps=9)

    def rates():
        return [[g["lr"] for g in o.param_groups] for o in (optimizer.muon, optimizer.adamw)]

    assert rates() == [[0.1], [0.05, 0.05]]
    optimizer.set_share(0.25)
    assert rates() == [[0.1], [0.05, 0.05]]
    assert optimizer.set_step(3) == 1.0
    assert rates() == [[0.4], [0.2, 0.2]]
    assert optimizer.set_step(9) == 0.5
    assert rates() == [[0.2], [0.1, 0.1]]


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_gets_its_settings(nesterov):
    config = OptimConfig(
        lr_muon=0.4,
        weight_decay=0.3,
        momentum=0.7,
        nesterov=nesterov,
        method="newton-schulz",
        scale="match-rms-adamw",
        warmup=0,
    )
    (group,) = build_optimizer(small(), config, 9, torch.bfloat16).muon.param_groups
    shared = ("weight_decay", "momentum", "nesterov", "method", "scale")
    assert {n: group[n] for n in shared} == {n: getattr(config, n) for n in shared}
    assert (group["lr"], group["dtype"]) == (0.4, torch.bfloat16)


MATRIX = re.compile(r"stack\.sublayers\.\d+\.(q|k|v|out|up|down)\.weight")
MAPS = {
    "hc": ("w_mix",),
    "mhc": ("w_pre", "w_post", "w_mix"),
    "mhc-lite": ("w_pre", "w_post", "w_mix"),
}
"""What is decayed of a residual: the dynamic maps of the hyper-connections and nothing else."""


@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
@pytest.mark.parametrize("residual", mg.residual_names())
def test_groups_by_name(residual, attention):
    model = small(residual, attention=attention)
    groups = parameter_groups(model)
    assert list(groups) == ["muon", "decayed", "undecayed"]
    named = dict(model.named_parameters())
    assert sum(map(len, groups.values())) == len(named)
    for name, p in named.items():
        assert [g for g in groups if name in groups[g]] == [_expected(residual, name)], name
        assert groups[_expected(residual, name)][name] is p
    # Two blocks of q, k, v, out, up and down; the first MLP of moda-ffn has a k and a v.
    assert len(groups["muon"]) == (12 if attention == "plain" else 14)
    assert ("stack.sublayers.1.k.weight" in groups["muon"]) == (attention == "moda-ffn")

    without = parameter_groups(model, muon=False)
    assert without["muon"] == {}
    assert without["decayed"].keys() == groups["muon"].keys() | groups["decayed"].keys()
    assert without["undecayed"].keys() == groups["undecayed"].keys()


def _expected(residual, name):
    if MATRIX.fullmatch(name):
        return "muon"
    ending = name.split(".")[-1]
    mapped = name.startswith("stack.residual.maps.") and ending in MAPS.get(residual, ())
    return "decayed" if name == "embed.weight" or mapped else "undecayed"


def test_what_is_no_matrix_is_not_muons():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(4))
            self.mix = torch.nn.Parameter(torch.zeros(2, 4))
            self.weight = torch.nn.Parameter(torch.zeros(2, 4, 4))

    model = torch.nn.Module()
    model.stack = mg.Stack([Experts()], "prenorm", dim=4)
    groups = {group: list(names) for group, names in parameter_groups(model).items()}
    names = [f"stack.sublayers.0.{name}" for name in ("mix", "weight", "bias")]
    assert groups == {"muon": names[:1], "decayed": names[1:2], "undecayed": names[2:]}


def test_a_wrapped_model_is_refused():
    model = small()
    for wrapped in (torch.nn.Sequential(model), torch.compile(model, backend="eager"), model.embed):
        with pytest.raises(ValueError, match="hand in the model itself"):
            parameter_groups(wrapped)


def test_adamw_is_its_equations():
    """Three steps of two parameters, one decayed, at a share of the learning rate, in float64."""
    model = small("hc").double()
    config = OptimConfig(lr_adamw=0.02, weight_decay=0.4, beta1=0.7, beta2=0.8, eps=1e-3, warmup=1)
    optimizer = build_optimizer(model, config, steps=4)
    names = {"embed.weight": 0.4, "stack.residual.maps.1.mix": 0.0, "stack.out_norm.weight": 0.0}
    named = dict(model.named_parameters())
    before = {n: (named[n].detach().clone(), 0.0, 0.0) for n in names}
    for t in range(1, 4):
        set_gradients(model, t, torch.float64)
        share = optimizer.set_step(t - 1)
        optimizer.step()
        for n, decay in names.items():
            (p, m, v), g = before[n], named[n].grad
            m, v = 0.7 * m + 0.3 * g, 0.8 * v + 0.2 * g**2
            p = p * (1 - 0.02 * share * decay)
            p = p - 0.02 * share * (m / (1 - 0.7**t)) / ((v / (1 - 0.8**t)).sqrt() + 1e-3)
            before[n] = p, m, v
    for n in names:
        torch.testing.assert_close(named[n].detach(), before[n][0], rtol=0, atol=1e-12)
        assert optimizer.state()[f"step.{n}"] == 3


def test_without_muon_all_is_adamw():
    model = small()
    optimizer = build_optimizer(model, OptimConfig(muon=False, lr_adamw=0.01), steps=10)
    assert optimizer.muon is None
    set_gradients(model, 1)
    before = everything(model, optimizer)
    optimizer.set_share(1.0)
    optimizer.step()
    name = "stack.sublayers.0.q.weight"
    p = dict(model.named_parameters())[name]
    expected = before[name] * (1 - 0.01 * 0.1) - 0.01 * p.grad.sign()
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)
    assert not any(n.startswith("momentum.") for n in optimizer.state())


def test_clip_is_by_the_norm_of_all_gradients():
    model, twin = small(), small()
    optimizer = build_optimizer(model, OptimConfig(clip=0.5), steps=10)
    for m in (model, twin):
        set_gradients(m, 1)
    model.embed.weight.grad = twin.embed.weight.grad = None
    norm = optimizer.clip()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(optimizer.clip(), torch.tensor(0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("clip", "norm"), [(0.0, 1e3), (1e9, 1e3), (1.0, math.nan)])
def test_gradients_that_need_no_clip_stay_as_they_are(clip, norm):
    model = small()
    optimizer = build_optimizer(model, OptimConfig(clip=clip), steps=10)
    set_gradients(model, 1)
    if math.isnan(norm):
        model.stack.sublayers[0].q.weight.grad[3, 4] = norm
    before = [p.grad.clone() for p in model.parameters()]
    measured = optimizer.clip()
    assert measured.isnan() if math.isnan(norm) else 100 < measured < norm
    for p, g in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)
    assert not_finite(measured) == float(math.isnan(norm))
    optimizer.zero_grad()
    assert optimizer.clip() == 0


@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_bad_step_changes_nothing(muon, bad):
    """Also one with finite gradients: the reason may be elsewhere."""
    runs = []
    for steps in (("good", "bad", "good"), ("good", "good")):
        model = small("hc")
        optimizer = build_optimizer(model, OptimConfig(muon=muon, warmup=0), steps=10)
        for k, kind in enumerate(steps):
            set_gradients(model, 7 if kind == "bad" else min(k, 1))
            if kind == "bad":
                for p in list(model.parameters())[::2]:
                    p.grad.view(-1)[-1] = bad
                before = everything(model, optimizer)
                norm = optimizer.clip()
                assert not_finite(norm) == float(bad != 1)
                optimizer.step(torch.tensor(1.0))
                assert_identical(everything(model, optimizer), before)
            else:
                optimizer.step(not_finite(optimizer.clip()))
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


def test_a_step_that_is_not_skipped_is_the_step_without_found_inf():
    models = small(), small()
    for model, found_inf in zip(models, (None, torch.tensor(0.0)), strict=True):
        optimizer = build_optimizer(model, OptimConfig(warmup=0), steps=10)
        set_gradients(model, 1)
        optimizer.step(found_inf)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def test_a_step_reads_nothing_back():
    """Fake tensors hold no numbers: whoever asked for one on the host would fail."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        model = small()
        optimizer = build_optimizer(model, OptimConfig(), steps=10)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        norm = optimizer.clip()
        optimizer.step(not_finite(norm))
        with pytest.raises(DataDependentOutputException):
            norm.item()


@pytest.mark.parametrize("muon", [True, False])
def test_state_continues_a_run_bit_for_bit(muon):
    config = OptimConfig(muon=muon, warmup=2)
    model = small()
    optimizer = build_optimizer(model, config, steps=6)
    learn(model, optimizer, range(3))
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    state = {n: t.clone() for n, t in optimizer.state().items()}
    learn(model, optimizer, range(3, 6))

    other = small(seed=1)
    other.load_state_dict(weights)
    resumed = build_optimizer(other, config, steps=6)
    tensors = list(resumed.state().values())
    resumed.load_state(state)
    assert all(a is b for a, b in zip(tensors, resumed.state().values(), strict=True))
    learn(other, resumed, range(3, 6))
    assert_identical(everything(other, resumed), everything(model, optimizer))


def test_state_is_there_from_the_start_under_plain_names():
    model = small()
    state = build_optimizer(model, OptimConfig(), steps=6).state()
    groups = parameter_groups(model)
    expected = {f"momentum.{n}" for n in groups["muon"]}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        expected |= {f"{kind}.{n}" for n in (*groups["decayed"], *groups["undecayed"])}
    assert state.keys() == expected
    for name, t in state.items():
        kind, parameter = name.split(".", 1)
        shape = () if kind == "step" else dict(model.named_parameters())[parameter].shape
        assert torch.equal(t, torch.zeros(shape))


def test_a_foreign_state_is_refused_and_nothing_is_taken_over():
    optimizer = build_optimizer(small(), OptimConfig(), steps=6)
    state = {n: torch.ones_like(t) for n, t in optimizer.state().items()}
    gone = {n: t for n, t in state.items() if n != "exp_avg.embed.weight"}
    with pytest.raises(ValueError, match="lacks 'exp_avg.embed.weight', unlike"):
        optimizer.load_state(gone)
    with pytest.raises(ValueError, match="has 'momentum.a' and 1 more, unlike"):
        optimizer.load_state({**state, "momentum.b": torch.ones(1), "momentum.a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'exp_avg.embed.weight' has shape \(3,\) but the model"):
        optimizer.load_state({**state, "exp_avg.embed.weight": torch.ones(3)})
    assert not any(t.any() for t in optimizer.state().values())


def test_a_run_has_steps():
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        build_optimizer(small(), OptimConfig(), steps=0)


@pytest.mark.gpu
def test_steps_on_the_gpu_are_those_on_the_cpu():
    runs = []
    for device in ("cpu", "cuda"):
        model = small("hc").to(device)
        optimizer = build_optimizer(model, OptimConfig(warmup=0), 10, dtype=torch.float32)
        for k in range(3):
            set_gradients(model, k)
            optimizer.step(not_finite(optimizer.clip()))
        runs.append(everything(model, optimizer))
    for name, t in runs[0].items():
        torch.testing.assert_close(runs[1][name].cpu(), t, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_on_the_gpu_changes_nothing(bad):
    model = small("hc").cuda()
    optimizer = build_optimizer(model, OptimConfig(warmup=0), steps=10)
    set_gradients(model, 1)
    optimizer.step(not_finite(optimizer.clip()))
    before = everything(model, optimizer)
    set_gradients(model, 2)
    model.stack.sublayers[2].q.weight.grad[0, 0] = bad
    optimizer.step(not_finite(optimizer.clip()))
    assert_identical(everything(model, optimizer), before)
    set_gradients(model, 2)
    optimizer.step(not_finite(optimizer.clip()))
    after = everything(model, optimizer)
    assert not any(torch.equal(after[n], before[n]) for n in optimizer.state())


@pytest.mark.gpu
@pytest.mark.parametrize("muon", [True, False])
def test_a_step_does_not_wait_for_the_gpu(muon):
    model = small("hc").cuda()
    optimizer = build_optimizer(model, OptimConfig(muon=muon), steps=10)
    set_gradients(model, 1)
    optimizer.step(not_finite(optimizer.clip()))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.set_step(1)
        optimizer.step(not_finite(optimizer.clip()))
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
