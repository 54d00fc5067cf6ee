"""The largest values against a sort of all numbers of a plain loop, and planted ones."""

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.analysis import massive
from multigate.analysis.massive import massive_activations
from traced import by_hand, of_one_size, sample, small

STREAMS = {"hc", "mhc", "mhc-lite", "mgr-independent", "mgr-competitive"}


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", mg.residual_names())
def test_the_largest_are_those_of_a_sort(name):
    model, tokens = small(name), sample()
    found = massive_activations(model, tokens, batch=3)
    with torch.no_grad():
        trace = by_hand(model, tokens)
    for i, h in enumerate(of_one_size(trace, name)[1:]):
        values = np.sort(np.abs(h.numpy()).ravel())
        close(found["hidden"][i], values[:-4:-1])
        close(found["mean"][i], values.sum() / len(values))
    assert found["hidden"].shape == (8, 3)
    assert ("streams" in found) == (name in STREAMS)
    if name not in STREAMS:
        return
    assert found["streams"].shape == (8, 4)
    for i, streams in enumerate(trace.streams[1:]):
        count = streams.shape[2]
        for k in range(count):
            close(found["streams"][i, k], np.abs(streams[:, :, k].numpy()).max())
        assert np.isnan(found["streams"][i, count:]).all()


def test_streams_that_do_not_exist_are_nan():
    """n = 4: stream 0 is the embedding, sublayers 0 to 2 make the others."""
    streams = massive_activations(small("mgr-competitive", streams=4), sample())["streams"]
    missing = [(i, k) for i in range(8) for k in range(4) if k > i + 1]
    assert [tuple(place) for place in np.argwhere(np.isnan(streams))] == missing
    assert missing == [(0, 2), (0, 3), (1, 3)]


def test_one_stream_is_not_several():
    assert "streams" not in massive_activations(small("mgr-competitive", streams=1), sample())
    assert "streams" not in massive_activations(small("hc", streams=1), sample())


def planted(places, sublayer=5, name="prenorm"):
    """What is found where a sublayer writes 900, -800 and 700 at (sample, position, channel)."""
    model, tokens, sizes = small(name), sample(), (900.0, -800.0, 700.0)
    rows = []

    def plant(_, __, y):
        first = sum(rows)
        rows.append(len(y))
        for (row, position, channel), size in zip(places, sizes, strict=True):
            if first <= row < first + len(y):
                y[row - first, position, channel] = size
        return y

    model.stack.sublayers[sublayer].register_forward_hook(plant)
    return massive_activations(model, tokens, batch=3)


@pytest.mark.parametrize(
    "places",
    [
        [(6, 4, 2), (6, 4, 3), (6, 4, 15)],
        [(4, 0, 7), (4, 11, 7), (0, 3, 7)],
        [(2, 1, 0), (3, 1, 0), (6, 1, 0)],
    ],
    ids=["one token", "two batches", "three batches"],
)
def test_planted_values_are_found_where_they_are(places):
    hidden = planted(places)["hidden"]
    assert (hidden[:5] < 50).all()
    np.testing.assert_allclose(hidden[5], [900, 800, 700], rtol=0.05)
    assert (hidden[6:] > 500).all()


def test_a_planted_stream_is_found():
    """Sublayer 1 makes stream 2."""
    streams = planted([(6, 4, 2), (6, 4, 3), (6, 4, 15)], 1, "mgr-competitive")["streams"]
    assert streams[1, 2] == 900
    assert np.nanmax(streams[:2, :2]) < 50


def recorded():
    wide = {"hidden": np.arange(24.0).reshape(8, 3)[:, ::-1] + 1, "mean": np.full(8, 0.5)}
    several = {**wide, "streams": np.arange(16.0).reshape(8, 2) + 1}
    several["streams"][0, 1] = np.nan
    return {"one": wide, "many": several}


def test_charts_split_attention_from_ffn():
    attention, ffn, streams = massive.charts(recorded())
    for chart, numbers in ((attention, [1, 3, 5, 7]), (ffn, [2, 4, 6, 8])):
        assert [panel.title for panel in chart.panels] == ["one", "many"]
        for panel in chart.panels:
            assert panel.log_y
            assert [line.label for line in panel.marks] == ["top 3", "top 2", "top 1", "mean"]
            assert [line.dashed for line in panel.marks] == [False] * 3 + [True]
            assert all([*line.x] == numbers for line in panel.marks)
    assert [*attention.panels[0].marks[1].y] == [2, 8, 14, 20]
    assert [*ffn.panels[0].marks[2].y] == [6, 12, 18, 24]
    assert "one 21 after sublayer 7, 42 times the mean there" in attention.seen
    assert "one 24 after sublayer 8, 48 times the mean there" in ffn.seen
    (panel,) = streams.panels
    assert [line.colour for line in panel.marks] == [0, 1]
    assert [*panel.marks[0].x] == [*range(1, 9)]
    assert [*panel.marks[0].y] == [*range(1, 17, 2)]
    assert "many 16 (stream 1), 15 in the smallest stream" in streams.seen
    assert streams.absent == ["one does not carry several streams."]


def test_charts_without_anything_to_draw():
    for chart in massive.charts({"a": {}}):
        assert not chart.panels
        assert len(chart.absent) == 1
        assert not chart.seen


def test_charts_survive_what_is_not_a_number():
    broken = {"hidden": np.full((4, 3), np.nan), "mean": np.full(4, np.nan)}
    charts = massive.charts({"a": {**broken, "streams": np.full((4, 2), np.nan)}})
    assert [len(chart.panels) for chart in charts] == [1, 1, 1]
