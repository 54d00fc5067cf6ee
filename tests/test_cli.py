"""The command line and what the demonstration shows."""

import io
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from multigate import demo
from multigate.__main__ import COMMANDS, main
from multigate.data import open_data
from multigate.train import Result
from runs import prepared, quiet, write_documents


def run(*arguments, **options):
    command = [sys.executable, "-m", "multigate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_the_demo_shows_both_losses_the_baseline_a_sample_and_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SAMPLES", 16)
    screen, place = io.StringIO(), tmp_path / "report"
    scores = demo.demo(demo.DemoConfig(steps=4, report=place), Console(file=screen, width=120))
    shown = screen.getvalue()
    assert set(scores) == {"order-1", "prenorm", "mgr-competitive"}
    for score in scores.values():
        assert f"{score:.3f}" in shown
    assert 3.0 < scores["order-1"] < 4.2
    assert scores["prenorm"] != scores["mgr-competitive"]
    assert demo.PROMPT.strip() in shown
    assert re.search(r"step 4/4 .*loss .*val .*gate mean/max", shown)
    assert f"The report: {place.resolve()}/report.html" in shown
    assert "Angular distance, mgr-competitive" in (place / "report.html").read_text()


def test_the_demo_without_the_packages_for_a_report(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    screen = io.StringIO()
    demo._report([tmp_path], tmp_path, Console(file=screen, width=200))
    assert screen.getvalue().startswith("No report: ")


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """A fifth of the demo's steps already beats counting pairs of bytes, for both residuals."""
    config = demo.DemoConfig(steps=demo.DemoConfig.steps // 5, report=tmp_path)
    scores = demo.demo(config, quiet())
    for name in demo.RESIDUALS:
        assert scores[name] < scores["order-1"] - 0.4


def test_ctrl_c_stops_the_demo(monkeypatch, capsys):
    stopped = Result(1, 0.0, None, None, signal.SIGINT)
    monkeypatch.setattr(demo, "train", lambda config, console: stopped)
    assert main(["demo", "--steps", "2"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_order_1_counts(tmp_path):
    """Against counts made by hand, over the windows the models are measured on."""
    data = open_data(prepared(tmp_path))
    train, val = data.split("train"), data.split("val")
    counts = {}
    for shard in train.shards:
        for a, b in zip(shard[:-1].tolist(), shard[1:].tolist(), strict=True):
            counts[a, b] = counts.get((a, b), 0) + 1
    totals = {a: sum(n for (x, _), n in counts.items() if x == a) for a in range(256)}
    bits = []
    for row in val.rows(range(val.windows(50)), 50).tolist():
        for a, b in zip(row[:-1], row[1:], strict=True):
            bits.append(-np.log2((counts.get((a, b), 0) + 1) / (totals[a] + 256)))
    expected = np.mean(bits) * val.tokens / val.bytes
    assert demo.order1_bits_per_byte(train, val, 50, 10**9) == pytest.approx(expected)


@pytest.mark.slow
def test_from_text_to_a_score_in_three_commands(tmp_path):
    """As a user would, in an empty folder."""
    write_documents(tmp_path / "essays", count=80)
    sizes = ["--model.blocks", "1", "--model.width", "32", "--model.context", "32"]
    prepare = ["prepare", "data/essays", "--sources", "essays", "--val-share", "0.2"]
    train = ["train", "--data", "data/essays", "--name", "first", "--steps", "20", *sizes]
    train += ["--tokens-per-step", "256", "--residual", "attnres-full", "--device", "cpu"]
    for command in (prepare, train):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "attnres-full" in done.stdout
    val = float(re.search(r"val loss ([\d.]+)", done.stdout)[1])
    done = run("eval", "runs/first", "--json", "True", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout)
    assert score["split"] == "val"
    assert score["loss"] == pytest.approx(val, abs=0.05)
    assert score["perplexity"] == pytest.approx(np.exp(score["loss"]))
    assert score["tokens"] == open_data(tmp_path / "data/essays").split("val").tokens - 1
    shown = run("eval", "runs/first", "--device", "cpu", cwd=tmp_path).stdout
    assert f"{score['bits_per_byte']:.4f}" in shown


def test_help():
    listed = run("--help").stdout
    for name, function in COMMANDS.items():
        assert name in listed
        assert function.__doc__.split()[0] in listed
    assert "--steps" in run("demo", "--help").stdout
    shown = run("train", "--scale", "mini", "--help").stdout
    assert "--optim.lr-muon" in shown
    assert "65536" in shown
    assert "--dry-run" in shown
    assert "--model.memory {store,recompute,invert,exact}" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["demo", "--steps", "0"], 2, "steps must be at least 1, got 0."),
        (["demo", "--steps", "abc"], 2, "invalid literal"),
        (["train-me"], 2, "invalid choice: 'train-me'"),
        ([], 2, "COMMAND"),
        (["train", "--scale", "huge"], 1, "multigate: unknown scale 'huge'"),
        (["train", "--stepz", "3"], 2, "--steps"),
        (["train", "--data", "nowhere"], 1, "multigate: no source 'nowhere'"),
        (["train", "--residual", "mgr"], 1, "multigate: unknown residual 'mgr': did you mean"),
        (["train", "--residual", "hc", "--model.memory", "exact"], 1, "unknown option of hc 'mem"),
        (["train", "--model.memory", "half"], 2, "--model.memory"),
        (["train", "--config", "nowhere.toml"], 1, "there is no configuration file nowhere.toml"),
        (["eval", "nowhere"], 1, "multigate: nowhere holds no checkpoint"),
        (["eval", "nowhere", "--batch", "-1"], 2, "batch must be at least 1, got -1."),
        (["train", "--config", "."], 1, "multigate: . cannot be read as a configuration"),
        (["prepare", "out", "--tokenizer", "gpt3"], 1, "multigate: unknown tokenizer 'gpt3'"),
    ],
)
def test_errors_are_one_sentence(arguments, status, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        returned = main(arguments)
    except SystemExit as stopped:
        returned = stopped.code
    assert returned == status
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown


def test_without_the_packages_of_training_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert "pip install 'multigate[train]'" in capsys.readouterr().err
