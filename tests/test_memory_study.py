"""The scripts in benchmarks/ that show what the memory modes cost."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multigate.config import resolve
from multigate.residuals.memory import Memory
from multigate.train import train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def study(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    recipe = resolve("tiny")
    model = replace(recipe.model, blocks=3, width=32, heads=1, context=32)
    config = replace(
        recipe,
        data=data,
        out=out,
        name="run",
        residual="mgr-competitive",
        steps=5,
        device="cpu",
        model=model,
    )
    train(config)
    script = ROOT / "benchmarks/memory_modes.py"
    # Twice the same: of equal shapes each is kept.
    runs = [str(out / "run")] * 2
    command = [sys.executable, str(script), *runs, "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    studies = json.loads((out / "memory_modes.json").read_text())
    assert list(studies) == ["6 sublayers, 4 streams", "6 sublayers, 4 streams, run"]
    found, again = studies.values()
    assert found == again
    assert (out / "memory_modes.png").stat().st_size > 10_000
    return found, done.stdout


@pytest.mark.slow
def test_gradients_of_every_mode_are_compared_with_store(study):
    found, shown = study
    gradients = found["gradients"]
    for mode in ("store, once more", "recompute", "exact"):
        assert gradients[mode]["same bits"], mode
        assert gradients[mode]["gates least"] == pytest.approx(1)
    assert not gradients["invert, keep 0"]["same bits"]
    assert 0.999 < gradients["invert, keep 1%"]["sublayers least"] <= 1
    assert "exact: same bits True" in shown


@pytest.mark.slow
def test_the_drift_of_the_inverted_streams(study):
    found, _ = study
    steps = 6 - 3
    for errors in found["drift"].values():
        assert len(errors) == steps
    plain, more = found["drift"]["keep 0"], found["drift"]["keep 5%"]
    assert plain[0] == plain[-1] == 0
    assert 0 < more[1] <= plain[1] < 1e-5
    assert sum(found["gate"]["histogram"]) == pytest.approx(1)
    assert 0 < found["gate"]["mean"] < found["gate"]["max"] < 1


def test_drift_counts_from_the_last_step():
    """From the streams that a step keeps: the last, every so many, and the first."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from memory_modes import drift

    steps, streams = [], torch.randn(50, 2, 4)
    for _ in range(6):
        y, beta = torch.randn(50, 4), torch.full((50, 2), 0.9)
        steps.append((y, beta, streams))
        streams = torch.lerp(streams, y.unsqueeze(1), 0.9)
    last, fourth, third, second, first, zeroth = drift(steps, Memory("invert", keep=0.0))
    assert last == zeroth == 0
    assert 0 < fourth < third < second < first < 0.1
    often = drift(steps, Memory("invert", keep=0.0, every=3))
    assert [error > 0 for error in often] == [False, True, False, True, True, False]
    assert often[1] == fourth
    assert often[4] < first
    assert drift(steps, Memory("invert", keep=1.0)) == [0.0] * 6


def test_loss_curves(tmp_path, monkeypatch, capsys):
    """Means of ten steps; what is left of a last, shorter span is not a point."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import loss_curves

    for name, shift in (("one", 0), ("two", 0.5)):
        (tmp_path / name).mkdir()
        records = [{"event": "train", "step": i, "loss": 25 - i + shift} for i in range(1, 26)]
        records.append({"event": "val", "step": 25, "loss": 3 + shift})
        text = "\n".join(json.dumps(record) for record in records)
        (tmp_path / name / "log.jsonl").write_text(text)
    runs = [str(tmp_path / name) for name in ("one", "two")]
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", *runs, "--out", str(tmp_path / "curves")])
    loss_curves.main()
    found = json.loads((tmp_path / "curves.json").read_text())
    assert found["one"] == {"train": [19.5, 9.5], "val": 3}
    assert found["two"] == {"train": [20, 10], "val": 3.5}
    assert (tmp_path / "curves.png").stat().st_size > 5_000
    assert "two: train 10.0000, val 3.5000" in capsys.readouterr().out


@pytest.mark.parametrize("guess", [0, 3, 40, 41, 120])
def test_the_search_for_the_largest_batch(guess):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from largest_batch import largest

    assert largest(lambda batch: batch <= 42, guess) == 40
    assert largest(lambda batch: batch <= 3, guess) == 0
