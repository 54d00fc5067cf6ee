"""Runs as their logs tell them: what is read, summed up and drawn, whole or damaged."""

import json
import math

import numpy as np
import pytest

from multigate.analysis import logs
from multigate.analysis.store import free_name, listed, save
from runs import run, small


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    config = small(data, tmp_path_factory.mktemp("runs"), name="whole", residual="mgr-competitive")
    run(config)
    return config.folder


def copied(folder, tmp_path, lines):
    """The run's log and settings, with other lines."""
    target = tmp_path / "copy"
    target.mkdir()
    (target / "config.toml").write_text((folder / "config.toml").read_text())
    (target / "log.jsonl").write_bytes(b"".join(lines))
    return target


def log_lines(folder):
    return (folder / "log.jsonl").read_bytes().splitlines(keepends=True)


BAD_LINES = [
    *(b'{"event": "train", "st', b"\xff\xfe\n", b"[]\n", b"{}\n"),
    b'{"event": "train", "step": null, "loss": 1.0}\n',
]


def test_what_a_run_says(trained):
    log = logs.read_run(trained, "whole")
    records = [json.loads(line) for line in log_lines(trained)]
    losses = [r["loss"] for r in records if r["event"] == "train"]
    assert log.problems == []
    assert (log.steps, len(losses)) == (12, 12)
    assert log.train_loss == pytest.approx(np.mean(losses))
    assert log.val_loss == [r["loss"] for r in records if r["event"] == "val"][-1]
    row = dict(zip(logs.COLUMNS, logs.row(log), strict=True))
    assert row["residual"] == "mgr-competitive"
    assert row["parameters"] == "33,093"
    assert row["steps"] == "12"
    assert row["val loss"] == f"{log.val_loss:.4f}"
    assert float(row["memory"].removesuffix(" GiB")) > 0
    assert int(row["tokens/s"].replace(",", "")) > 0


def test_a_run_that_is_still_going_on(trained, tmp_path):
    early = [line for line in log_lines(trained) if json.loads(line)["step"] <= 7]
    log = logs.read_run(copied(trained, tmp_path, early), "early")
    assert log.problems == []
    assert dict(zip(logs.COLUMNS, logs.row(log), strict=True))["steps"] == "7 of 12"
    assert "Not finished: early." in logs.charts([log])[0].seen


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_damaged_line_is_said_and_left_out(trained, tmp_path, bad):
    lines = log_lines(trained)
    log = logs.read_run(copied(trained, tmp_path, [*lines, bad]), "bad")
    assert log.problems == ["bad: 1 line was left out of log.jsonl, which cannot be read there."]
    assert log.steps == 12


def test_without_settings_or_log(tmp_path):
    log = logs.read_run(tmp_path, "nothing")
    assert len(log.problems) == 2
    assert "has no config.toml" in log.problems[0]
    assert "has no log of training steps" in log.problems[1]
    assert logs.row(log)[1:] == ["?", "?", "?", "0", "?", "?", "?", "?"]
    charts = logs.charts([log])
    assert charts[0].panels == ()
    assert charts[0].absent == ["nothing has no steps in its log."]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('model = "x"', "not one of `multigate train`"),
        ('steps = "many"', "not one of `multigate train`"),
        ("steps =", "its config.toml cannot be read"),
    ],
)
def test_settings_that_are_none(trained, tmp_path, change, sentence):
    folder = copied(trained, tmp_path, log_lines(trained))
    (folder / "config.toml").write_text(change)
    log = logs.read_run(folder, "odd")
    assert len(log.problems) == 1
    assert sentence in log.problems[0]
    assert logs.row(log)[2:5] == ["?", "33,093", "12"]


