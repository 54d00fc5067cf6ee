"""The roofline figure: how close every backend comes to a plain copy of the same bytes."""

from collections.abc import Sequence
from pathlib import Path

from multigate.data.optional import optional

from .ops import Row


def draw(rows: Sequence[Row], path: Path, machine: str, case: str = "gate_pool") -> bool:
    """Write a PNG of the share of copy bandwidth by width, a panel for every n and pass.

    Only the largest number of tokens is drawn, without a norm and with the competitive gate.
    Returns whether there was anything to draw.
    """
    rows = [r for r in rows if r["case"] == case and "us" in r and not r["norm"]]
    rows = [r for r in rows if r["variant"] in (None, "competitive")]
    if not rows:
        return False
    plt = optional("matplotlib.pyplot", "plot", "the figure")
    most = max(r["tokens"] for r in rows)
    rows = [r for r in rows if r["tokens"] == most]
    passes = [p for p in ("forward", "backward") if any(r["pass"] == p for r in rows)]
    counts = sorted({r["n"] for r in rows})
    widths = sorted({r["width"] for r in rows})
    backends = list(dict.fromkeys(r["backend"] for r in rows))
    size = (3.2 * len(counts) + 1.5, 2.8 * len(passes) + 0.8)
    figure, axes = plt.subplots(
        len(passes), len(counts), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for passed, line in zip(passes, axes, strict=True):
        for n, panel in zip(counts, line, strict=True):
            for i, backend in enumerate(backends):
                found = {
                    r["width"]: r["share_of_copy"]
                    for r in rows
                    if (r["pass"], r["n"], r["backend"]) == (passed, n, backend)
                }
                where = [i for i, width in enumerate(widths) if width in found]
                shares = [found[widths[i]] for i in where]
                panel.plot(where, shares, marker="o", label=backend, color=f"C{i}")
            panel.axhline(1.0, color="black", linewidth=1, linestyle="--")
            panel.set_title(f"{passed}, n = {n}", fontsize=10)
            panel.set_xticks(range(len(widths)), [str(width) for width in widths])
            panel.set_ylim(0, 1.1)
            panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("width C")
    for line in axes:
        line[0].set_ylabel("share of copy bandwidth")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", frameon=False)
    figure.suptitle(f"{case}, {most} tokens, {machine}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1 - 1.1 / size[0], 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
