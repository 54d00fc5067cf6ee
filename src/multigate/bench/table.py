"""The results as tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from .ops import Row


def show(rows: Iterable[Row], console: Console) -> None:
    rows = list(rows)
    steps = [row for row in rows if row["case"] == "step"]
    ops = [row for row in rows if row["case"] != "step"]
    titles = dict.fromkeys((row["case"], row["pass"]) for row in ops)
    for case, passed in titles:
        console.print(op_table([r for r in ops if (r["case"], r["pass"]) == (case, passed)]))
    if steps:
        console.print(step_table(steps))


def op_table(rows: Sequence[Row]) -> Table:
    """Microseconds and the share of copy bandwidth; one line a size, one column a backend."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    table = Table(title=f"{rows[0]['case']} {rows[0]['pass']}: us (share of copy)")
    for name in ("n", "width", "tokens", *names):
        table.add_column(name, justify="right")
    problem = ("n", "width", "tokens", "dtype", "variant", "norm")
    cells: dict[tuple[object, ...], dict[str, str]] = {}
    for row in rows:
        text = f"{row['us']:.1f} ({row['share_of_copy']:.0%})" if "us" in row else "error"
        cells.setdefault(tuple(row[k] for k in problem), {})[row["backend"]] = text
    for size in sorted(cells, key=lambda size: tuple(map(str_or_number, size))):
        row_cells = [cells[size].get(name, "") for name in names]
        table.add_row(*(str(part) for part in size[:3]), *row_cells)
    return table


def str_or_number(value: object) -> tuple[float, str]:
    """Numbers before words."""
    return (value, "") if isinstance(value, int) else (0, str(value))


def step_table(rows: Sequence[Row]) -> Table:
    table = Table(title="steps: forward and backward")
    words = ("scale", "residual", "memory")
    for name in (*words, "n", "ms", "tokens/s", "peak GiB", "overhead"):
        table.add_column(name, justify="left" if name in words else "right")
    for row in rows:
        head = [*(row[word] for word in words), str(row["n"])]
        if "ms" not in row:
            table.add_row(*head, "error")
            continue
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        speed = f"{row['tokens_per_s']:,.0f}"
        table.add_row(*head, f"{row['ms']:.1f}", speed, peak, f"{row['overhead']:+.1%}")
    return table


def line(row: Row) -> str:
    """One row as it comes in."""
    if row["case"] == "step":
        head = f"step {row['scale']} {row['residual']} n={row['n']} {row['memory']}"
        if "ms" in row:
            peak = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB"
            return f"{head}: {row['ms']:.2f} ms, {row['overhead']:+.1%}{peak}"
    else:
        size = f"n={row['n']} C={row['width']} T={row['tokens']}"
        head = f"{row['case']} {row['pass']} {row['backend']} {size}"
        if "us" in row:
            return f"{head}: {row['us']:.1f} us, {row['share_of_copy']:.1%} of copy"
    return f"{head}: {row['error']}"
