"""Block pruning against a plain loop that leaves the block out."""

import math

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.analysis import pruning
from multigate.analysis.pruning import block_pruning
from traced import loss_by_hand, sample, small

NAMES = mg.residual_names()
STREAM_MAKERS = {"mgr-independent", "mgr-competitive"}


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=0)


def compare(model, tokens, batch=3):
    """Every figure from a loop; blocks 1 and 2 make the four streams of Multi-Gate Residuals."""
    found = block_pruning(model, tokens, batch)
    fixed = 2 if model.config.residual in STREAM_MAKERS else 0
    with torch.no_grad():
        loss = float(loss_by_hand(model, tokens))
        pruned = [math.nan] * fixed + [
            float(loss_by_hand(model, tokens, (2 * k, 2 * k + 1)))
            for k in range(fixed, model.config.blocks)
        ]
    close(found["loss"], loss)
    close(found["pruned"], pruned)
    np.testing.assert_allclose(found["delta_loss"], np.array(pruned) - loss, atol=1e-10)
    np.testing.assert_allclose(found["delta_ppl"], np.exp(pruned) - math.exp(loss), atol=1e-8)
    assert found["loss"].shape == ()
    assert np.isnan(found["delta_ppl"]).sum() == fixed
    assert (np.abs(found["delta_loss"][fixed:]) > 1e-6).all()


@pytest.mark.parametrize("batch", [3, None])
@pytest.mark.parametrize("name", NAMES)
def test_pruned_losses_are_those_of_a_plain_loop(name, batch):
    compare(small(name), sample(), batch)


