"""`multigate analyze` and `report` from run folders to files: all residuals, and bad input."""

import io
import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import multigate as mg
from multigate.__main__ import main
from multigate.analysis.command import AnalyzeConfig, ReportConfig, analyze, report
from multigate.analysis.measure import FAMILIES, measure
from multigate.checkpoint import checkpoints
from runs import prepared


@pytest.fixture
def runs(every, tmp_path):
    """Two of them, to be damaged."""
    for name in ("prenorm", "mgr-competitive"):
        shutil.copytree(every / name, tmp_path / "runs" / name)
    return tmp_path / "runs"


def look(*places, out, **changes):
    """The page and what was said."""
    shown = io.StringIO()
    config = AnalyzeConfig(
        runs=places, out=out, samples=6, prune_samples=3, device="cpu", figures=False
    )
    made = analyze(replace(config, **changes), Console(file=shown, width=500))
    return made.path.read_text(), shown.getvalue()


def test_every_residual_is_analysed(every, tmp_path):
    page, shown = look(every, out=tmp_path)
    numbers = tmp_path / "numbers"
    for name in mg.residual_names():
        assert f"{name}: step-00000002, 6 windows of 32 tokens" in shown
        arrays = np.load(numbers / f"{name}.npz")
        families = {key.split(".")[0] for key in arrays}
        assert families >= {"angles", "dynamics", "massive", "pruning"}
        assert families <= set(FAMILIES)
        assert np.isfinite(arrays["dynamics.output_rms"]).all()
        assert np.isfinite(arrays["dynamics.grad_rms"]).all()
    for family, (title, _) in FAMILIES.items():
        assert title in page
        assert (numbers / f"{family}.csv").stat().st_size > 100
    for sentence in ("prenorm has no gates", "attnres-full"):
        assert sentence in page
    assert len(page) < 8_000_000


def test_the_same_numbers_whatever_the_batches(every, tmp_path):
    found = []
    for batch in (1, 4):
        look(every / "mgr-independent", out=tmp_path / str(batch), batch=batch)
        found.append(np.load(tmp_path / str(batch) / "numbers" / "mgr-independent.npz"))
    for name in found[0]:
        np.testing.assert_allclose(
            found[0][name], found[1][name], rtol=2e-4, atol=1e-6, err_msg=name
        )


def without_checkpoints(run, other):
    shutil.rmtree(run / "checkpoints")
    return "holds no checkpoint"


def truncated_log(run, other):
    path = run / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    return "1 line was left out of log.jsonl"


def unknown_residual(run, other):
    change_state(run, lambda state: state["model"].update(residual="quantum"))
    return "unknown residual 'quantum'"


def from_the_future(run, other):
    change_state(run, lambda state: state["model"].update(wormholes=3))
    return "settings that this version of multigate does not know (wormholes)"


def damaged_weights(run, other):
    for path in checkpoints(run):
        (path / "model.safetensors").write_bytes(b"\0" * 100)
    return "is damaged"


def damaged_state(run, other):
    for path in checkpoints(run):
        (path / "state.json").write_text("{")
    return "is damaged"


def empty_state(run, other):
    for path in checkpoints(run):
        (path / "state.json").write_text("{}")
    return "its state.json has no step, model, data, tokenizer, versions"


def another_state(run, other):
    for path in checkpoints(run):
        (path / "state.json").write_text("[]")
    return "its state.json holds no table"


def lost_data(run, other):
    change_state(run, lambda state: state.update(data=str(run / "gone")))
    return "gone"


def another_tokenizer(run, other):
    change_state(run, lambda state: state.update(tokenizer="other"))
    return "it was trained with another tokenizer"


def short_text(run, other):
    folder = prepared(other / "short", count=5)
    change_state(run, lambda state: state["model"].update(context=5000))
    change_state(run, lambda state: state.update(data=str(folder)))
    return "too few for one window of 5000 + 1"


def change_state(run, change):
    for path in checkpoints(run):
        state = json.loads((path / "state.json").read_text())
        change(state)
        (path / "state.json").write_text(json.dumps(state))


BAD = [
    *(without_checkpoints, truncated_log, unknown_residual, from_the_future, damaged_weights),
    *(damaged_state, empty_state, another_state, lost_data, another_tokenizer, short_text),
]


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_what_is_bad_is_one_sentence_and_the_rest_appears(spoil, runs, tmp_path):
    sentence = spoil(runs / "prenorm", tmp_path)
    page, shown = look(runs, out=tmp_path / "out")
    problems = [line for line in shown.splitlines() if line.startswith("prenorm: ")]
    problems = [line for line in problems if not re.search(r"windows of .* s$", line)]
    assert len(problems) == 1
    assert sentence in problems[0]
    assert problems[0].rstrip().endswith(".")
    assert re.escape("Traceback") not in shown
    assert (tmp_path / "out" / "numbers" / "mgr-competitive.npz").exists()
    assert "mgr-competitive" in page
    assert "<tr" in page


