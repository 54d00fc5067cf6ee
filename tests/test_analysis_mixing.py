"""Mixing maps against the formulas, and the figures made of them."""

import numpy as np
import pytest
import torch

import multigate as mg
from hooked import DEPTH, alpha_by_hand, array, close, hooked, small_gpt, some_tokens
from multigate.analysis.chart import Heat
from multigate.analysis.mixing import MATRICES, charts, mixing_maps

HYPER = ["hc", "mhc", "mhc-lite"]


def heats(chart):
    return [mark for panel in chart.panels for mark in panel.marks if isinstance(mark, Heat)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("attnres-full", {}),
        ("attnres-block", {"streams": 2}),
        ("mgr-independent", {}),
        ("mgr-competitive", {"streams": 1}),
        ("mgr-competitive", {"streams": DEPTH + 2}),
    ],
)
def test_alpha(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens(5)
    found, seen = mixing_maps(model, tokens, batch=2), hooked(model, tokens)
    rows = [alpha_by_hand(seen, i).mean((0, 1)) for i in range(DEPTH)]
    expected = np.full((DEPTH, max(map(len, rows))), np.nan)
    for i, row in enumerate(rows):
        expected[i, : len(row)] = row
    assert found.keys() == {"alpha"}
    close(found["alpha"], expected)


@pytest.mark.parametrize("name", HYPER)
@pytest.mark.parametrize("options", [{}, {"norm_then_sum": True}], ids=str)
def test_hyper_connections(name, options):
    model, tokens = small_gpt(name, streams=3, residual_options=options), some_tokens(5)
    found, seen = mixing_maps(model, tokens, batch=2), hooked(model, tokens)
    assert found.keys() == {"pre", "post", "mix"}
    expected = {"pre": np.empty((DEPTH, 3)), "post": [], "mix": []}
    for i in range(DEPTH):
        pre, post, mix = model.stack.residual.coefficients(i, seen.streams(i))
        expected["pre"][i] = array(pre).mean((0, 1))
        expected["post"].append(array(post).mean((0, 1)))
        expected["mix"].append(array(mix).mean((0, 1)))
    for key, values in expected.items():
        close(found[key], values)


def test_maps_that_are_the_same_for_every_token():
    model = small_gpt("hc", streams=2, residual_options={"static": True})
    found = mixing_maps(model, some_tokens(5), batch=2)
    for i, maps in enumerate(model.stack.residual.maps):
        close(found["pre"][i], array(maps.pre))
        close(found["post"][i], array(maps.post))
        close(found["mix"][i], array(maps.mix))


@pytest.mark.parametrize("period", [1, 2, 4])
def test_depth_weighted_average(period):
    model = small_gpt("denseformer", residual_options={"period": period})
    found = mixing_maps(model, some_tokens(5), batch=2)
    weights = [array(w) for w in model.stack.residual.weights]
    steps = sorted({*range(period - 1, DEPTH, period), DEPTH - 1})
    assert found.keys() == {"weights", "weights.steps"}
    assert found["weights.steps"].tolist() == steps
    expected = np.full((len(steps), len(steps) + 1), np.nan)
    for row, known in enumerate(weights):
        expected[row, : len(known)] = known
    close(found["weights"], expected)


@pytest.mark.parametrize("name", ["prenorm", "highway"])
def test_where_there_are_none(name):
    found = mixing_maps(small_gpt(name), some_tokens())
    assert found == {}
    (chart,) = charts({name: found})
    assert chart.panels == ()
    assert chart.absent == [f"{name} has no coefficients to read or write with."]


def test_the_figure_of_weights_over_depth():
    alpha = np.array([[0.25, 0.75, np.nan], [0.5, 0.125, 0.375]])
    (chart,) = charts({"plain": {}, "run": {"alpha": alpha}})
    assert chart.absent == ["plain has no weights (alpha) to read by."]
    assert chart.claim == ""
    (heat,) = heats(chart)
    close(heat.values, alpha)
    # Sublayer 1 reads the embedding; sublayer 2 is the first with weights, 3 is the output here.
    assert (list(heat.y), list(heat.x), heat.low, heat.high) == ([2, 3], [0, 1, 2], 0.0, 0.75)
    assert chart.seen == (
        "The output of run is read mostly from source 0 (0.50); source 0, which starts as the "
        "embedding, has 0.38 of what is read on average."
    )


def test_the_figure_of_averages():
    arrays = {
        "weights": np.array([[-0.5, 1.5, np.nan], [0.1, 0.0, 0.5]]),
        "weights.steps": np.array([1, 3]),
    }
    (chart,) = charts({"run": arrays})
    (heat,) = heats(chart)
    assert (heat.low, heat.high, heat.middle, list(heat.y)) == (-1.5, 1.5, 0.0, [2, 4])
    assert chart.seen == (
        "run weighs the newest output by 1.00 on average and earlier ones by 0.200 in absolute "
        "value."
    )


def test_the_figures_of_mixing_matrices():
    mix = np.broadcast_to(np.eye(2), (20, 2, 2)).copy()
    mix[4] = [[0.5, 0.25], [0.5, 0.75]]
    chosen, change = charts({"plain": {}, "run": {"mix": mix}})
    titles = [int(panel.title.removeprefix("sublayer ")) for panel in chosen.panels]
    assert len(titles) == MATRICES
    assert (titles[0], titles[-1]) == (1, 20)
    assert set(np.diff(titles)) <= {3, 4}
    assert all((heat.low, heat.high, heat.middle) == (0.0, 1.0, None) for heat in heats(chosen))
    assert "keeps 0.98 of itself" in chosen.seen
    line = change.panels[0].marks[0]
    assert (line.label, line.colour) == ("run", 1)
    close(line.y, [0.375 if i == 4 else 0.0 for i in range(20)])
    (heat,) = heats(change)
    close(heat.values[:, 4], [0.5, 0.25])
    assert heat.values.shape == (2, 20)
    assert "most at sublayer 5 (0.375)" in change.seen
    assert change.absent == ["plain mixes its streams by no matrix."]


def test_a_matrix_with_both_signs_diverges_from_zero():
    first = charts({"run": {"mix": np.array([[[1.0, -2.0], [0.0, 1.0]]])}})[0]
    (heat,) = heats(first)
    assert (heat.low, heat.high, heat.middle) == (-2.0, 2.0, 0.0)
    close(heat.values, [[1.0, -2.0], [0.0, 1.0]])


def test_the_figure_of_reading_and_writing():
    pre = np.array([[1.0, 0.0], [0.5, 0.25]])
    (chart,) = charts({"run": {"pre": pre, "post": np.array([[1.0, 2.0], [1.0, 2.0]])}})
    read, written = heats(chart)
    close(read.values, [[1.0, 0.5], [0.0, 0.25]])
    close(written.values, [[1.0, 1.0], [2.0, 2.0]])
    assert list(read.x) == list(written.x) == [1, 2]
    assert read.high == written.high == 2.0
    assert "read with (pre) 0.12 (stream 1) to 0.75 (stream 0)" in chart.seen
    assert "written with (post) 1.00 (stream 0) to 2.00 (stream 1)" in chart.seen


def test_every_residual_has_figures_or_is_absent():
    runs = {name: mixing_maps(small_gpt(name), some_tokens(2)) for name in mg.residual_names()}
    drawn = {chart.name: chart for chart in charts(runs)}
    assert list(drawn) == [
        "mixing-alpha",
        "mixing-weights",
        *(f"mixing-mix-{name}" for name in HYPER),
        "mixing-change",
        "mixing-ends",
    ]
    assert all(panel.marks for chart in drawn.values() for panel in chart.panels)
    counts = {"mixing-alpha": 6, "mixing-weights": 9, "mixing-change": 7, "mixing-ends": 7}
    assert {name: len(drawn[name].absent) for name in counts} == counts


def test_a_run_that_has_diverged():
    model = small_gpt("hc")
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    (chart,) = charts({"lost": mixing_maps(model, some_tokens())})
    assert chart.panels == ()
