"""Charts as files: what is drawn of them, and what hard input leaves standing."""

from dataclasses import replace

import numpy as np
import pytest

from charts import BLOCKS, INF, NAN, RUNS, charts
from multigate.analysis import look
from multigate.analysis.chart import Bars, Boxes, Chart, Heat, Line, Panel

pytest.importorskip("matplotlib")
from matplotlib.image import imread
from matplotlib.patches import PathPatch

from multigate.analysis.draw import draw, figure

CHARTS = {chart.name: chart for chart in charts()}


def one(*marks, **panel):
    return Chart("x", "X", "", [Panel("", "block", "value", marks, **panel)])


def test_every_chart_with_panels_is_a_png_and_a_pdf(tmp_path):
    chosen = [CHARTS[name] for name in ("dynamics", "absent", "pruning/<x>")]
    files = draw(chosen, tmp_path / "new" / "folder")
    names = [f"{name}.{kind}" for name in ("dynamics", "pruning-x") for kind in ("png", "pdf")]
    assert [path.name for path in files] == names
    for path in files:
        content = path.read_bytes()
        assert content.startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG\r\n")
        assert len(content) > 5000
    pixels = imread(files[0])
    assert pixels.shape[:2] == (int(3.5 * 150), int(8.4 * 150))
    for axes in (pixels[:, :600], pixels[:, 660:]):
        assert axes[..., :3].std() > 0.03
        for colour in look.PALETTE[:2]:
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (np.abs(axes[..., :3] - wanted).max(-1) < 0.02).sum() > 100


def test_no_figure_takes_the_file_of_another(tmp_path):
    panel = CHARTS["one"].panels[0]
    chosen = [Chart(name, "", "", [panel]) for name in ("a/b", "a b", "A-B", "../../up", "???")]
    names = [path.name for path in draw(chosen, tmp_path)[::2]]
    assert names == ["a-b.png", "a-b-2.png", "A-B-3.png", "up.png", "run.png"]
    assert {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path}


@pytest.mark.parametrize("chart", [c for c in CHARTS.values() if c.panels], ids=lambda c: c.name)
def test_every_chart_has_its_panels_and_what_is_in_them(chart):
    drawn = figure(chart)
    drawn.canvas.draw()
    axes = [ax for ax in drawn.axes if ax.get_label() != "<colorbar>"]
    assert len(axes) == len(chart.panels)
    for ax, panel in zip(axes, chart.panels, strict=True):
        said = [text.get_text() for text in ax.texts]
        assert ("nothing to show" in said) == look.empty(panel)
        assert ax.get_title(loc="left").replace("\\$", "$").split() == panel.title.split()
        if look.empty(panel):
            continue
        assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
        lines = [mark for mark in panel.marks if isinstance(mark, Line)]
        colours = [line.get_color() for line in ax.lines]
        for line in lines:
            assert look.PALETTE[line.colour] in colours
        assert len(ax.images) == sum(isinstance(mark, Heat) for mark in panel.marks)
        bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
        assert sum(len(c) for c in ax.containers) == sum(
            len(look.extent(mark, panel.log_y)) for mark in bars
        )
        boxes = [mark for mark in panel.marks if isinstance(mark, Boxes)]
        assert sum(isinstance(patch, PathPatch) for patch in ax.patches) == sum(
            np.isfinite(mark.boxes).all(axis=1).sum() for mark in boxes
        )


def test_one_legend_and_one_bar_of_colours():
    for name, bars in (("angles", 1), ("one", 1), ("mixing", 4), ("streams", 0)):
        drawn = figure(CHARTS[name])
        assert sum(ax.get_label() == "<colorbar>" for ax in drawn.axes) == bars
        assert not any(ax.get_legend() for ax in drawn.axes)
        assert len(drawn.legends) == (name in ("one", "streams"))
    labels = [text.get_text() for text in figure(CHARTS["streams"]).legends[0].get_texts()]
    assert labels == [f"stream {k}" for k in range(8)]
    images = [ax.images[0] for ax in figure(CHARTS["angles"]).axes if ax.images]
    assert {image.get_clim() for image in images} == {(0.0, 0.6)}
    assert len({image.get_cmap()(0.7) for image in images}) == 1


def test_a_legend_keeps_names_that_begin_with_an_underscore():
    chart = one(Line("_a", [1, 2], [1, 2]), Line("$b$", [1, 2], [2, 1], 1), Line("_a", [1], [1]))
    labels = [text.get_text() for text in figure(chart).legends[0].get_texts()]
    assert [label.strip().replace("\\", "") for label in labels] == ["_a", "$b$"]


def test_money_is_no_formula(tmp_path):
    words = r"$\frac$"
    marks = [Line(words, [1], [1]), Line("b", [1], [2])]
    draw([Chart("x", words, "", [Panel(words, words, words, marks)])], tmp_path)


def test_nine_heat_maps_stand_in_three_rows_with_whole_numbers():
    drawn = figure(CHARTS["angles"])
    drawn.canvas.draw()
    maps = [ax for ax in drawn.axes if ax.images]
    assert len({round(ax.get_position().x0, 3) for ax in maps}) == 3
    assert len({round(ax.get_position().y0, 3) for ax in maps}) == 3
    labels = [label.get_text() for label in maps[0].get_xticklabels()]
    assert labels == [str(block) for block in range(1, 13, 2)]
    assert maps[0].images[0].origin == "lower"
    named = next(ax for ax in figure(CHARTS["mixing"]).axes if ax.get_title(loc="left") == "shares")
    assert named.images[0].origin == "upper"
    assert named.get_yticklabels()[0].get_text() == "stream 0"


