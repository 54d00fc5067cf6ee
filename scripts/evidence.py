"""Write the tables of docs/evidence.md and README.md anew from the results in repro/.

    multigate repro summary repro/mini && python scripts/evidence.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`. With --check nothing is written,
and the exit status says whether a page is out of date.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from multigate.repro.table import NOTHING, difference, markdown, spread

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/evidence.md")
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
Row = dict[str, Any]


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "repro/mini/results.json").read_text("utf-8"))
    return found


def rows_of(group: int) -> list[Row]:
    """The rows of a group of Table 1 that have been run."""
    return [row for row in results()["groups"][group]["rows"] if row["seeds"]]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return markdown([head, ["---", *["---:"] * (len(head) - 1)], *lines]) + "\n"


def losses(group: int) -> str:
    head = ["model", "parameters", "seeds", "val", "test", "test - PreNorm", "verdict"]
    rows = rows_of(group)
    papers = [(row["paper"] or {}).get("difference") for row in rows]
    lines = []
    for row, paper in zip(rows, papers, strict=True):
        apart = row["differences"].get("test")
        line = [
            row["label"],
            f"{row['parameters'] / 1e6:.2f} M",
            str(len(row["seeds"])),
            spread(row["losses"]["val"]),
            spread(row["losses"]["test"]),
            difference(apart),
            apart["verdict"] if apart else NOTHING,
        ]
        if any(papers):
            line.append(f"{paper:+.4f}" if paper else NOTHING)
        lines.append(line)
    return table([*head, "the paper at S, val"] if any(papers) else head, lines)


def pairs() -> str:
    lines = []
    for pair in results()["pairs"]:
        val, test = (pair["differences"][name] for name in ("val", "test"))
        paper = f"{pair['paper']:+.4f}"
        cells = (pair["label"], pair["against"], difference(val), difference(test))
        lines.append((*cells, test["verdict"], paper))
    head = ("model", "compared with", "val", "test", "verdict", "the paper at S, val")
    return table(head, lines)


def short() -> str:
    """For the README: what a stranger wants to know first."""
    head = ("model", "seeds", "val loss", "test loss", "test - PreNorm")
    lines = (
        (
            row["label"],
            str(len(row["seeds"])),
            spread(row["losses"]["val"]),
            spread(row["losses"]["test"]),
            difference(row["differences"].get("test")),
        )
        for row in rows_of(0)
    )
    return table(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "rows": lambda: losses(0),
    "scaled": lambda: losses(1),
    "related": lambda: losses(2),
    "pairs": pairs,
    "short": short,
}


def written(text: str) -> str:
    """`text` with its tables as they should be."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)


def main(check: bool) -> int:
    stale = []
    for page in (ROOT / name for name in PAGES):
        old = page.read_text(encoding="utf-8")
        if (new := written(old)) != old:
            stale.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
