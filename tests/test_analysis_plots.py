"""Charts as plotly figures: numbers, words and places; and the colours of the page."""

import itertools
import json

import numpy as np
import pytest

from charts import NAN, boxes, report
from multigate.analysis import look, plots
from multigate.analysis.chart import Bars, Boxes, Chart, Line, Panel
from multigate.analysis.page import THEMES


def test_numbers_are_short_and_right():
    assert plots.numbers([NAN, np.inf, 1 / 3, 2.0, -1e-9]) == [None, None, 0.33333, 2, -1e-9]
    assert json.dumps(plots.numbers(np.array([123456.0]), 9)) == "[123456]"
    chart = Chart("c", "", "", [Panel("", "step", "y", [Line("a", [1234567], [1234567.89])])])
    (trace,) = plots.plot(chart)["data"]
    assert (trace["x"], trace["y"]) == ([1234567], [1234600])


def test_a_long_line_keeps_its_peaks_and_its_ends():
    y = np.zeros(100_000)
    y[54_321], y[77_777], y[10_000:12_000] = 9.0, -9.0, NAN
    x, short = plots.thin(np.arange(100_000.0), y)
    assert len(short) <= 2002
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (0, 99_999)
    assert short[x == 54_321] == 9
    assert short[x == 77_777] == -9
    assert np.isnan(short[(x > 10_100) & (x < 11_900)]).all()


def test_a_figure_says_each_thing_once_in_its_legend():
    for section in report().sections:
        for chart in section.charts:
            made = plots.plot(chart)
            named = [trace["legendgroup"] for trace in made["data"] if trace["showlegend"]]
            groups = {t["legendgroup"] for t in made["data"] if "legendgroup" in t}
            assert sorted(named) == sorted(groups)
            assert made["layout"].get("showlegend", True) == (len(groups) > 1)
            bars = [key for key in made["layout"] if key.startswith("coloraxis")]
            assert len(bars) == len({t["coloraxis"] for t in made["data"] if "coloraxis" in t})


def test_panels_of_one_meaning_share_their_axes():
    small, large = boxes(6), 3 + boxes(12)
    marks = [Boxes("a", np.arange(1, 7), small), Boxes("b", np.arange(1, 13), large)]
    made = plots.plot(Chart("c", "", "", [Panel("", "block", "beta", [mark]) for mark in marks]))
    layout = made["layout"]
    assert (layout["xaxis2"]["matches"], layout["yaxis2"]["matches"]) == ("x", "y")
    assert layout["xaxis"]["range"] == layout["xaxis2"]["range"] == [0.3, 12.7]
    low, high = layout["yaxis"]["range"]
    assert layout["yaxis2"]["range"] == [low, high]
    assert -0.3 < low < small.min()
    assert large.max() < high < large.max() + 0.3


def test_bars_and_boxes_stand_side_by_side():
    marks = [Bars("a", [1, 2], [1, 2]), Bars("b", [1, 2], [2, 1], 1), Boxes("c", [1], boxes(1), 2)]
    made = plots.plot(Chart("c", "", "", [Panel("", "block", "y", marks)]))
    first, second, box, circle, said = made["data"]
    assert first["offset"] + first["width"] <= second["offset"] < 0
    assert second["offset"] + second["width"] <= box["x"][0] - 1 - box["width"] / 2
    assert circle["x"] == box["x"]
    assert said["x"] == [1]


def test_words_reach_plotly_as_words():
    panel = Panel("t", "x", "y", [Bars("<b>&$a$%{y}", [1], [1.0], notes=["<i>"])])
    (trace,) = plots.plot(Chart("c", "", "", [panel]))["data"]
    assert trace["name"] == "&lt;b&gt;&amp;&#36;a&#36;%&#123;y}"
    assert trace["customdata"] == ["&lt;i&gt;"]


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    dark, light = sorted(linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_lines_stand_out(theme):
    colours = THEMES[theme]
    for ground in ("page", "card", "warn"):
        for text in ("ink", "quiet", "link"):
            assert contrast(colours[text], colours[ground]) >= 4.5
    for i in range(10):
        assert contrast(colours[f"c{i}"], colours["card"]) >= 3
    assert THEMES["light"]["c3"] == look.PALETTE[3]


@pytest.mark.parametrize("theme", THEMES)
def test_ten_colours_stay_apart_for_the_colour_blind(theme):
    """In OKLab (x 100), as seen without one kind of cones (Machado, Oliveira and Fernandes 2009).

    Okabe's and Ito's eight colours come to 7.6 by this measure.
    """
    blind = {
        "none": np.eye(3),
        "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    }
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]]
    lab = [[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    for seen in blind.values():
        light = [np.clip(np.array(seen) @ linear(THEMES[theme][f"c{i}"]), 0, 1) for i in range(10)]
        places = [100 * np.array(lab) @ np.cbrt(np.array(cones) @ c) for c in light]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)) > 7


def test_a_bar_that_is_missing_says_why():
    bars = Bars("run", [1, 2], [np.nan, 2.0], missing="cannot be <removed>")
    (panel,) = plots.plot(Chart("c", "t", "s", [Panel("p", "block", "change", [bars])]))["panels"]
    assert panel["missing"] == [[1, "cannot be &lt;removed&gt;"]]
    bars = Bars("run", [1, 2], [np.nan, 2.0])
    (panel,) = plots.plot(Chart("c", "t", "s", [Panel("p", "block", "change", [bars])]))["panels"]
    assert "missing" not in panel
