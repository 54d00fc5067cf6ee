"""Write the tables of README.md and docs/ anew from the results that are kept.

    make tables      # the results from the kept logs, then this
    python scripts/tables.py --check

Losses come from repro/, times from benchmarks/results/h200.json. A table stands between
`<!-- table NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit status says
whether a page is out of date.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from multigate.repro.plan import split_name
from multigate.repro.results import compared
from multigate.repro.table import NOTHING, difference, markdown, spread

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/evidence.md", "docs/kernels.md", "docs/memory.md")
BLOCK = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
Row = dict[str, Any]


@cache
def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / name).read_text("utf-8"))
    return found


def results() -> dict[str, Any]:
    return kept("repro/mini/results.json")


def rows_of(group: int) -> list[Row]:
    """The rows of a group of Table 1 that have been run."""
    return [row for row in results()["groups"][group]["rows"] if row["seeds"]]


def table(head: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> str:
    """With so many columns of words, then numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return markdown([head, rule, *lines]) + "\n"


def losses(group: int) -> str:
    head = ["model", "seeds", "val", "test", "test - PreNorm", "verdict", "pooled"]
    rows = rows_of(group)
    papers = [(row["paper"] or {}).get("difference") for row in rows]
    lines = []
    for row, paper in zip(rows, papers, strict=True):
        apart = row["differences"].get("test")
        line = [
            row["label"],
            str(len(row["seeds"])),
            spread(row["losses"]["val"]),
            spread(row["losses"]["test"]),
            difference(apart),
            *((apart["verdict"], apart["pooled_verdict"]) if apart else (NOTHING, NOTHING)),
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
        lines.append((*cells, test["verdict"], test["pooled_verdict"], paper))
    head = ("model", "compared with", "val", "test", "verdict", "pooled", "the paper at S, val")
    return table(head, lines, words=2)


def ablation(title: str) -> str:
    """A table of the ablations. Rows are compared with others of it; those have no difference."""
    (group,) = (g for g in kept("repro/mini/ablations.json")["groups"] if g["title"] == title)
    rows = [row for row in group["rows"] if row["seeds"]]
    told = [row["cell"] for row in compared(rows, "test")]
    lines = []
    for row in rows:
        apart = row["differences"]["test"] if row["cell"] in told else None
        score = [spread(row["losses"][split]) for split in ("val", "test")]
        verdict = apart["pooled_verdict"] if apart else NOTHING
        lines.append((row["label"], str(len(row["seeds"])), *score, difference(apart), verdict))
    return table(("model", "seeds", "val", "test", "test difference", "pooled"), lines)


def deep_rows() -> list[Row]:
    (group,) = kept("repro/deep/deep.json")["groups"]
    return [row for row in group["rows"] if row["seeds"]]


def deep() -> str:
    """Losses of the deep models that have been run."""
    lines = []
    for row in deep_rows():
        score = [spread(row["losses"][split]) for split in ("val", "test")]
        lines.append((row["label"], *score, difference(row["differences"].get("test"))))
    return table(("model", "val", "test", "test - PreNorm"), lines)


INSIDE = {
    "largest activation": ("largest value", ".0f"),
    "largest / mean": ("largest / mean", ".0f"),
    "output rms, last / first block": ("output, last / first block", ".2f"),
    "gradient rms, shallow / deep": ("gradient, shallow / deep", ".2f"),
    "angle to the next block, shallow": ("angle, shallow", ".3f"),
    "the same, deep": ("angle, deep", ".3f"),
    "loss without a block, deep, median": ("loss without a block, deep, median", "+.4f"),
    "the same, smallest": ("the same, smallest", "+.4f"),
}


def inside() -> str:
    """What `multigate analyze` saw in the deep models."""
    labels = {row["cell"]: row["label"] for row in deep_rows()}
    seen = kept("repro/deep/deep.json")["inside"]
    several = len({split_name(found["run"])[1] for found in seen}) > 1
    lines = []
    for found in seen:
        cell, seed = split_name(found["run"])
        measured = ((found.get(name), spec) for name, (_, spec) in INSIDE.items())
        numbers = (NOTHING if x is None else format(x, spec) for x, spec in measured)
        lines.append((f"{labels[cell]}, seed {seed}" if several else labels[cell], *numbers))
    return table(("model", *(head for head, _ in INSIDE.values())), lines)


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


WIDTHS = (768, 1024, 1280, 2048, 4096)
PASSES = ("forward", "backward")
MANY = 32768
"""Tokens of the op rows, but for those of a sweep."""
BACKENDS = ("cuda", "triton", "paper", "compile", "reference", "liger-mhc")
SCALES = ("s", "m", "l", "wide")
MODES = ("store", "recompute", "invert", "exact")


def measured(case: str, **fields: Any) -> list[Row]:
    """The rows of a case, without a norm unless told, in which these fields have these values."""
    rows = [row for row in kept("benchmarks/results/h200.json")["rows"] if row["case"] == case]
    wanted = {"norm": False, **fields} if case != "step" else fields
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def cells(shown: Callable[[Row], str], names: Iterable[dict[str, Any]]) -> list[str]:
    """What is shown of the one row of each name; nothing where there is none."""
    found = [measured(**name) for name in names]
    return [shown(rows[0]) if rows else "" for rows in found]


def microseconds(row: Row) -> str:
    return f"{row['us']:.0f}"


def ours() -> str:
    """Microseconds and share of copy of the CUDA kernels."""
    lines = []
    for name, n in product(PASSES, (2, 4, 8)):
        of = {"case": "gate_pool", "pass": name, "n": n, "backend": "cuda", "tokens": MANY}
        shares = cells(
            lambda row: f"{microseconds(row)} ({row['share_of_copy']:.0%})",
            ({**of, "width": width} for width in WIDTHS),
        )
        lines.append((name, str(n), *shares))
    return table(("pass", "n", *wide_head()), lines, words=2)


def others(n: int) -> str:
    lines = []
    for name, backend in product(PASSES, BACKENDS):
        of = {"case": "gate_pool", "pass": name, "n": n, "backend": backend, "tokens": MANY}
        times = cells(microseconds, ({**of, "width": width} for width in WIDTHS))
        if any(times):
            lines.append((name, f"`{backend}`", *times))
    return table(("pass", "backend", *wide_head()), lines, words=2)


def wide_head() -> list[str]:
    return [f"C={WIDTHS[0]}", *map(str, WIDTHS[1:])]


def depth() -> str:
    """depth_pool, forward / backward."""
    lines = []
    for sources, backend in product((5, 9, 25), ("cuda", "triton", "fla", "liger")):
        of = {"case": "depth_pool", "n": sources, "backend": backend, "tokens": MANY}
        both = [
            cells(microseconds, ({**of, "width": width, "pass": name} for width in WIDTHS[:-1]))
            for name in PASSES
        ]
        pairs = [f"{a or '-'} / {b or '-'}" if a or b else "" for a, b in zip(*both, strict=True)]
        if any(pairs):
            lines.append((str(sources), f"`{backend}`", *pairs))
    return table(("sources", "backend", *wide_head()[:-1]), lines, words=2)


def few() -> str:
    """Few tokens, as in decoding."""
    columns = list(product(("cuda", "compile"), WIDTHS[:3]))
    kinds = (("forward", False), ("forward", True), ("backward", False))
    lines = []
    for tokens, (name, norm) in product((1, 16, 256, 1024, 4096), kinds):
        of = {"case": "gate_pool", "pass": name, "n": 4, "tokens": tokens, "norm": norm}
        times = cells(
            lambda row: f"{row['us']:.1f}",
            ({**of, "backend": backend, "width": width} for backend, width in columns),
        )
        if any(times):
            lines.append((str(tokens), f"{name}, norm" if norm else name, *times))
    head = [f"`{backend}`, C=768" if width == 768 else str(width) for backend, width in columns]
    return table(("tokens", "pass", *head), lines, words=2)


def timed(row: Row) -> tuple[str, str, str]:
    """A step, and PreNorm's in the same process."""
    return f"{row['ms']:.1f}", f"{row['baseline_ms']:.1f}", f"+{row['overhead']:.1%}"


def steps() -> str:
    lines = []
    for scale in SCALES:
        rows = measured("step", scale=scale, memory="store")
        for row in sorted(rows, key=lambda row: row["overhead"]):
            name = f"`{row['residual']}`, n = {row['n']}"
            speed, peak = f"{row['tokens_per_s']:,.0f}", f"{row['peak_gib']:.2f}"
            lines.append((scale_name(scale), name, *timed(row), speed, peak))
    head = ("scale", "residual", "ms", "PreNorm, ms", "over PreNorm", "tokens/s", "peak GiB")
    return table(head, lines, words=2)


def scale_name(scale: str) -> str:
    return scale if scale == "wide" else scale.upper()


def memory() -> str:
    """The competitive gate in every memory mode, and what it adds to PreNorm's peak."""
    lines = []
    for scale, n in product(SCALES[:3], (4, 8)):
        of = {"scale": scale, "residual": "mgr-competitive", "n": n}
        (base,) = measured("step", scale=scale, residual="prenorm")
        rows = {row["memory"]: row for row in measured("step", **of)}
        for mode in (mode for mode in MODES if mode in rows):
            row = rows[mode]
            more, most = (r["peak_gib"] - base["peak_gib"] for r in (row, rows["store"]))
            beyond = (f"{row['peak_gib']:.2f}", f"{more:.2f}", f"{more / most:.0%}")
            lines.append((scale_name(scale), str(n), f"`{mode}`", *timed(row), *beyond))
    head = ("scale", "n", "`memory`", "ms", "PreNorm, ms", "over PreNorm", "peak GiB")
    return table((*head, "beyond PreNorm", "of what store adds"), lines, words=3)


TABLES: dict[str, Callable[[], str]] = {
    "rows": lambda: losses(0),
    "scaled": lambda: losses(1),
    "related": lambda: losses(2),
    "pairs": pairs,
    "bias": lambda: ablation("Initial gate bias"),
    "streams": lambda: ablation("Number of streams"),
    "shapes": lambda: ablation("Depth at nearly equal parameters"),
    "floats": lambda: ablation("Streams in float32"),
    "modes": lambda: ablation("Memory mode"),
    "deep": deep,
    "inside": inside,
    "short": short,
    "ours": ours,
    "others4": lambda: others(4),
    "others8": lambda: others(8),
    "depth": depth,
    "steps": steps,
    "memory": memory,
    "few": few,
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
