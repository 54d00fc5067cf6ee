"""Models of a study timed alone, and what its tables make of it."""

import json
import shutil
from dataclasses import replace

import pytest

from multigate.__main__ import main
from multigate.config import ModelChanges, TrainConfig
from multigate.gpt import GPT
from multigate.repro import speed
from multigate.repro.config import SpeedConfig
from multigate.repro.kept import publishable, read_all, write_kept
from multigate.repro.settings import Settings

SHAPE = ModelChanges(blocks=2, width=32, heads=2, context=16)
CELLS = {
    "prenorm": ("prenorm", SHAPE),
    "attnres-full": ("attnres-full", SHAPE),
    "attnres-full-scaled": (
        "attnres-full",
        replace(SHAPE, residual_options={"scaled": True}),
    ),
    "moda": ("prenorm", replace(SHAPE, attention="moda")),
}
VOCABULARY = 384


@pytest.fixture
def out(tmp_path):
    """What a study of one seed keeps whose runs shared a device, three at a time."""
    base = replace(TrainConfig(), scale="tiny", data="text", steps=10)
    names = []
    for cell, (residual, model) in CELLS.items():
        name = f"{cell}-seed0"
        config = replace(base, residual=residual, model=model, name=name)
        parameters = GPT(config.gpt(VOCABULARY)).parameter_count()
        records = [
            {"event": "start", "step": 0, "parameters": parameters},
            {"event": "train", "step": 10, "loss": 3.0, "tokens_per_second": 1234567.0},
            {"event": "score", "step": 10, "split": "val", "loss": 3.0, "bits_per_byte": 1.0},
        ]
        records[-1]["tokens"] = 100
        write_kept(tmp_path / "runs" / name, config, {"micro_batch": 2, "at_once": 3}, records)
        names.append(name)
    data = {"name": "text", "fingerprint": "0" * 32, "tokens": {"train": 1000, "val": 100}}
    asked = {"studies": {"table1": names}, "commands": {"table1": ["multigate repro table1"]}}
    Settings(publishable(base), data, lr_factor=1.0, **asked).write(tmp_path)
    return tmp_path


def test_the_tables_take_the_speeds_of_models_alone(out, capsys):
    assert main(["repro", "summary", str(out)]) == 0
    page = (out / "TABLE.md").read_text()
    assert "1,234,567 (3 at once)" in page
    assert "`multigate repro speed` with this folder measures those" in page
    capsys.readouterr()
    for cell in ("attnres-full-scaled", "moda"):
        shutil.rmtree(out / "runs" / f"{cell}-seed0")

    assert main(["repro", "speed", str(out), "--device", "cpu", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 models, 2 at a time" in shown
    found = json.loads((out / "speeds.json").read_text())
    assert list(found["cells"]) == ["prenorm", "attnres-full"]
    assert {row["made_with"]["device"] for row in found["cells"].values()} == {"cpu"}
    page = (out / "TABLE.md").read_text()
    assert "at once" not in page
    assert "Without a percentage" not in page
    assert "with nothing beside it on the device" in " ".join(page.split())
    for cell, row in found["cells"].items():
        assert row["batch"] == 2
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["ms"] * 1e3)
        assert row["overhead"] == pytest.approx(row["ms"] / row["baseline_ms"] - 1)
        said = f"{row['tokens_per_s']:,.0f}"
        assert f"{cell}: {said} tokens/s, {row['overhead']:+.1%}" in shown
        assert f"{said} ({row['overhead']:+.1%})" in page
    assert found["cells"]["prenorm"]["overhead"] == 0


def test_the_models_are_those_of_the_runs(out):
    todo = {timing.cell: timing for timing in speed.timings(out, 1, "cpu")}
    assert list(todo) == list(CELLS)
    kept = read_all(out)
    for cell, timing in todo.items():
        assert timing.vocabulary == VOCABULARY
        assert timing.tokens == 2 * 16
        model = timing.candidate().model
        assert model.parameter_count() == kept[f"{cell}-seed0"].parameters
        assert model.config.residual_options == CELLS[cell][1].residual_options
        assert model.config.attention == CELLS[cell][1].attention
        base = timing.baseline().model
        assert base.config.residual == "prenorm"
        assert base.config.attention == "plain"
        assert (base.config.blocks, base.config.width) == (2, 32)


def test_a_model_that_cannot_be_timed_is_told_and_the_others_are_there(out, monkeypatch):
    def measured(todo, jobs):
        for timing in todo:
            # Rounded to four digits first, this would be shown as 25.1%.
            figures = {"tokens_per_s": 100.0, "overhead": 0.25048}
            failed = timing.cell == "moda"
            yield timing.row() | ({"error": "no memory."} if failed else figures)

    monkeypatch.setattr(speed, "measure_apart", measured)
    said = []
    speed.measure(out, (), 1, 1, "cpu", said.append)
    assert said[-1] == "moda: no memory."
    assert main(["repro", "summary", str(out), "--figures", "False"]) == 0
    page = (out / "TABLE.md").read_text()
    assert page.count("| 100 (+25.0%) |") == 4  # attnres in two tables, with and without 1/sqrt(d)
    assert page.count("1,234,567 (3 at once)") == 1
    assert "Without a percentage they are of the run" in " ".join(page.split())


def test_some_rows_are_timed_and_the_others_stay(out, monkeypatch):
    """In the order of the studies, whenever they were timed; what has no run any more goes."""
    speeds = iter([100.0, 200.0, 300.0, 400.0])

    def measured(todo, jobs):
        yield from (
            timing.row() | {"tokens_per_s": next(speeds), "overhead": 0.5} for timing in todo
        )

    def figures():
        cells = json.loads((out / "speeds.json").read_text())["cells"]
        return [(cell, row["tokens_per_s"]) for cell, row in cells.items()]

    monkeypatch.setattr(speed, "measure_apart", measured)
    assert main(["repro", "speed", str(out), "--device", "cpu", "--rows", "moda"]) == 0
    assert figures() == [("moda", 100)]
    rows = ["attnres-full", "prenorm"]
    assert main(["repro", "speed", str(out), "--device", "cpu", "--rows", *rows]) == 0
    assert figures() == [("prenorm", 200), ("attnres-full", 300), ("moda", 100)]
    shutil.rmtree(out / "runs" / "attnres-full-seed0")
    assert main(["repro", "speed", str(out), "--device", "cpu", "--rows", "moda"]) == 0
    assert figures() == [("prenorm", 200), ("moda", 400)]


def test_errors_are_sentences(out, tmp_path, capsys):
    (out / "speeds.json").write_text("{")
    assert main(["repro", "summary", str(out)]) != 0
    assert "speeds.json is damaged" in capsys.readouterr().err
    (out / "speeds.json").unlink()
    assert main(["repro", "speed", str(out), "--device", "cpu", "--rows", "modal"]) != 0
    said = capsys.readouterr().err
    assert f"row with a finished run in {out}" in said
    assert "moda" in said.partition("modal")[2]
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        SpeedConfig(out, rounds=0)
    empty = tmp_path / "empty"
    Settings({}, {}).write(empty)
    assert main(["repro", "speed", str(empty)]) != 0
    assert "has no finished run: there is nothing to time." in capsys.readouterr().err
