"""Gate statistics against the formulas in numpy, and the figures made of them."""

import numpy as np
import pytest
import torch

import multigate as mg
from hooked import (
    DEPTH,
    alpha_by_hand,
    beta_by_hand,
    close,
    hooked,
    small_gpt,
    some_tokens,
)
from multigate.analysis.chart import Bars, Boxes, Line
from multigate.analysis.gates import CLAIMS, SHOWN, Gates, charts, gate_statistics
from multigate.analysis.probe import watch
from multigate.analysis.running import BINS

CASES = [(name, {}) for name in mg.residual_names()] + [
    ("highway", {"residual_options": {"gate": "vector"}}),
    ("attnres-block", {"streams": 2}),
    ("mgr-independent", {"streams": 1}),
    ("mgr-competitive", {"streams": DEPTH + 1}),
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_against_the_formulas(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens(5)
    found, seen = gate_statistics(model, tokens, batch=2), hooked(model, tokens)
    expected = set()
    for kind, by_hand in (("beta", beta_by_hand), ("alpha", alpha_by_hand)):
        rows = [by_hand(seen, i) for i in range(DEPTH)]
        if all(row is None for row in rows):
            continue
        expected |= {f"{kind}.counts", f"{kind}.boxes", f"{kind}.mean"}
        most = max(row.shape[-1] for row in rows if row is not None)
        means = np.full((DEPTH, most), np.nan)
        for i, row in enumerate(rows):
            counts, box = found[f"{kind}.counts"][i], found[f"{kind}.boxes"][i]
            if row is None:
                assert counts.sum() == 0
                assert np.isnan(box).all()
                continue
            means[i, : row.shape[-1]] = row.mean((0, 1))
            assert counts.sum() == row.size
            # The last digit may put a value at the end of a bin into the next one.
            assert np.abs(counts - np.histogram(row, BINS, (0, 1))[0]).sum() <= 2
            close(box[[0, 4, 5]], [row.min(), row.max(), row.mean()], 1e-6)
            ordered = np.sort(row, axis=None)
            for share, quartile in zip((0.25, 0.5, 0.75), box[1:4], strict=True):
                known = ordered[int(np.ceil(share * row.size)) - 1]
                assert abs(quartile - known) <= 1.5 / BINS
        close(found[f"{kind}.mean"], means)
    assert found.keys() == expected


def test_the_means_of_very_many_gates_are_left_out():
    model = small_gpt("highway", width=66, heads=1, residual_options={"gate": "vector"})
    found = gate_statistics(model, some_tokens(2))
    assert found.keys() == {"beta.counts", "beta.boxes"}
    assert (found["beta.counts"].sum(1) == 2 * 8 * 66).all()


def test_a_skipped_sublayer_has_no_gate():
    model, gates = small_gpt("mgr-competitive"), Gates()
    with model.stack.skipping(DEPTH - 1):
        watch(model, some_tokens(), gates)
    found = gates.result()
    assert len(found["beta.counts"]) == DEPTH
    assert found["beta.counts"][-1].sum() == 0
    assert np.isnan(found["beta.mean"][-1]).all()
    assert np.isfinite(found["alpha.mean"][-1]).all()


def made(values):
    """Arrays of a run of two sublayers, the first of which has no gate."""
    counts = np.zeros((2, BINS), dtype=np.int64)
    np.add.at(counts[1], (np.array(values) * BINS).astype(int).clip(max=BINS - 1), 1)
    boxes = np.full((2, 6), np.nan)
    boxes[1] = [*np.quantile(values, [0, 0.25, 0.5, 0.75, 1]), np.mean(values)]
    return {"beta.counts": counts, "beta.boxes": boxes}


def test_the_figure_of_known_gates():
    runs = {"plain": {}, "gated": made([0.05, 0.05, 0.15, 0.75])}
    beta, alpha = charts(runs)
    assert (beta.name, beta.claim) == ("gates-beta", CLAIMS["beta"])
    assert beta.absent == ["plain has no gates."]
    assert beta.seen == ("gated: 0.250 on average, 50.0% below 0.1, the largest 0.75 (sublayer 2).")
    histogram, by_sublayer = beta.panels
    bars, mean = histogram.marks
    assert isinstance(bars, Bars)
    assert isinstance(mean, Line)
    assert histogram.log_y
    assert (bars.colour, mean.colour) == (1, 1)
    assert len(bars.x) == len(bars.notes) == SHOWN
    shares = {float(x): float(y) for x, y in zip(bars.x, bars.y, strict=True) if y > 0}
    assert shares == {3.5 / SHOWN: 0.5, 9.5 / SHOWN: 0.25, 48.5 / SHOWN: 0.25}
    assert bars.notes[3] == "0.047 to 0.062: 50.000%"
    assert np.isnan(np.array(bars.y)).sum() == SHOWN - 3
    assert list(mean.x) == [0.25, 0.25]
    (boxes,) = by_sublayer.marks
    assert isinstance(boxes, Boxes)
    assert list(boxes.x) == [1, 2]
    close(boxes.boxes, runs["gated"]["beta.boxes"])
    assert (alpha.panels, alpha.claim, alpha.seen) == ((), "", "")
    assert alpha.absent == ["plain has no pool weights.", "gated has no pool weights."]


def test_the_mean_of_all_weighs_sublayers_by_their_values():
    arrays = made([0.2, 0.4])
    arrays["beta.counts"][0, 0] = 6
    arrays["beta.boxes"][0] = 0.0
    assert charts({"run": arrays})[0].seen.startswith("run: 0.075 on average")


def test_where_there_are_none():
    (chart,) = charts({"plain": {}, "other": {}})
    assert chart.panels == ()
    assert chart.absent == [
        "plain has neither gates nor pool weights.",
        "other has neither gates nor pool weights.",
    ]


def test_a_run_that_has_diverged():
    model = small_gpt("mgr-competitive")
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    beta, alpha = charts({"lost": gate_statistics(model, some_tokens()), "good": made([0.5, 0.25])})
    assert beta.absent == ["The beta of lost are not finite."]
    assert len(beta.panels) == 2
    assert alpha.absent[0] == "The alpha of lost are not finite."


def test_every_residual_has_figures_or_is_absent():
    runs = {name: gate_statistics(small_gpt(name), some_tokens(2)) for name in mg.residual_names()}
    beta, alpha = charts(runs)
    assert [panel.title.split(":")[0] for panel in beta.panels[::2]] == [
        "highway",
        "mgr-independent",
        "mgr-competitive",
    ]
    assert len(beta.absent) == 7
    assert len(alpha.panels) == 2 * 4
    assert len(alpha.absent) == 6
