"""The report's page in a headless browser, without a network."""

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from charts import RUNS, report
from multigate.analysis.chart import Section

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
from multigate.analysis.command import AnalyzeConfig, analyze
from multigate.analysis.page import THEMES, page

READY = "html[data-ready=true]"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(report()), encoding="utf-8")
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


def test_hovering_over_an_empty_cell_shows_nothing(desk):
    plot = desk.plot("angles")
    plot.scroll_into_view_if_needed()
    for cell, there in (((3, 0), True), ((10, 10), False)):
        desk.page.mouse.move(*plot.evaluate(PIXEL, ("2", *cell)), steps=3)
        desk.page.wait_for_timeout(250)
        assert bool(desk.hovered("angles")) == there


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


TOUCHED = """(plot, [clientX, clientY]) => ["touchstart", "touchmove"].map((kind) => {
  const target = document.elementFromPoint(clientX, clientY);
  const touch = new Touch({identifier: 1, target, clientX, clientY});
  const event = new TouchEvent(kind, {cancelable: true, bubbles: true, touches: [touch],
                                      targetTouches: [touch], changedTouches: [touch]});
  target.dispatchEvent(event);
  return event.defaultPrevented;
})"""


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
    plot = opened.plot("dynamics")
    plot.scroll_into_view_if_needed()
    pixel = plot.evaluate(PIXEL, ("", 6, 4))
    assert plot.evaluate(TOUCHED, pixel) == [False, False]
    opened.page.touchscreen.tap(*pixel)
    plot.locator(".hoverlayer text").first.wait_for()
    assert "block 6" in opened.hovered("dynamics")
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
    assert opened.complaints == []
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


def test_the_report_of_every_residual(browser, every, folder, tmp_path):
    """Not the sample of the other tests: what `multigate analyze` makes of ten trained runs."""
    config = AnalyzeConfig((every,), out=tmp_path, samples=6, device="cpu", figures=False)
    path = analyze(config, Console(file=io.StringIO())).path
    opened = Opened(browser, path.as_uri(), viewport={"width": 1280, "height": 900})
    opened.page.screenshot(path=folder / "report-of-ten.png", full_page=True)
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()]
    drawn = opened.page.evaluate(COUNTS)
    assert len(drawn) > 25
    for name, counts in drawn.items():
        marks = sum(counts[kind] for kind in ("lines", "points", "bars", "boxes", "heats"))
        assert marks > 0, name
    # Of two MGR runs of three blocks with four streams, each has two that make streams.
    for name in ("pruning-perplexity", "pruning-loss"):
        assert opened.plot(name).get_by_text("cannot be removed").count() == 4
    opened.context.close()