def test_a_log_that_is_a_folder_and_parameters_that_are_a_word(trained, tmp_path):
    lines = [
        line.replace(b'"parameters": ', b'"parameters": "many", "p": ')
        for line in log_lines(trained)
    ]
    folder = copied(trained, tmp_path, lines)
    assert logs.row(logs.read_run(folder, "odd"))[3] == "?"
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").mkdir()
    problems = logs.read_run(folder, "odd").problems
    assert problems[0] == "odd: its log.jsonl cannot be read (Is a directory)."


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"residual": "prenorm"}, "-"),
        ({"residual": "mgr-competitive"}, "4"),
        ({"residual": "mgr-competitive", "model": {"streams": 8}}, "8"),
        ({"residual": "quantum"}, "?"),
        ({}, "?"),
    ],
)
def test_the_number_of_streams(config, shown):
    assert logs.streams(config) == shown


def test_a_run_keeps_its_colour_where_another_has_no_steps(trained, tmp_path):
    whole = logs.read_run(trained, "whole")
    (chart, *_) = logs.charts([logs.read_run(tmp_path, "none"), whole])
    assert [line.colour for panel in chart.panels for line in panel.marks] == [1, 1]


def test_a_loss_that_was_not_finite_is_a_gap_not_an_error(trained, tmp_path):
    lines = [line.replace(b'"loss": ', b'"loss": null, "was": ', 1) for line in log_lines(trained)]
    log = logs.read_run(copied(trained, tmp_path, lines), "nan")
    assert math.isnan(log.train_loss)
    assert logs.row(log)[5] == "?"
    logs.charts([log])


def test_curves_are_means_over_neighbours():
    x, y = np.arange(1, 10001.0), np.sin(np.arange(10000.0))
    y[17] = np.nan
    thin_x, thin_y = logs.thinned(x, y)
    assert len(thin_x) == logs.POINTS
    kept = np.delete(y, 17)
    assert thin_y[0] == pytest.approx(kept[:20].mean())
    assert thin_y[-1] == pytest.approx(kept[-19:].mean())
    assert thin_x[-1] == pytest.approx(x[-19:].mean())


def test_labels_are_short_where_they_can_be(tmp_path):
    paths = [tmp_path / name for name in ("a/x", "b/x", "a/y")]
    assert logs.labels(paths) == ["a/x", "b/x", "y"]
    assert logs.labels([paths[0], paths[0]]) == ["a/x (1)", "a/x (2)"]


def test_the_best_run_is_named_first(trained):
    log = logs.read_run(trained, "one")
    other = logs.RunLog("two", {}, log.train, {**log.val, "loss": log.val["loss"] - 0.5}, None)
    text = logs.charts([log, other])[0].seen
    assert text == f"Lowest held-out loss: two, {other.val_loss:.4f}; one +0.5000."


def test_numbers_come_back_from_every_file(tmp_path):
    arrays = {
        "grid": np.array([[1.0, np.nan], [np.inf, -2.5]]),
        "counts": np.array([0, 3, 0], dtype=np.int64),
        "one": np.array(0.25),
    }
    save({"a<b": {"family": arrays}}, tmp_path)
    stored = np.load(tmp_path / "a-b.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[f"family.{name}"], array)
    table = json.loads((tmp_path / "a-b.json").read_text())
    assert table["family.grid"] == [[1.0, None], [None, -2.5]]
    assert listed(arrays["counts"]) == [0, 3, 0]
    lines = (tmp_path / "family.csv").read_text().splitlines()
    assert lines == [
        "run,array,index_0,index_1,index_2,value",
        "a<b,grid,0,0,,1.0",
        "a<b,grid,1,1,,-2.5",
        "a<b,counts,1,,,3",
        "a<b,one,,,,0.25",
    ]


def test_files_of_two_runs_have_two_names():
    taken = set()
    labels = ["r 1", "r-1", "R:1", "../..", "x" * 200, "x" * 201]
    names = [free_name(label, taken) for label in labels]
    assert names == ["r-1", "r-1-2", "R-1-3", "run", "x" * 60, "x" * 60 + "-2"]
