"""The report's page: its text, and what a browser makes of it."""

import itertools
import json
import os
import re
import shutil
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from charts import NAN, RUNS, report
from multigate.analysis import look, plots
from multigate.analysis.chart import Bars, Chart, Line, Panel, Report, Section

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
from multigate.analysis.page import THEMES, page

VOID = {"meta", "link", "br", "img", "input", "hr"}
READY = "html[data-ready=true]"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]


class Tree(HTMLParser):
    """Every element with its attributes, and the text of each kind of element."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts = [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open:
            self.texts.append((self.open[-1], data.strip()))

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def text(self, tag):
        return [text for name, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def source():
    return page(report())


@pytest.fixture(scope="module")
def tree(source):
    return Tree(source)


def test_the_page_has_all_the_words(tree):
    made = report()
    shown = [chart for section in made.sections for chart in section.charts]
    assert tree.open == []
    assert tree.all("html") == [{"lang": "en"}]
    assert tree.text("title") == tree.text("h1") == [made.title]
    assert tree.text("h2")[3:] == [section.title for section in made.sections]
    assert tree.text("h3") == [chart.title for chart in shown]
    assert tree.text("li") == list(made.problems)
    assert tree.text("th") == [*made.columns, *(row[0] for row in made.rows)]
    assert tree.text("td") == [cell for row in made.rows for cell in row[1:] if cell]
    words = [text for _, text in tree.texts]
    for chart in shown:
        for sentence in (chart.shows, chart.claim, chart.seen, *chart.absent):
            assert not sentence or sentence in words
    assert words.count("The paper says:") == sum(bool(chart.claim) for chart in shown)
    assert words.count("Seen here:") == sum(bool(chart.seen) for chart in shown)


def test_names_are_text_and_nothing_else(source, tree):
    assert "<b>base" not in source
    assert "<without>" not in source
    assert not {"b", "base", "compared", "c", "x", "streams", "mgr", "prenorm"} & {
        tag for tag, _ in tree.elements
    }
    hostile = "</script><script>alert(1)</script>"
    panel = Panel(hostile, hostile, hostile, [Line(hostile, [1], [1])])
    chart = Chart(hostile, hostile, hostile, [panel], hostile, hostile, [hostile])
    made = Report(hostile, hostile, [hostile], [[hostile]], [Section(hostile, [chart])], [hostile])
    tree = Tree(page(made))
    assert tree.open == []
    assert len(tree.all("script")) == 4
    assert not [text for tag, text in tree.texts if tag == "script" and text == "alert(1)"]


def test_links_lead_somewhere_on_the_page_and_nowhere_else(tree):
    ids = [attrs["id"] for _, attrs in tree.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in tree.elements:
        assert "src" not in attrs
        if "href" in attrs:
            assert attrs["href"] == "data:," or attrs["href"][1:] in ids
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(attrs.get(name, "").split()) <= set(ids)
    assert len([a for a in tree.all("a") if a["href"].startswith("#figure-")]) == 10
    style = "".join(tree.text("style"))
    assert "url(" not in style
    assert "@import" not in style


def test_every_figure_is_reachable_and_described(tree):
    drawn = [attrs for attrs in tree.all("div") if attrs.get("class") == "plot"]
    assert len(drawn) == len(tree.all("figure")) == len(tree.all("figcaption")) == 9
    for attrs in drawn:
        assert attrs["tabindex"] == "0"
        assert attrs["role"] == "img"
        assert attrs["aria-labelledby"]


def test_columns_of_numbers_stand_to_the_right(tree):
    classes = [attrs.get("class") for attrs in tree.all("th") if attrs["scope"] == "col"]
    assert classes == [None, None, "number", "number", "number", "number"]


def test_a_report_of_nothing_is_a_page():
    tree = Tree(page(Report("Nothing", "", [], [], [])))
    assert tree.open == []
    assert not tree.all("table")
    assert tree.text("h1") == ["Nothing"]


def test_thirty_charts_are_well_below_eight_megabytes():
    chart = next(c for s in report().sections for c in s.charts if c.name == "angles")
    steps = np.arange(50_000)
    curve = Panel("", "step", "loss", [Line(run, steps, np.sin(steps)) for run in RUNS])
    charts = [replace(chart, name=f"a{i}") for i in range(25)]
    charts += [Chart(f"b{i}", "", "", [curve]) for i in range(5)]
    made = page(replace(report(), sections=[Section("All", charts)]))
    assert len(made.encode()) < 6.5e6


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


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    missing = "" if found else "no Chromium was found: install the package chromium"
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing = missing or "playwright is missing: pip install playwright"
    if missing and os.environ.get("MULTIGATE_NEEDS_BROWSER"):
        pytest.fail(f"The page was not opened: {missing}.")
    if missing:
        pytest.skip(f"The page was not opened: {missing}.")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(source, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def folder(tmp_path):
    chosen = Path(os.environ.get("MULTIGATE_ARTIFACTS") or tmp_path)
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


class Opened:
    """A page in a browser, and what it complained of and asked for."""

    def __init__(self, browser, address, **context):
        self.context = browser.new_context(**{"color_scheme": "light"} | context)
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector(READY, state="attached")

    def plot(self, name):
        return self.page.locator(f".plot[data-name='{name}']")

    def hovered(self, name):
        return " | ".join(self.plot(name).locator(".hoverlayer text").all_text_contents())


@pytest.fixture(scope="module")
def desk(browser, address):
    opened = Opened(browser, address, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


COUNTS = """() => Object.fromEntries([...document.querySelectorAll('.plot')].map(plot => {
  const count = (selector) => plot.querySelectorAll(selector).length;
  return [plot.dataset.name, {
    lines: count('.scatterlayer .trace .js-line'), points: count('.scatterlayer .point'),
    bars: [...plot.querySelectorAll('.barlayer .point')].filter(p => p.getBBox().height).length,
    boxes: count('.boxlayer path.box'),
    heats: count('.heatmaplayer image'), keys: count('.legend .traces'),
    scales: count('.colorbar'), height: plot.getBoundingClientRect().height}];
}))"""


def test_every_figure_is_drawn_offline_and_without_complaint(desk, address, folder):
    desk.page.screenshot(path=folder / "report-light.png", full_page=True)
    assert desk.complaints == []
    assert desk.requests == [address]
    drawn = desk.page.evaluate(COUNTS)
    assert len(drawn) == 9
    for counts in drawn.values():
        assert counts["height"] > 200
    expected = {
        "loss": {"lines": 2, "points": 20, "keys": 4},
        "dynamics": {"lines": 4, "points": 48, "keys": 2},
        "angles": {"heats": 9, "scales": 1, "keys": 0},
        "pruning/<x>": {"bars": 19, "keys": 2},
        "gates": {"bars": 50, "boxes": 22, "lines": 1, "keys": 3},
        "streams": {"lines": 16, "keys": 8},
        "mixing": {"heats": 4, "scales": 2},
        "nothing": {"lines": 0, "bars": 0, "boxes": 0, "heats": 0, "scales": 0},
        "one": {"points": 6, "boxes": 2, "heats": 1, "scales": 1, "keys": 2},
    }
    for name, counts in expected.items():
        assert {key: drawn[name][key] for key in counts} == counts, name
    assert desk.plot("nothing").get_by_text("nothing to show").count() == 5
    assert desk.plot("pruning/<x>").get_by_text("∞").count() == 1


def test_names_are_written_as_they_are(desk):
    legend = desk.plot("dynamics").locator(".legend").text_content()
    assert all(run in legend for run in RUNS)
    assert RUNS[0] in desk.plot("streams").text_content()


PIXEL = """(plot, [panel, x, y]) => {
  const [across, up] = [plot._fullLayout[`xaxis${panel}`], plot._fullLayout[`yaxis${panel}`]];
  const box = plot.getBoundingClientRect();
  return [box.left + across._offset + across.c2p(x), box.top + up._offset + up.c2p(y)];
}"""


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("dynamics", ("", 6, 4), ["block 6", f"{RUNS[0]} : 7.389", f"{RUNS[1]} : 1."]),
        ("angles", ("2", 3, 0), ["stream 1", "block l 4", "n blocks later 1", "distance 0.05"]),
        ("pruning/<x>", ("", 6, 2), ["block removed 6", "block 6: costs a lot"]),
        ("gates", ("2", 15, 0.1), ["sublayer 15", "median 0.0", "quartiles", "largest 0."]),
    ],
)
def test_hovering_shows_what_a_value_is(desk, name, place, words):
    plot = desk.plot(name)
    plot.scroll_into_view_if_needed()
    x, y = plot.evaluate(PIXEL, place)
    desk.page.mouse.move(x - 3, y)
    desk.page.mouse.move(x, y, steps=3)
    plot.locator(".hoverlayer text").first.wait_for()
    desk.page.wait_for_timeout(150)
    for word in words:
        assert word in desk.hovered(name)


def test_all_can_be_reached_and_read_by_keyboard(desk):
    desk.page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = []
    for _ in range(60):
        desk.page.keyboard.press("Tab")
        reached.append(
            desk.page.evaluate(
                "[document.activeElement.tagName, document.activeElement.className,"
                " document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
            )
        )
        if reached[-1][0] == "BODY":
            break
    assert reached[0][1] == "skip"
    assert reached[1][2] == "theme"
    assert sum(name.startswith("plot ") for _, name, _, _ in reached) == 9
    assert [tag for tag, *_ in reached].count("A") == 1 + 4 + 10
    assert all(outline == "solid" for tag, *_, outline in reached if tag != "BODY")
    for name, words in (("dynamics", "block 2; "), ("angles", "block l 2, n blocks later 1")):
        desk.plot(name).focus()
        desk.page.keyboard.press("ArrowRight")
        desk.page.keyboard.press("ArrowRight")
        desk.page.wait_for_function(
            "words => document.getElementById('spoken').textContent.includes(words)", arg=words
        )
    desk.page.keyboard.press("ArrowLeft")
    desk.page.wait_for_function(
        "document.getElementById('spoken').textContent.includes('block l 1,')"
    )


GROUND = """() => [getComputedStyle(document.body).backgroundColor,
  document.querySelector('.plot .main-svg').style.background,
  document.querySelector('.plot .js-line').style.stroke,
  document.getElementById('theme').textContent]"""


def rgb(colour):
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def looks(theme):
    colours = [rgb(THEMES[theme][name]) for name in ("page", "card", "c0")]
    return [*colours, "Light" if theme == "dark" else "Dark"]


def test_the_button_changes_page_and_figures_and_is_remembered(browser, address, folder):
    opened = Opened(browser, address, viewport={"width": 1280, "height": 900})
    assert opened.page.evaluate(GROUND) == looks("light")
    opened.page.locator("#theme").focus()
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector(READY, state="attached")
    assert opened.page.evaluate(GROUND) == looks("dark")
    opened.page.screenshot(path=folder / "report-dark.png", full_page=True)
    opened.page.reload()
    opened.page.wait_for_selector(READY, state="attached")
    assert opened.page.evaluate(GROUND) == looks("dark")
    opened.page.locator("#theme").click()
    opened.page.wait_for_selector(READY, state="attached")
    assert opened.page.evaluate(GROUND) == looks("light")
    assert opened.complaints == []
    opened.context.close()


def test_without_storage_the_wish_of_the_machine_counts(browser, address):
    forbid = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})"
    context = browser.new_context(color_scheme="dark")
    shown = context.new_page()
    complaints = []
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.add_init_script(forbid)
    shown.goto(address)
    shown.wait_for_selector(READY, state="attached")
    assert shown.evaluate(GROUND) == looks("dark")
    shown.locator("#theme").click()
    shown.wait_for_selector(READY, state="attached")
    assert shown.evaluate(GROUND) == looks("light")
    assert complaints == []
    context.close()


def test_a_phone_shows_one_column_and_scrolls_one_way(browser, address, folder):
    opened = Opened(
        browser,
        address,
        viewport={"width": 390, "height": 844},
        device_scale_factor=2,
        has_touch=True,
        is_mobile=True,
    )
    opened.page.screenshot(path=folder / "report-phone.png", full_page=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.page.evaluate("innerWidth") == 390
    table = "document.querySelector('.table')"
    assert opened.page.evaluate(f"{table}.scrollWidth > {table}.clientWidth")
    domains = "name => { const {xaxis, xaxis2, yaxis, yaxis2} = document.querySelector("
    domains += "`.plot[data-name='${name}']`).layout;"
    domains += " return [xaxis, xaxis2, yaxis, yaxis2].map(axis => axis.domain); }"
    for name in ("dynamics", "angles", "gates"):
        x, x2, y, y2 = opened.page.evaluate(domains, name)
        assert x == x2
        assert y2[1] < y[0]
    opened.page.set_viewport_size({"width": 1100, "height": 800})
    opened.page.wait_for_function(
        "document.querySelector(`.plot[data-name='gates']`).layout.xaxis2.domain[0] > 0.5"
    )
    assert opened.complaints == []
    opened.context.close()


def test_without_scripts_the_text_and_the_table_remain(browser, address):
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(address)
    assert shown.locator("noscript p").is_visible()
    assert shown.get_by_text("812 000").is_visible()
    assert shown.get_by_text("It grows 39 times.").is_visible()
    assert not shown.locator("#theme").is_visible()
    assert not any(plot.is_visible() for plot in shown.locator(".plot").all())
    context.close()


def test_printing_is_light_and_fits_the_paper(browser, address):
    opened = Opened(browser, address, color_scheme="dark", viewport={"width": 1280, "height": 900})
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": 688, "height": 980})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 688
    assert opened.page.evaluate(GROUND)[1:3] == looks("light")[1:3]
    assert not opened.page.locator("#theme").is_visible()
    opened.page.emulate_media(media="screen")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.page.wait_for_selector(READY, state="attached")
    assert opened.page.evaluate(GROUND)[1:3] == looks("dark")[1:3]
    opened.context.close()


@pytest.mark.slow
def test_forty_figures_are_usable_soon(browser, tmp_path):
    made = report()
    charts = [c for section in made.sections for c in section.charts if c.panels]
    many = [replace(charts[i % 9], name=f"figure {i}") for i in range(40)]
    path = tmp_path / "many.html"
    path.write_text(page(replace(made, sections=[Section("All", many)])), encoding="utf-8")
    assert path.stat().st_size < 8e6
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    shown = context.new_page()
    start = time.monotonic()
    shown.goto(path.as_uri(), wait_until="commit")
    shown.locator("#theme").click()
    shown.wait_for_selector(".plot .scatterlayer .trace", state="attached")
    usable = time.monotonic() - start
    shown.wait_for_selector(READY, state="attached")
    assert re.fullmatch("dark|light", shown.evaluate("document.documentElement.dataset.theme"))
    assert shown.locator(".plot .main-svg").count() >= 40
    assert usable < 10
    print(f"usable after {usable:.1f} s, complete after {time.monotonic() - start:.1f} s")
    context.close()
