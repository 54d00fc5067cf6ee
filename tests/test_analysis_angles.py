"""Angular distance against arccos of a plain loop, and where it is known."""

import math

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.analysis import angles
from multigate.analysis.angles import angular_distance, distance
from traced import by_hand, sample, small

STREAMS = {"hc", "mhc", "mhc-lite", "mgr-independent", "mgr-competitive"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_closed_forms(dtype):
    a = torch.tensor([0.5, -2.0, 1.5, 0.0], dtype=dtype)
    across = torch.tensor([2.0, 0.5, 0.0, 7.0], dtype=dtype)
    assert distance(a, a) == 0
    assert distance(a, 4 * a) == 0
    assert float(distance(a, across)) == pytest.approx(0.5, abs=1e-15)
    assert float(distance(a, -2 * a)) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("degrees", [1e-6, 1.0, 60.0, 135.0, 179.0])
def test_an_angle_is_what_it_is(degrees):
    """Also a tiny one, of which the arc cosine would leave nothing."""
    angle = math.radians(degrees)
    a, b = torch.tensor([[3, 0], [5 * math.cos(angle), 5 * math.sin(angle)]], dtype=torch.float64)
    assert float(distance(a, b)) == pytest.approx(degrees / 180, rel=1e-9)


def plain(a, b):
    """Mean over samples of arccos, for [samples, D] each."""
    cosines = [x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
    return np.mean(np.arccos(np.clip(cosines, -1, 1))) / np.pi


@pytest.mark.parametrize("batch", [3, None])
@pytest.mark.parametrize("name", mg.residual_names())
def test_distances_are_those_of_a_plain_loop(name, batch):
    model, tokens = small(name), sample()
    found = angular_distance(model, tokens, batch)
    with torch.no_grad():
        trace = by_hand(model, tokens)
    hidden = [h[:, -1].numpy() for h in trace.hidden[::2]]
    assert found["hidden"].shape == (5, 5)
    assert ("streams" in found) == (name in STREAMS)
    compare(found["hidden"], hidden)
    for k, stream in enumerate(found.get("streams", ())):
        places = [s[:, -1] for s in trace.streams[::2]]
        compare(stream, [s[:, k].numpy() if k < s.shape[1] else None for s in places])


def compare(found, vectors):
    for a in range(5):
        for b in range(5):
            if a >= b or vectors[a] is None or vectors[b] is None:
                assert math.isnan(found[a, b])
            else:
                np.testing.assert_allclose(found[a, b], plain(vectors[a], vectors[b]), atol=3e-8)


def test_streams_begin_where_they_exist():
    """n = 4: stream 1 and 2 are there from the input of block 2 on, stream 3 from block 3 on."""
    streams = angular_distance(small("mgr-competitive", streams=4), sample())["streams"]
    assert streams.shape == (4, 5, 5)
    first = [int(np.flatnonzero(np.isfinite(stream).any(1))[0]) for stream in streams]
    assert first == [0, 1, 1, 2]


def test_nothing_written_turns_nothing():
    model = small("prenorm")
    with torch.no_grad():
        for sublayer in model.stack.sublayers:
            (sublayer.out if hasattr(sublayer, "out") else sublayer.down).weight.zero_()
    found = angular_distance(model, sample(), 3)["hidden"]
    assert (found[np.triu_indices(5, 1)] == 0).all()


def test_only_the_last_token_counts():
    """Which earlier tokens are behind it matters to attention alone, here switched off."""
    model, tokens = small("prenorm"), sample()
    with torch.no_grad():
        for sublayer in model.stack.sublayers[::2]:
            sublayer.out.weight.zero_()
    other = torch.cat([sample(seed=5)[:, :-1], tokens[:, -1:]], dim=1)
    found = [angular_distance(model, t)["hidden"] for t in (tokens, other)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def test_charts_put_n_over_l():
    distances = np.full((5, 5), np.nan)
    for a in range(5):
        for b in range(a + 1, 5):
            distances[a, b] = 0.1 * (a + 1) + 0.01 * (b - a)
    (chart,) = angles.charts({"a": {"hidden": distances}})
    (panel,) = chart.panels
    (heat,) = panel.marks
    for n in range(1, 5):
        for place in range(1, 5):
            value = heat.values[n - 1, place - 1]
            if place + n <= 5:
                assert value == pytest.approx(0.1 * place + 0.01 * n)
            else:
                assert math.isnan(value)
    assert [*heat.x] == [*heat.y] == [1, 2, 3, 4]
    shown = "by 0.110 at block 1, by 0.210 on average in the rest of the first half and by 0.360 in"
    assert f"{shown} the second." in chart.seen


def test_charts_have_a_panel_for_each_stream():
    arrays = angular_distance(small("mgr-independent"), sample())
    one, several = angles.charts({"p": angular_distance(small(), sample()), "m": arrays})
    assert len(one.panels) == 1
    assert [panel.title for panel in several.panels[1:]] == [f"stream {k}" for k in range(4)]
    steps = [np.nanmean(np.diagonal(stream, 1)) for stream in arrays["streams"]]
    assert f"{min(steps):.3f} (stream {int(np.argmin(steps))})" in several.seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_charts_of_few_blocks(blocks):
    """With one block there is no first half, and the last stream is there at the end alone."""
    arrays = angular_distance(small("mgr-competitive", blocks=blocks), sample())
    (chart,) = angles.charts({"a": arrays})
    assert "nan" not in chart.seen
    assert len(chart.panels) == 1 + len(arrays["streams"])


def test_charts_without_a_record():
    (chart,) = angles.charts({"a": {}})
    assert not chart.panels
    assert len(chart.absent) == 1
    drawn = angles.charts({"a": {}, "b": {"hidden": np.full((3, 3), 0.1)}})
    assert [bool(chart.panels) for chart in drawn] == [False, True]
