"""The figure of a study: its curves, and where its rows end."""

from dataclasses import replace

import matplotlib.figure
import numpy as np
import pytest

from multigate.repro.cells import Cell
from multigate.repro.figure import apart, draw, draw_differences, mean_curve
from multigate.repro.kept import Kept
from multigate.repro.results import Finished, compared, group, shown_runs
from multigate.repro.stats import noise
from multigate.repro.studies import Group

# The test losses of each seed.
CELLS = {
    "base": (3.30, 3.28, 3.29),
    "better": (3.25, 3.22, 3.25),
    "two-seeds": (3.27, 3.26),
    "one-seed": (3.31,),
}


def kept(seed, test, val=(4.0, 3.3)):
    """A run of twenty steps."""
    records = [{"event": "train", "step": k, "loss": 5.0 - k / 20} for k in range(1, 21)]
    records += [{"event": "val", "step": 10 * (k + 1), "loss": loss} for k, loss in enumerate(val)]
    records += [
        {"event": "score", "step": 20, "split": split, "loss": loss}
        for split, loss in (("val", val[-1]), ("test", test))
    ]
    return Kept("run", {"seed": seed}, {}, records)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *_, **__: figures.append(self)
    )
    return figures


def test_where_the_rows_end(drawn, tmp_path):
    """Each seed's difference to the first row, their mean, and both intervals."""
    runs = {
        f"{cell}-seed{seed}": kept(seed, test)
        for cell, losses in CELLS.items()
        for seed, test in enumerate(losses)
    }
    found = Finished(runs, 1.0)
    rows = [{"cell": cell, "label": cell.upper()} for cell in ("missing", *CELLS)]
    assert draw(rows, found, "test", tmp_path / "a.png", "A study")
    (figure,) = drawn
    panel = figure.axes[2]
    assert panel.get_title() == "test loss - BASE, at the end"
    assert [label.get_text() for label in panel.get_yticklabels()] == [c.upper() for c in CELLS]
    lines = [line.get_xydata().round(6).tolist() for line in panel.get_lines()]
    for place, cell in enumerate(CELLS):
        each = [a - b for a, b in zip(CELLS[cell], CELLS["base"], strict=False)]
        dots = [[round(x, 6), place] for x in each]
        assert (dots in lines) == (cell != "base")
        assert ([[round(np.mean(each), 6), place]] in lines) == (cell != "base")
    at = {place: [x for x in lines if len(x) == 2 and x[0][1] == place] for place in (1, 2, 3)}
    assert [len(bars) for bars in at.values()] == [2, 3, 1]
    own = 4.302653 * np.std([-0.05, -0.06, -0.04], ddof=1) / np.sqrt(3)
    pooled = found.noise["test"].half(1)
    assert [[round(-0.05 - own, 6), 1.0], [round(-0.05 + own, 6), 1.0]] in at[1]
    assert at[3] == [[[round(0.01 - pooled, 6), 3.0], [round(0.01 + pooled, 6), 3.0]]]


def test_noise_is_of_all_cells_there_are():
    """Of those at the learning rate of the tables, whoever asked for them."""
    losses = {"one": (3.0, 3.1), "two": (3.2, 3.4), "alone": (3.3,)}
    runs = {
        f"{cell}-lr2-seed{seed}": kept(seed, loss)
        for cell, each in losses.items()
        for seed, loss in enumerate(each)
    }
    other_rate = {f"one-seed{seed}": kept(seed, 9.0 * seed) for seed in (0, 1)}
    found = Finished({**runs, **other_rate}, 2.0).noise["test"]
    assert found == noise([{0: 3.0, 1: 3.1}, {0: 3.2, 1: 3.4}])
    assert (found.freedom, round(found.deviation, 6)) == (1, 0.05)


def test_nothing_to_draw(drawn, tmp_path):
    rows = [{"cell": "missing", "label": "Missing"}]
    assert not draw(rows, Finished({}, 1.0), "test", tmp_path / "a.png", "A study")
    alone = {"cell": "base", "label": "Base", "against": "PreNorm", "differences": {"test": {}}}
    groups = [{"title": "One", "rows": [alone]}]
    assert not draw_differences(groups, "test", tmp_path / "a.png", "A study")
    assert not drawn


BASE = Cell("base", "Base", "prenorm")
MORE, LESS = (Cell(f"base-{word}", f"Base, {word}", "prenorm", {}, "base") for word in "ab")
OTHER = Cell("other", "Other", "highway", {}, "elsewhere")
CELL = {cell.key: cell for cell in (BASE, MORE, LESS, OTHER)}


