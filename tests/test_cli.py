"""The command line and what the demonstration shows."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from multigate import demo
from multigate.__main__ import main


def run(*arguments):
    command = [sys.executable, "-m", "multigate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_shows_both_losses_the_baseline_and_a_sample():
    screen = io.StringIO()
    scores = demo.demo(steps=4, console=Console(file=screen, width=100))
    shown = screen.getvalue()
    assert set(scores) == {"order-1", "prenorm", "mgr-competitive"}
    for score in scores.values():
        assert f"{score:.3f}" in shown
    assert 3.0 < scores["order-1"] < 4.2
    assert scores["prenorm"] != scores["mgr-competitive"]
    assert demo.PROMPT.strip() in shown
    assert re.search(r"step 4/4 .* bits/byte", shown)


@pytest.mark.slow
def test_the_demo_learns():
    """A fifth of the demo's steps already beats counting pairs of bytes, for both residuals."""
    scores = demo.demo(steps=200, console=Console(file=io.StringIO()))
    for name in demo.RESIDUALS:
        assert scores[name] < scores["order-1"] - 0.4


def test_help_and_errors():
    assert "demo" in run("--help").stdout
    assert "--steps" in run("demo", "--help").stdout
    for arguments, sentence in [
        (["demo", "--steps", "0"], "must be a whole number of at least 1, got '0'"),
        (["demo", "--steps", "abc"], "must be a whole number of at least 1, got 'abc'"),
        (["train-me"], "invalid choice: 'train-me'"),
        ([], "COMMAND"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr


def test_a_missing_standard_library_is_one_sentence(monkeypatch, capsys):
    def nothing():
        raise FileNotFoundError("/nowhere holds no .py file")

    monkeypatch.setattr(demo, "byte_corpus", nothing)
    assert main(["demo", "--steps", "1"]) == 1
    assert capsys.readouterr().err == "multigate: /nowhere holds no .py file\n"


def test_without_rich_the_demo_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert "pip install 'multigate[train]'" in capsys.readouterr().err
