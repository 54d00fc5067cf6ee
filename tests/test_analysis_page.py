"""The report's page: its words, its structure and its size."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from charts import RUNS, report
from multigate.analysis.chart import Chart, Line, Panel, Report, Section

pytest.importorskip("jinja2")
pytest.importorskip("plotly")
from multigate.analysis.page import page

VOID = {"meta", "link", "br", "img", "input", "hr"}


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
