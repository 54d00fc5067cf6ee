"""Speed and shares of streams: products of gates, exactness, and the figures made of them."""

import numpy as np
import pytest
import torch

import multigate as mg
from hooked import (
    DEPTH,
    WIDTH,
    alpha_by_hand,
    array,
    beta_by_hand,
    close,
    hooked,
    small_gpt,
    some_tokens,
)
from multigate.analysis.life import Life, charts, speed, stream_life
from multigate.analysis.probe import Probe, watch

HYPER = ["hc", "mhc", "mhc-lite"]
MGR = ["mgr-independent", "mgr-competitive"]
LINEAR = [
    ("prenorm", {}),
    ("highway", {}),
    *((name, {"streams": 3}) for name in HYPER + MGR),
    ("hc", {"residual_options": {"static": True}}),
    ("mhc", {"streams": 1}),
    ("mgr-independent", {"streams": 1}),
    ("mgr-competitive", {"streams": 2}),
    ("mgr-competitive", {"streams": DEPTH + 2}),
]
CONVEX = [case for case in LINEAR if case[0] == "highway" or case[0] in MGR]
linear = pytest.mark.parametrize(("name", "settings"), LINEAR, ids=str)


def shares_by_hand(seen):
    """[..., n, depth + 1], each writer by itself: what it put in, times all that is kept later."""
    residual = seen.residual
    shares = np.zeros((*seen.x.shape[:-1], seen.streams(DEPTH).shape[-2], DEPTH + 1))
    if residual.name == "prenorm":
        return shares + 1
    if residual.name in HYPER:
        maps = [map(array, residual.coefficients(i, seen.streams(i))) for i in range(DEPTH)]
        _, post, mix = zip(*maps, strict=True)
        for writer in range(DEPTH + 1):
            into = post[writer - 1] if writer else np.ones_like(post[0])
            for later in mix[writer:]:
                into = np.einsum("btj,btjk->btk", into, later)
            shares[..., writer] = into
        return shares
    beta = [beta_by_hand(seen, i) for i in range(DEPTH)]
    for k in range(shares.shape[-2]):
        for writer in range(DEPTH + 1):
            if writer and beta[writer - 1] is not None:
                share = beta[writer - 1][..., k]
            else:
                share = float(writer == k)
            for later in beta[writer:]:
                share = share * (1 if later is None else 1 - later[..., k])
            shares[..., k, writer] = share
    return shares


@linear
def test_shares_are_products_of_gates(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens(5)
    found, seen = stream_life(model, tokens, batch=2), hooked(model, tokens)
    shares = shares_by_hand(seen)
    close(found["shares"], shares.mean((0, 1)))
    assert ("final" in found) == (name in MGR)
    if "final" in found:
        alpha = alpha_by_hand(seen, DEPTH - 1)
        close(found["final"], (alpha[..., None] * shares).sum(-2).mean((0, 1)))


@pytest.mark.parametrize(("name", "settings"), CONVEX, ids=str)
def test_shares_of_a_gated_stream_sum_to_one(name, settings):
    found = stream_life(small_gpt(name, **settings), some_tokens(), batch=2)
    assert (found["shares"] >= 0).all()
    close(found["shares"].sum(-1), np.ones(len(found["shares"])))
    if "final" in found:
        close(found["final"].sum(), 1.0)


@linear
@pytest.mark.parametrize("skipped", [(), (4,), (2, 5)], ids=str)
def test_streams_are_their_shares_of_what_was_written(name, settings, skipped):
    """Token by token: one position a pass, so that the mean is the token's own."""
    model = small_gpt(name, **settings)
    skipped = [i for i in skipped if model.stack.residual.can_skip(i)]
    for token in some_tokens(4, 1):
        seen, life = hooked(model, token[None], skipped), Life()
        with model.stack.skipping(*skipped):
            watch(model, token[None], life)
        found = life.result()
        nothing = torch.zeros_like(seen.x)
        written = [seen.x, *(nothing if y is None else y for y in seen.ys)]
        written = np.stack([array(v)[0, 0] for v in written])
        close(found["shares"] @ written, array(seen.streams(DEPTH))[0, 0], 1e-11)
        assert not found["shares"][:, [i + 1 for i in skipped]].any()
        if "final" in found:
            close(found["final"] @ written, array(seen.hs[-1])[0, 0], 1e-11)


def test_prenorm_keeps_all():
    found = stream_life(small_gpt("prenorm"), some_tokens(), batch=2)
    assert np.array_equal(found["shares"], np.ones((1, DEPTH + 1)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in mg.residual_names()] + [("mgr-competitive", {"streams": DEPTH + 2})],
)
def test_speed(name, settings):
    model, tokens = small_gpt(name, **settings), some_tokens(5)
    found, seen = stream_life(model, tokens, batch=2), hooked(model, tokens)
    if seen.streams(0) is None:
        assert found == {}
        return
    expected = np.full((DEPTH, seen.streams(DEPTH).shape[-2]), np.nan)
    for i in range(DEPTH):
        before = array(seen.streams(i))
        for k in range(before.shape[-2]):
            old, new = before[..., k, :], array(seen.streams(i + 1))[..., k, :]
            ratio = np.sqrt(((new - old) ** 2).sum(-1)) / np.sqrt((old**2).sum(-1))
            expected[i, k] = ratio.mean()
    close(found["speed"], expected)


def test_speeds_that_are_known():
    before = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]], dtype=torch.float64)
    after = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [9.0, 9.0]]], dtype=torch.float64)
    close(speed(before, after), [[0.0, 2**0.5, np.nan]])
    assert speed(torch.ones(2, 5, 3, 4), torch.ones(2, 5, 3, 4)).shape == (10, 3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("denseformer", {}),
        ("highway", {"residual_options": {"gate": "vector"}}),
        ("attnres-full", {}),
        ("attnres-block", {}),
    ],
)
def test_without_shares(name, settings):
    found = stream_life(small_gpt(name, **settings), some_tokens())
    assert "shares" not in found
    assert "final" not in found
    assert ("speed" in found) == (not name.startswith("attnres"))