def tables(kept_runs, asked):
    """Two tables of these cells, of which LESS is in both."""
    found = Finished(kept_runs, 1.0)
    groups = (Group("One", [BASE, MORE, LESS]), Group("Two", [BASE, LESS, OTHER]))
    return [group(of, False, CELL, found, asked, "mini") for of in groups], found


def test_a_row_is_shown_with_what_else_of_its_table_has_run():
    """Nobody need have asked for that here, but for some row of the table."""
    runs = {name: kept(0, 3.0) for name in ("base-seed0", "base-seed7", "base-a-seed0")}
    made, found = tables(runs, ["base-a-seed0"])
    assert [[row["cell"] for row in table["rows"]] for table in made] == [["base", "base-a"], []]
    assert list(shown_runs(made, found)) == ["base-seed0", "base-a-seed0"]
    made, found = tables({"base-a-seed0": runs["base-a-seed0"]}, ["base-a-seed0"])
    assert [row["cell"] for row in made[0]["rows"]] == ["base-a"]
    made, _ = tables({**runs, "base-b-seed0": kept(0, 2.9)}, ["base-a-seed0"])
    assert [[row["cell"] for row in of["rows"]] for of in made] == [
        ["base", "base-a", "base-b"],
        [],
    ]
    asked = ["base-a-seed0", "base-seed0"]
    assert [row["cell"] for row in tables(runs, asked)[0][1]["rows"]] == ["base"]


def test_where_the_rows_of_all_tables_end(drawn, tmp_path):
    """Each less the one it is compared with, which is zero; its table's title is above, in bold."""
    losses = {"base": 3.0, "base-a": 3.02, "base-b": 2.97, "other": 2.9}
    runs = {f"{cell}-seed0": kept(0, loss) for cell, loss in losses.items()}
    made, _ = tables(runs, list(runs))
    assert draw_differences(made, "test", tmp_path / "a.png", "A study")
    (figure,) = drawn
    (panel,) = figure.axes
    labels = panel.get_yticklabels()
    shown = ["One", "Base, a", "Base, b", "Two", "Base, b"]
    assert [label.get_text() for label in labels] == shown
    weights = [label.get_fontweight() for label in labels]
    assert weights == ["bold" if name in ("One", "Two") else "normal" for name in shown]
    dots = [line.get_xydata().round(6).tolist() for line in panel.get_lines()]
    assert [[0.02, 1]] in dots
    assert [[-0.03, 2]] in dots
    assert [[-0.03, 4]] in dots
    # What others are compared with has no line, though it is itself compared with a row that has.
    runs["elsewhere-seed0"] = kept(0, 3.5)
    cells = {**CELL, "elsewhere": Cell("elsewhere", "Elsewhere", "prenorm", {}, "elsewhere")}
    base = replace(BASE, against="elsewhere")
    found = Finished(runs, 1.0)
    one = group(
        Group("One", [cells["elsewhere"], base, MORE, OTHER]), False, cells, found, runs, "mini"
    )
    assert [row["label"] for row in compared(one["rows"], "test")] == ["Base, a", "Other"]


def test_the_curves_are_means_over_seeds():
    """Of the steps that all seeds have; a long run's are averaged over neighbours."""

    def run(shift, steps):
        losses = [{"event": "train", "step": k, "loss": 3.0 + shift + k / 1e4} for k in steps]
        return Kept("run", {}, {}, losses)

    steps, losses = mean_curve([run(0.0, range(1, 8)), run(1.0, range(3, 9))], "train", 5)
    assert steps.tolist() == [3, 4, 5, 6, 7]
    assert losses == pytest.approx([3.5 + k / 1e4 for k in range(3, 8)])
    every_tenth = [*range(10, 1300, 10), *range(1300, 1501)]
    steps, losses = mean_curve([run(0.0, every_tenth)], "train", 5)
    assert steps.tolist() == [*range(30, 1501, 50)]
    assert losses == pytest.approx([3 + k / 1e4 for k in steps])


def test_differences_of_curves_are_within_seeds():
    """A seed or a step that only one of the two has does not count."""
    runs = {0: kept(0, 0.0, (3.0, 2.0)), 1: kept(1, 0.0, (4.0, 2.5)), 2: kept(2, 0.0, (9.0, 9.0))}
    others = {0: kept(0, 0.0, (3.5, 2.2, 1.0)), 1: kept(1, 0.0, (4.5, 2.5)), 7: kept(7, 0.0)}
    steps, losses = apart(runs, others)
    assert steps.tolist() == [10, 20]
    assert losses == pytest.approx([-0.5, -0.1])
    assert [len(part) for part in apart(runs, {7: runs[0]})] == [0, 0]
