"""The examples run as a reader would run them, and what they print moves the right way."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = {"encoder", "vision", "decoder"}


def shown(name, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_these_are_the_examples():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == NAMES


@pytest.mark.slow
def test_encoder():
    text = shown("encoder", "--steps", "40")
    losses = [float(x) for x in re.findall(r"loss (\S+)", text)]
    assert losses[0] > 2.2
    assert losses[-1] < 1.0
    assert "turned around" in text


@pytest.mark.slow
def test_vision():
    text = shown("vision", "--steps", "50")
    right = [float(x) for x in re.findall(r"right on (\S+)%", text)]
    assert len(right) == 3
    assert right[0] < 40
    assert right[-1] > 50


@pytest.mark.slow
def test_decoder():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("multigate.hf needs the package transformers")
    text = shown("decoder", "--steps", "45")
    losses = [float(x) for x in re.findall(r"loss (\S+)", text)]
    assert losses[0] > 2.2
    assert losses[-1] < 1.0
    assert re.search(r"MultigateLlamaForCausalLM: [\d,]+ parameters", text)
    prompt, answer = (
        [int(x) for x in part.split(", ")]
        for part in re.search(r"\[(.*)\] goes on with \[(.*)\]", text).groups()
    )
    assert (len(prompt), len(answer)) == (2, 10)
    assert float(re.search(r"right in (\S+)%", text)[1]) > 10