def test_panels_of_one_meaning_share_their_y_axis():
    left, right = figure(CHARTS["pruning/<x>"]).axes
    assert left.get_ylim() == right.get_ylim() == pytest.approx((1.0, 900 * 900**0.05), rel=0.2)
    assert left.get_ylim()[0] == 1.0
    left, right = figure(CHARTS["dynamics"]).axes
    assert left.get_ylim() != right.get_ylim()


def test_panels_of_one_meaning_share_their_x_axis_and_the_width_of_bars():
    marks = [Bars("a", [1, 2, 3, 4, 5, 6], [1] * 6), Bars("b", [4, 6], [2, -1])]
    drawn = figure(Chart("x", "", "", [Panel("", "block", "y", [mark]) for mark in marks]))
    left, right = drawn.axes
    assert left.get_xlim() == right.get_xlim() == pytest.approx((0.3, 6.7))
    assert left.get_ylim() == right.get_ylim() == pytest.approx((-1.15, 2.15))
    assert list(right.get_xticks()) == [1, 2, 3, 4, 5, 6]
    assert {round(bar.get_width(), 6) for ax in drawn.axes for bar in ax.patches} == {0.752}


def test_bars_stand_side_by_side_and_infinity_is_said():
    chart = one(Bars("a", BLOCKS, BLOCKS), Bars("b", BLOCKS, [INF, NAN, *BLOCKS[2:]], 1))
    (axes,) = figure(chart).axes
    first, second = (list(bars) for bars in axes.containers)
    assert (len(first), len(second)) == (12, 10)
    assert first[2].get_x() + first[2].get_width() <= second[0].get_x() + 1e-9
    assert 3 <= second[0].get_x() < 3.1
    assert [text.get_text() for text in axes.texts] == ["∞"]
    assert axes.get_xlim() == pytest.approx((0.3, 12.7))


def test_boxes_reach_as_far_as_is_known():
    known = [[0.0, 1, 2, 3, 9, 2.5], [0.9, 1, 2, 3, 3.5, 2], [-9, 1, 2, 3, 6, 2], [NAN] * 6]
    expected = [[0, 1, 2, 3, 6, 9], [0.9, 1, 2, 3, 3.5, NAN], [-2, 1, 2, 3, 6, NAN], [NAN] * 6]
    assert np.array_equal(look.whiskers(np.array(known)), expected, equal_nan=True)
    (axes,) = figure(one(Boxes("a", [1, 2, 3, 4], np.array(known)))).axes
    circles = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in circles] == [[9], [], []]
    assert circles[0].get_markerfacecolor() == "none"


def test_a_box_on_a_log_axis_ends_where_it_is_positive():
    known = np.array([[0.0, 0, 0.2, 0.3, 0.9, 0.2], [0, 0, 0, 0, 0, 0]])
    drawn = look.whiskers(known, log=True)
    assert drawn[0].tolist() == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.75, 0.9])
    assert np.isnan(drawn[1]).all()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[], [NAN], [0.0], [-1.0, INF], [1e-300, 1e300], [5.0, 5.0]])
def test_nothing_is_too_odd_to_draw(tmp_path, values, log):
    x = list(range(len(values)))
    known = np.repeat(np.array(values, dtype=float)[:, None], 6, axis=1)
    marks = [Line("a", x, values), Bars("b", x, values, 1), Boxes("c", x, known, 2)]
    panels = [Panel("p", "x", "y", [mark], log_y=log) for mark in marks]
    panels.append(Panel("p", "x", "y", marks, log_y=log))
    draw([Chart("odd", "", "", panels)], tmp_path)
    assert (tmp_path / "odd.png").stat().st_size > 3000


def test_colours_of_heat_maps():
    def scale(*maps):
        return look.scale([Heat(np.array(values), [1], [1], "u", **ends) for values, ends in maps])

    assert scale(([[1.0, NAN, INF]], {}), ([[3.0]], {}))[:2] == (1, 3)
    assert scale(([[9.0]], {"low": 0.0, "high": 0.6}))[:2] == (0, 0.6)
    assert scale(([[0.0]], {}))[:2] == (-0.5, 0.5)
    assert scale(([[4.0]], {}))[:2] == (2, 6)
    assert scale(([[0.0, 1.0]], {}))[2][0] == (0.0, look.RISING[0])
    low, high, stops = scale(([[-1.0, 3.0]], {"middle": 0.0}))
    assert (low, high) == (-1, 3)
    assert (0.25, "#f7f7f7") in [(round(place, 6), colour) for place, colour in stops]
    assert stops[-1] == (1.0, look.DIVERGING[-1])
    assert stops[0][1] not in look.DIVERGING[:2]


def test_ticks_are_numbers_of_blocks():
    def ticks(*x):
        return look.ticks(one(Line("", x, x)).panels)

    assert ticks(*range(1, 13)) == list(range(1, 13))
    assert ticks(*range(1, 49)) == list(range(4, 49, 4))
    assert ticks(1) == [1]
    assert ticks(0.5, 1) == ticks() == ticks(0, 100_000) == []


def test_drawing_needs_no_pyplot_and_leaves_the_style_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw([replace(CHARTS["one"], name="x")], tmp_path)
    assert dict(matplotlib.rcParams) == before
    text = (tmp_path / "x.pdf").read_bytes()
    assert b"/Type3" not in text  # fonts that editors and publishers accept
    assert RUNS[0] in [text.get_text() for text in figure(CHARTS["one"]).legends[0].get_texts()]


def test_a_bar_that_is_missing_says_why():
    bars = Bars("run", [1, 2, 3], [np.nan, 2.0, np.inf], missing="cannot be removed")
    (axes,) = figure(Chart("c", "t", "s", [Panel("p", "block", "change", [bars])])).axes
    words = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert words == {"cannot be removed": 1, "∞": 3}
