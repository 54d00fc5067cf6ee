"""Output and gradient magnitudes against a plain loop and plain hooks, in float64."""

import copy

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.analysis import dynamics
from multigate.analysis.dynamics import Dynamics, gradients, training_dynamics
from multigate.analysis.probe import watch
from traced import by_hand, loss_by_hand, of_one_size, sample, small

NAMES = mg.residual_names()


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=0)


def rms(vectors):
    """Of all vectors of all tokens, one after the other."""
    rows = vectors.detach().numpy().reshape(-1, vectors.shape[-1])
    return sum(np.sqrt(row @ row / len(row)) for row in rows) / len(rows)


def gradients_by_hand(model, tokens):
    """All tokens at once; the squares of every block's parameters in one list."""
    trace = by_hand(model, tokens[:, :-1])
    logits = trace.logits.log_softmax(-1)
    loss = -logits.gather(-1, tokens[:, 1:, None]).mean()
    blocks = [
        [p for i in (2 * k, 2 * k + 1) for p in model.stack.sublayers[i].parameters()]
        for k in range(model.config.blocks)
    ]
    flat = [p for block in blocks for p in block]
    found = torch.autograd.grad(loss, [*trace.hidden, *flat])
    hidden = [np.sqrt(np.mean(g.numpy() ** 2)) for g in found[: len(trace.hidden)]]
    rest, means = list(found[len(trace.hidden) :]), []
    for block in blocks:
        entries = np.concatenate([rest.pop(0).numpy().ravel() for _ in block])
        means.append(np.sqrt(np.mean(entries**2)))
    return means, hidden


@pytest.mark.parametrize("name", NAMES)
def test_output_rms_is_that_of_a_plain_loop(name):
    model, tokens = small(name), sample()
    seen = Dynamics()
    watch(model, tokens, seen, batch=3)
    with torch.no_grad():
        trace = by_hand(model, tokens)
    found = seen.result()
    close(found["output_rms"], [rms(h) for h in of_one_size(trace, name)[2::2]])
    close(found["sublayer_rms"], [rms(y) for y in trace.outputs])


@pytest.mark.parametrize("name", ["prenorm", "mgr-competitive"])
def test_sublayer_rms_is_that_of_plain_hooks(name):
    model, tokens, written = small(name), sample(), []
    hooks = [
        sublayer.register_forward_hook(lambda _, __, y: written.append(rms(y)))
        for sublayer in model.stack.sublayers
    ]
    model(tokens[:, :-1])
    for hook in hooks:
        hook.remove()
    close(training_dynamics(model, tokens, batch=2)["sublayer_rms"], written)


def test_a_skipped_sublayer_has_no_output():
    model, seen = small(), Dynamics()
    with model.stack.skipping(2):
        watch(model, sample(), seen)
    assert np.isnan(seen.result()["sublayer_rms"]).tolist() == [i == 2 for i in range(8)]
    assert np.isfinite(seen.result()["output_rms"]).all()


@pytest.mark.parametrize("batch", [1, 3, None])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_mean_loss_of_all_tokens(name, batch):
    model, tokens = small(name), sample()
    found = gradients(model, tokens, batch)
    blocks, hidden = gradients_by_hand(model, tokens)
    close(found["grad_rms"], blocks)
    close(found["hidden_grad_rms"], hidden)
    assert len(blocks) == 4
    assert len(hidden) == 9


def test_gradient_of_one_weight_by_finite_differences():
    """A block that writes zero, and of which one column of the MLP's last product is alive."""
    model, tokens = small("mgr-independent"), sample()
    sublayers = model.stack.sublayers
    with torch.no_grad():
        for p in (*sublayers[4].parameters(), *sublayers[5].parameters()):
            p.zero_()
        sublayers[5].up.weight[0, 0] = sublayers[5].norm.weight[0] = 1.0
    weight, total = sublayers[5].down.weight, 0.0
    for row in range(weight.shape[0]):
        losses = []
        for shift in (1e-5, -1e-5):
            with torch.no_grad():
                weight[row, 0] += shift
                losses.append(float(loss_by_hand(model, tokens)))
                weight[row, 0] -= shift
        total += ((losses[0] - losses[1]) / 2e-5) ** 2
    size = sum(p.numel() for i in (4, 5) for p in sublayers[i].parameters())
    found = gradients(model, tokens, 2)["grad_rms"][2]
    np.testing.assert_allclose(found, np.sqrt(total / size), rtol=1e-5)
    assert found > 0


