"""The documentation site: it builds without a warning, and asks nothing of the network."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import multigate as mg
from documents import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

MODULES = ("multigate", "multigate.residuals", "multigate.ops", "multigate.analysis")
MODULES += ("multigate.hf", "multigate.bench")
DRAWINGS = sorted((ROOT / "docs").glob("*.svg"))


class Links(HTMLParser):
    """What a page loads, where it leads, and where it can be led to."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("href"):
            self.loaded.append(given["href"])
        for name in ("src", "srcset", "poster", "data"):
            if tag != "a" and given.get(name):
                self.loaded.append(given[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site):
    return {f: Links(f.read_text(encoding="utf-8")) for f in sorted(site.rglob("*.html"))}


def test_make_docs_is_that_build():
    text = (ROOT / "Makefile").read_text()
    assert "\tNO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict\n" in text
    assert "/site/\n" in (ROOT / ".gitignore").read_text()


def test_every_page_is_in_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.exists(), page
    for page in ("contributing", "log", "changelog", "examples/encoder", "examples/vision"):
        assert (site / f"{page}.html").exists(), page


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for page, found in pages.items():
        away = [u for u in found.loaded if urlsplit(u).scheme not in ("", "data") or u[:2] == "//"]
        assert not away, f"{page.name}: {away}"
    for sheet in site.rglob("*.css"):
        used = re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\s]*", sheet.read_text())
        assert not used, f"{sheet.name}: {used}"
    for drawing in site.rglob("*.svg"):
        assert not re.search(r"(?:href|src)=\"(?:https?:)?//", drawing.read_text()), drawing


def test_every_link_leads_somewhere(site, pages):
    """Files and places in them, those that docstrings make too. (404 knows no address.)"""
    for page, found in pages.items():
        if page.name == "404.html":
            continue
        for link in (*found.links, *found.loaded):
            parts = urlsplit(link)
            if parts.scheme or link in ("#", "."):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.relative_to(site)}: {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                ids = pages[target].ids
                assert unquote(parts.fragment) in ids, f"{page.relative_to(site)}: {link}"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module, site, pages):
    ids = pages[site / "api.html"].ids
    for name in importlib.import_module(module).__all__:
        # A name of the front door is explained there; a module has a heading of its own.
        front = {f"multigate.{name}"} if name in mg.__all__ else set()
        places = {f"{module}.{name}", *front, f"multigate{name}"}
        assert places & ids, f"{module}.{name} is not on docs/api.md"


def test_every_residual_is_in_the_reference(site):
    text = (site / "api.html").read_text()
    headings = re.findall(r"<h3[^>]*>(.*?)</h3>", text, re.DOTALL)
    shown = [re.sub(r"<[^>]*>|¶|&para;", "", heading).strip() for heading in headings]
    assert set(mg.residual_names()[:10]) <= set(shown)


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda f: f.stem)
def test_a_drawing_reads_in_light_and_in_dark(drawing, site):
    """Every class has a colour for both, and the site has one of each kind."""
    text = drawing.read_text()
    assert "<title" in text
    assert "<desc" in text
    light, dark = (set(re.findall(r"\.(\w+) \{", part)) for part in halves(text))
    used = {name for names in re.findall(r'class="([\w ]+)"', text) for name in names.split()}
    assert used <= light
    assert used <= dark
    for scheme in ("light", "dark"):
        made = (site / f"{drawing.stem}.{scheme}.svg").read_text()
        assert "prefers-color-scheme" not in made
        colours = dict(re.findall(r"\.(\w+) \{ fill: (#\w+)", made))
        assert colours["ink"] == {"light": "#1f2430", "dark": "#e8ebf2"}[scheme]


def halves(drawing):
    style = drawing.split("<style>")[1].split("</style>")[0]
    return style.split("@media (prefers-color-scheme: dark)")


class Opened:
    """A page of the site from the disk, and what it complained of and asked for."""

    def __init__(self, browser, path, scheme="light", width=1280):
        view = {"width": width, "height": 900}
        self.context = browser.new_context(color_scheme=scheme, viewport=view)
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html.js")

    def shown(self):
        """The pictures that can be seen, and how wide they really are."""
        return self.page.evaluate(
            "[...document.querySelectorAll('article img')].filter(i => i.offsetWidth)"
            ".map(i => [i.getAttribute('src'), i.naturalWidth])"
        )


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_pages_open_without_a_network(site, browser, scheme, width):
    for name in ("index", "idea", "choosing", "api", "examples/vision"):
        opened = Opened(browser, site / f"{name}.html", scheme, width)
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
        beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert opened.page.evaluate(beyond) == 0, f"{name} is wider than {width}"
        pictures = opened.shown()
        assert len(pictures) == {"index": 1, "idea": 10}.get(name, 0)
        assert all(size > 0 and f".{scheme}.svg" in source for source, size in pictures)
        opened.context.close()


def test_the_switch_turns_drawings_too(site, browser):
    opened = Opened(browser, site / "idea.html", "light")
    assert {source.split("#")[1] for source, _ in opened.shown()} == {"only-light"}
    opened.page.locator("label[title='Dark colours']").click()
    assert {source.split("#")[1] for source, _ in opened.shown()} == {"only-dark"}
    opened.context.close()


def test_search_works_from_a_disk(site, browser):
    opened = Opened(browser, site / "examples" / "encoder.html")
    opened.page.locator(".md-search__input").click()
    opened.page.keyboard.type("handover")
    result = opened.page.locator(".md-search-result__link").first
    result.wait_for()
    target = Path(unquote(urlsplit(result.get_attribute("href")).path))
    assert target.parent == site
    assert target.name in ("api.html", "pipeline.html", "faq.html", "changelog.html")
    assert opened.complaints == []
    opened.context.close()
