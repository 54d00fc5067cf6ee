"""What the documentation site adds to docs/: a hook of mkdocs, named in mkdocs.yml.

Pages of docs/ link to files outside of it, as they must for a reader of the repository. Of each of
those the site gets a copy: CONTRIBUTING.md, LOG.md, CHANGELOG.md and the tables of repro/ as pages,
examples/*.py as pages with their code, pictures as they are; and the links are turned to the
copies. A drawing that follows the reader's preference for light or dark becomes two, which follow
the switch at the top of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("CONTRIBUTING.md", "LOG.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
DRAWING = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\.svg\)")
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n    \}", re.DOTALL)


def copies() -> dict[str, str]:
    """Where a file of the repository stands in the site."""
    found = {name: name.lower() for name in PAGES}
    found |= {f"examples/{f.name}": f"examples/{f.stem}.md" for f in ROOT.glob("examples/*.py")}
    found |= {f"benchmarks/results/{f.name}": f.name for f in ROOT.glob("benchmarks/results/*.png")}
    for file in ROOT.glob("repro/**/*"):
        if file.suffix in (".md", ".png"):
            name = "-".join(file.relative_to(ROOT / "repro").parts).lower()
            found[file.relative_to(ROOT).as_posix()] = name
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in copies().items():
        path = ROOT / source
        if path.suffix == ".md":
            added = File.generated(config, target, content=path.read_text(encoding="utf-8"))
        elif path.suffix == ".py":
            added = File.generated(config, target, content=listing(source, path))
        else:
            added = File.generated(config, target, abs_src_path=str(path))
        files.append(added)
    for drawing in [f for f in files if f.src_uri.endswith(".svg")]:
        text = drawing.content_string
        if DARK.search(text):
            stem = drawing.src_uri.removesuffix(".svg")
            light, dark = DARK.sub("", text), DARK.sub(r"\1", text)
            files.append(File.generated(config, f"{stem}.light.svg", content=light))
            files.append(File.generated(config, f"{stem}.dark.svg", content=dark))
            files.remove(drawing)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside of docs/ to their copies, and a drawing into its two."""
    uri, known = page.file.src_uri, copies()
    source = next((s for s, target in known.items() if target == uri), f"docs/{uri}")

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        inside = known.get(target, target.removeprefix("docs/"))
        if target not in known and not target.startswith("docs/"):
            return match[1]
        return posixpath.relpath(inside, posixpath.dirname(uri) or ".")

    def both(match: re.Match[str]) -> str:
        if files.get_file_from_path(f"{match[2]}.light.svg") is None:
            return match[0]
        light, dark = (f"![{match[1]}]({match[2]}.{x}.svg#only-{x})" for x in ("light", "dark"))
        return light + dark

    return DRAWING.sub(both, LINK.sub(turned, markdown))


def listing(source: str, path: Path) -> str:
    """A page that shows a Python file."""
    code = path.read_text(encoding="utf-8").rstrip()
    return f"# {source}\n\n```python\n{code}\n```\n"