def test_all_of_it_in_one_call():
    model, tokens = small("mgr-competitive"), sample()
    found = training_dynamics(model, tokens, batch=4)
    seen = Dynamics()
    watch(model, tokens[:, :-1], seen)
    for key, values in (seen.result() | gradients(model, tokens)).items():
        close(found.pop(key), values)
    assert not found


@pytest.mark.parametrize("old", [False, True])
def test_the_model_is_left_as_it_was_found(old):
    model, tokens = small("mgr-competitive"), sample()
    model.train(old)
    if old:
        model(tokens, tokens).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = copy.deepcopy(before)
    gradients(model, tokens, 3)
    assert all(p.grad is before[name] for name, p in model.named_parameters())
    assert all(g is None or torch.equal(g, values[name]) for name, g in before.items())
    assert any(g is not None for g in before.values()) == old
    assert model.training == old
    assert not {"start", "step"} & set(vars(model.stack.residual))
    assert all(not sublayer._forward_hooks for sublayer in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode_outside(mode):
    model = small("hc")
    expected = gradients(model, sample())
    with mode():
        found = gradients(model, sample(), batch=1)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    for key, values in expected.items():
        close(found[key], values)


def test_frozen_parameters_are_measured_and_stay_frozen():
    model = small("highway")
    expected = gradients(model, sample())
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    found = gradients(model, sample())
    for key, values in expected.items():
        close(found[key], values)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["embed.weight"]


@pytest.mark.parametrize("memory", ["recompute", "invert", "exact"])
def test_memory_modes_and_checkpointing_have_the_same_gradients(memory):
    model, tokens = small("mgr-competitive"), sample()
    lean = small("mgr-competitive", memory=memory)
    lean.stack.checkpointing = True
    expected, found = gradients(model, tokens), gradients(lean, tokens, 3)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-6)


def test_autocast_is_entered_for_every_batch():
    model, tokens = small("mgr-competitive").float(), sample()
    entered = []

    def autocast():
        entered.append(1)
        return torch.autocast("cpu", torch.bfloat16)

    found = gradients(model, tokens, 3, autocast)
    assert len(entered) == 3
    expected = gradients(model, tokens)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=0.1)
        assert not np.allclose(found[key], values, rtol=1e-6)


def test_an_unread_hidden_state_has_no_gradient():
    model = small("mgr-competitive")
    with model.stack.skipping(6, 7):
        hidden = gradients(model, sample())["hidden_grad_rms"]
    assert hidden[6] == hidden[7] == 0
    assert (np.delete(hidden, (6, 7)) > 0).all()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3, 1), "at least 2 tokens in a sample"),
        ((5,), r"tokens must be of shape \[samples, T\] and not empty, got \(5,\)"),
        ((0, 8), "and not empty"),
    ],
)
def test_tokens_that_are_too_few(shape, said):
    with pytest.raises(ValueError, match=said):
        training_dynamics(small(), torch.zeros(shape, dtype=torch.long))


def test_charts_have_a_line_for_each_run():
    runs = {
        "a": {"output_rms": np.array([1.0, 2.0, 31.0]), "grad_rms": np.array([2e-5, 1e-5, 5e-5])},
        "b": {"output_rms": np.array([1.0, 1.0, 2.0]), "grad_rms": np.array([1e-5, 1e-5, 3e-5])},
    }
    (chart,) = dynamics.charts(runs)
    output, gradient = chart.panels
    assert [line.label for line in output.marks] == ["a", "b"]
    assert [line.colour for line in gradient.marks] == [0, 1]
    assert [*output.marks[0].x] == [1, 2, 3]
    assert [*gradient.marks[1].y] == [1e-5, 1e-5, 3e-5]
    assert output.log_y
    assert not gradient.log_y
    assert "a 1 to 31 (the largest 31 times the least); b 1 to 2 (" in chart.seen
    assert chart.claim
    assert not chart.absent


def test_charts_say_which_run_is_missing():
    (chart,) = dynamics.charts({"a": {"output_rms": np.ones(2)}, "b": {}, "c": {}})
    assert len(chart.panels) == 1
    assert chart.absent[0] == "b has no output RMS and no gradient RMS on record."
    (chart,) = dynamics.charts({"a": {}})
    assert chart.panels == []
    assert len(chart.absent) == 1


def test_charts_survive_what_is_not_a_number():
    odd = np.array([np.nan, np.inf, 0.0])
    (chart,) = dynamics.charts({"a": {"output_rms": odd, "grad_rms": np.full(3, np.nan)}})
    assert len(chart.panels) == 2
    (chart,) = dynamics.charts({"a": {"output_rms": np.array([0.0, 1.0, 2.0])}})
    assert not chart.panels[0].log_y