@pytest.mark.parametrize("attention", ["moda", "moda-ffn"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_over_depth(name, attention):
    compare(small(name, attention=attention), sample(4))


@pytest.mark.parametrize("attention", ["plain", "moda", "moda-ffn"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_left_out_block_is_read(name, attention):
    """Not its keys and values either, which attention over depth reads in later blocks."""
    model, tokens = small(name, attention=attention), sample(2)
    expected = block_pruning(model, tokens)["pruned"][2]
    with torch.no_grad():
        for i in (4, 5):
            for p in model.stack.sublayers[i].parameters():
                p.fill_(math.nan)
    assert block_pruning(model, tokens)["pruned"][2] == expected
    assert math.isfinite(expected)


@pytest.mark.parametrize("name", sorted(STREAM_MAKERS))
def test_streams_are_pooled_by_the_query_of_the_last_step(name):
    """Of the left-out block's two steps only the last query has a say."""
    model, tokens = small(name), sample(2)
    first, last = model.stack.residual.steps[4:6]
    expected = block_pruning(model, tokens)["pruned"][2]
    with torch.no_grad():
        for p in (first.w1, first.w2, first.b1, last.w1, last.b1):
            p.fill_(math.nan)
        assert block_pruning(model, tokens)["pruned"][2] == expected
        last.w2 += 1
        assert block_pruning(model, tokens)["pruned"][2] != expected


def test_a_block_that_writes_zero_is_worth_nothing():
    model = small("prenorm")
    with torch.no_grad():
        model.stack.sublayers[2].out.weight.zero_()
        model.stack.sublayers[3].down.weight.zero_()
    found = block_pruning(model, sample(), 3)
    assert found["delta_loss"][1] == found["delta_ppl"][1] == 0
    assert (found["delta_loss"][[0, 2, 3]] != 0).all()


@pytest.mark.parametrize(("streams", "fixed"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (9, 4)])
def test_blocks_that_make_streams_cannot_be_removed(streams, fixed):
    found = block_pruning(small("mgr-independent", streams=streams), sample(2))
    for key in ("pruned", "delta_loss", "delta_ppl"):
        assert np.isnan(found[key]).tolist() == [k < fixed for k in range(4)]
    assert np.isfinite(found["loss"])


def test_progress_and_autocast():
    told, entered = [], []

    def autocast():
        entered.append(1)
        return torch.autocast("cpu", torch.bfloat16)

    model = small("mgr-competitive").float()
    found = block_pruning(model, sample(), 3, autocast, lambda *at: told.append(at))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(entered) == 3 * 3
    expected = block_pruning(model, sample())
    np.testing.assert_allclose(found["pruned"], expected["pruned"], rtol=0.02)
    assert found["loss"] != expected["loss"]


def test_the_model_is_whole_again():
    model = small()

    def stop(done, total):
        raise KeyboardInterrupt

    before = model(sample())
    with pytest.raises(KeyboardInterrupt):
        block_pruning(model, sample(), progress=stop)
    assert not model.stack.skipped
    assert torch.equal(model(sample()), before)


def test_a_perplexity_beyond_numbers_is_inf():
    model = small()
    model.stack.register_forward_hook(lambda stack, _, h: 1e4 * h if stack.skipped else h)
    found = block_pruning(model, sample(2))
    assert (found["delta_loss"] > 800).all()
    assert np.isfinite(found["delta_loss"]).all()
    assert np.isposinf(found["delta_ppl"]).all()


def test_a_loss_that_is_not_a_number_counts_as_infinite():
    """NaN is for blocks that cannot be removed."""
    model = small()
    model.stack.sublayers[7].register_forward_hook(
        lambda _, __, y: y * math.nan if model.stack.skipped == {0, 1} else y
    )
    found = block_pruning(model, sample(2))
    assert found["pruned"][0] == found["delta_loss"][0] == found["delta_ppl"][0] == math.inf
    assert np.isfinite(found["pruned"][1:]).all()


def run(changes, loss=2.0):
    pruned = loss + np.array(changes)
    with np.errstate(over="ignore"):
        ppl = np.exp(pruned) - np.exp(loss)
    return {"loss": np.array(loss), "delta_loss": pruned - loss, "delta_ppl": ppl}


def test_charts_have_a_panel_for_each_run():
    runs = {"a": run([3.0, 1.0, 0.5]), "b": run([math.nan, math.nan, 1.0, 2.0])}
    ppl, loss = pruning.charts(runs)
    for chart in (ppl, loss):
        assert [panel.title for panel in chart.panels] == ["a", "b"]
        assert [panel.marks[0].colour for panel in chart.panels] == [0, 1]
        assert [*chart.panels[0].marks[0].x] == [1, 2, 3]
        assert [*chart.panels[1].marks[0].x] == [1, 2, 3, 4]
        assert chart.panels[1].marks[0].missing == "cannot be removed"
        assert chart.absent == ["Blocks 1 and 2 of b make its streams and cannot be removed."]
    assert all(panel.log_y for panel in ppl.panels)
    assert not any(panel.log_y for panel in loss.panels)
    close(loss.panels[1].marks[0].y, [np.nan, np.nan, 1, 2])
    close(ppl.panels[1].marks[0].y, [np.nan, np.nan, *(np.exp([3, 4]) - np.exp(2))])
    assert "the loss of a changes by +0.5 (block 3) to +3 (block 1)" in loss.seen
    assert len(ppl.panels[1].marks[0].notes) == 4


def test_a_bar_that_a_log_axis_cannot_have_is_named():
    ppl, loss = pruning.charts({"a": run([1.0, -0.1, 0.0, 2000.0])})
    assert [*ppl.panels[0].marks[0].x] == [*loss.panels[0].marks[0].x] == [1, 2, 3, 4]
    assert ppl.panels[0].marks[0].y[3] == np.inf
    assert "of a is no higher without blocks 2 or 3" in ppl.seen
    assert "of a is too large to be a number without block 4." in ppl.seen
    assert not ppl.absent
    assert "axis" not in loss.seen


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, "a has no pruned blocks on record."),
        (run([math.nan] * 2), "No block of a can be removed: each makes some of its streams."),
    ],
)
def test_charts_say_why_there_is_nothing(arrays, said):
    for chart in pruning.charts({"a": arrays}):
        assert not chart.panels
        assert chart.absent == [said]
        assert not chart.seen


def test_one_block_that_cannot_be_removed():
    chart = pruning.charts({"a": run([math.nan, 1.0])})[0]
    assert chart.absent == ["Block 1 of a makes its streams and cannot be removed."]


def test_a_perplexity_that_was_beyond_numbers_before_does_not_change():
    arrays = {
        "loss": np.array(800.0),
        "delta_loss": np.array([1.0, 2.0]),
        "delta_ppl": np.full(2, math.nan),
    }
    ppl, loss = pruning.charts({"a": arrays})
    assert not ppl.panels
    assert ppl.absent == ["a has no finite perplexity that could change."]
    assert len(loss.panels) == 1


def test_a_run_without_a_loss_has_nothing_that_could_change():
    ppl, loss = pruning.charts({"a": run([math.nan] * 2, math.nan)})
    assert ppl.absent == ["a has no finite perplexity that could change."]
    assert loss.absent == ["a has no finite loss that could change."]
    assert not ppl.panels
    assert not loss.panels