def test_a_pass_counts_when_it_is_over_and_once():
    model, tokens = small_gpt("mgr-competitive"), some_tokens(4)
    life = Life()
    watch(model, tokens, life, batch=1)
    once = life.result()
    for key, values in life.result().items():
        close(values, once[key], 0)
    watch(model, tokens.flip(0), life, batch=3)
    for key, values in life.result().items():
        close(values, once[key])


def test_with_gradients_on_no_graph_is_held():
    model, life = small_gpt("mgr-independent"), Life()
    with Probe(model, life):
        model(some_tokens()).sum().backward()
    close(life.result()["shares"].sum(-1), np.ones(4))


@pytest.mark.parametrize("name", MGR)
def test_in_bfloat16(name):
    model, life = small_gpt(name, dtype=torch.float32), Life()
    watch(model, some_tokens(), life, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    found = life.result()
    close(found["shares"].sum(-1), np.ones(4), 1e-5)
    plain = stream_life(model, some_tokens())
    close(found["shares"], plain["shares"], 0.05)


def test_the_figure_of_speed():
    slow = np.array([[0.0, np.nan], [0.5, 0.25], [0.5, 0.25]])
    runs = {"none": {}, "slow": {"speed": slow}, "one": {"speed": np.array([[0.5], [0.1], [0.3]])}}
    chart = charts(runs)[0]
    assert chart.absent == ["none carries no streams."]
    assert [panel.title for panel in chart.panels] == ["slow", "one"]
    assert not any(panel.log_y for panel in chart.panels)
    lines = chart.panels[0].marks
    assert [(line.label, line.colour) for line in lines] == [("stream 0", 0), ("stream 1", 1)]
    assert list(lines[0].x) == [1, 2, 3]
    close(lines[0].y, slow[:, 0])
    assert chart.seen == (
        "The streams of slow change by 0.250 (stream 1) to 0.500 (stream 0) of their length at the "
        "median sublayer. The stream of one changes by 0.300 of its length at the median sublayer."
    )
    far = charts(runs | {"far": {"speed": np.array([[20.0]])}})[0]
    assert all(panel.log_y for panel in far.panels)
    close(far.panels[0].marks[0].y, [np.nan, 0.5, 0.5])


def test_the_figure_of_shares():
    shares = np.array([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75]])
    gated = {"speed": np.ones((2, 2)), "shares": shares, "final": np.array([0.25, 0.25, 0.5])}
    free = {"speed": np.ones((2, 1)), "shares": np.array([[1.0, -2.0, 0.5]])}
    speeds, first, second = charts({"gated": gated, "none": {"speed": np.ones((2, 1))}, "hc": free})
    assert first.absent == [
        "What the sublayers of none write goes into its streams in a way that shares cannot tell."
    ]
    assert list(second.absent) == []
    (heat,) = first.panels[0].marks
    close(heat.values, [*shares, gated["final"]])
    assert (list(heat.x), list(heat.y)) == ([0, 1, 2], ["0", "1", "output"])
    assert (heat.unit, heat.low, heat.high, heat.middle) == ("share", 0.0, 0.75, None)
    assert first.seen == (
        "The largest share in the streams of gated: stream 0 the embedding (0.50), stream 1 "
        "sublayer 2 (0.75). The embedding is left with 0.000 to 0.500 (0.250 in the output)."
    )
    (heat,) = second.panels[0].marks
    assert (heat.unit, heat.low, heat.high, heat.middle) == ("coefficient", -2.0, 2.0, 0.0)
    assert "coefficient in the streams of hc: stream 0 sublayer 1 (-2.00)." in second.seen
    assert second.seen.endswith("The embedding is left with 1.000.")


def test_many_streams_are_summed_up():
    shares = np.full((5, 3), 0.25)
    shares[:, 2] = 0.5
    shares[3] = [0.0, 0.9, 0.1]
    shares[4] = [0.4, 0.3, 0.3]
    seen = charts({"run": {"shares": shares}})[-1].seen
    assert seen == (
        "The largest share in a stream of run is between 0.40 (the embedding in stream 4) and 0.90 "
        "(sublayer 1 in stream 3). The embedding is left with 0.000 to 0.400."
    )


def test_every_residual_has_figures_or_is_absent():
    runs = {name: stream_life(small_gpt(name), some_tokens(2)) for name in mg.residual_names()}
    speeds, *shares = charts(runs)
    assert len(speeds.panels) == 8
    assert len(speeds.absent) == 2
    names = [name for name in runs if "shares" in runs[name]]
    assert names == ["prenorm", "highway", *HYPER, *MGR]
    assert [chart.name for chart in shares] == [f"life-shares-{name}" for name in names[1:]]
    assert len(shares[0].absent) == 4
    assert shares[0].absent[0] == "prenorm counts all writers alike: each coefficient is 1."
    (chart,) = charts({"attnres-full": runs["attnres-full"]})
    assert (chart.panels, chart.absent) == ((), ["attnres-full carries no streams."])
    speeds, without = charts({"denseformer": runs["denseformer"]})
    assert (without.panels, len(without.absent)) == ((), 1)


def test_a_run_that_has_diverged():
    model = small_gpt("mgr-competitive")
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    speeds, shares = charts({"lost": stream_life(model, some_tokens(1, WIDTH))})
    assert speeds.seen == "The streams of lost are not finite."
    assert shares.absent == ["The streams of lost are not finite."]