def test_what_was_measured_before_an_error_stays(every, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("multigate.analysis.pruning.block_pruning", full)
    page, shown = look(every / "prenorm", out=tmp_path)
    assert "prenorm: the GPU's memory is full: give a smaller --batch." in shown
    assert "Angular distance, prenorm" in page
    assert "Block pruning" not in page


def test_pruning_reads_text_from_all_over(every, tmp_path, monkeypatch):
    seen = []

    def noted(model, rows, *_):
        seen.append(rows)
        return {}

    monkeypatch.setattr("multigate.analysis.pruning.block_pruning", noted)
    model = mg.GPT(mg.preset("tiny", residual="prenorm", context=8))
    rows = torch.arange(90).reshape(10, 9)
    measure(model, rows, 3)
    assert seen[0][:, 0].tolist() == [0, 36, 81]


def test_the_page_says_what_was_done(every, tmp_path):
    page, _ = look(every / "hc", every / "prenorm", out=tmp_path, checkpoint="last", samples=5)
    assert ">at step<" in page
    for words in ("--samples 5", "--checkpoint last", "--figures False", f"--out {tmp_path}"):
        assert words in page
    assert "--split" not in page


def test_runs_on_different_text_are_not_compared_unsaid(every, runs, tmp_path):
    other = prepared(tmp_path / "other", count=30)
    change_state(runs / "prenorm", lambda state: state.update(data=str(other)))
    _, shown = look(runs, out=tmp_path / "out")
    assert "The runs were measured on different text: numbers may not be compared." in shown


def test_a_new_report_takes_the_files_of_the_old_one_away(every, tmp_path):
    look(every / "hc", out=tmp_path)
    (tmp_path / "numbers" / "mine.txt").touch()
    look(every / "prenorm", out=tmp_path)
    names = {path.name for path in (tmp_path / "numbers").iterdir()}
    assert {"prenorm.npz", "mine.txt"} <= names
    assert "hc.npz" not in names


def test_a_folder_that_cannot_be_written(every, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="the report cannot be kept in .*: choose a folder"):
        look(every / "hc", out=tmp_path / "file")


def test_without_plotly_it_is_said_before_anything_is_measured(every, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match=r"needs the package plotly: pip install 'multigate\[plot"):
        look(every / "hc", out=tmp_path)


def test_names_with_brackets_are_shown_as_they_are(every, tmp_path):
    shutil.copytree(every / "prenorm", tmp_path / "[red]b")
    page, shown = look(tmp_path / "[red]b", out=tmp_path / "out")
    assert "[red]b: step-00000002" in shown
    assert "[red]b" in page


def test_no_run_at_all_could_be_measured(every, tmp_path, capsys):
    flags = ["--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert main(["analyze", str(every / "hc"), *flags, "--figures", "False"]) == 1
    assert (tmp_path / "out" / "report.html").exists()


def test_a_single_checkpoint_and_another_text(every, tmp_path):
    (path,) = checkpoints(every / "highway")
    other = prepared(tmp_path / "other", count=20)
    page, shown = look(path, out=tmp_path / "out", data=other, split="train")
    assert "highway@step-00000002" in page
    assert f"of {other} (train)" in shown


def test_a_report_from_logs_alone(runs, tmp_path, capsys):
    shutil.rmtree(runs / "prenorm" / "checkpoints")
    (runs / "prenorm" / "log.jsonl").open("ab").write(b'{"event": "tra')
    made = report(ReportConfig(runs=(runs,), out=tmp_path / "out"), Console(width=500))
    page = made.path.read_text()
    assert "mgr-competitive" in page
    assert "Angular distance" not in page
    assert "1 line was left out of log.jsonl" in capsys.readouterr().out
    assert (tmp_path / "out" / "figures" / "loss.png").stat().st_size > 5000


def test_the_command_line(every, tmp_path, capsys):
    flags = ["--samples", "2", "--prune-samples", "1", "--device", "cpu"]
    names = [str(every / name) for name in ("prenorm", "mgr-competitive")]
    assert main(["analyze", *names, *flags, "--out", str(tmp_path / "a")]) == 0
    assert main(["report", *names, "--out", str(tmp_path / "r")]) == 0
    shown = capsys.readouterr().out
    assert str((tmp_path / "a" / "report.html").resolve()) in shown
    figures = list((tmp_path / "a" / "figures").iterdir())
    assert {path.suffix for path in figures} == {".png", ".pdf"}
    assert {"loss", "dynamics", "pruning-loss", "gates-beta"} <= {path.stem for path in figures}
    assert str((tmp_path / "r" / "report.html").resolve()) in shown


@pytest.mark.parametrize("command", ["analyze", "report"])
def test_nothing_to_look_at(command, tmp_path, capsys):
    """An older report stays, and no folder is made."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.html").write_text("before")
    for name in ("old", "new"):
        runs = [str(tmp_path / "gone"), str(tmp_path / "empty")]
        assert main([command, *runs, "--out", str(tmp_path / name)]) == 1
    assert (tmp_path / "old" / "report.html").read_text() == "before"
    assert not (tmp_path / "new").exists()
    said = capsys.readouterr().err
    assert "gone does not exist" in said
    assert "empty is no run" in said


@pytest.mark.parametrize("name", ["samples", "prune_samples", "batch"])
def test_numbers_below_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0."):
        AnalyzeConfig(runs=(), **{name: 0})
