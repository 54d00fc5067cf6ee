"""The wheel holds all that the package needs, and runs where nothing else is."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def links():
    """A folder of wheels that pip is told of, for uv, which does not read pip's settings."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ["--find-links", found] if found else []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_every_file_is_in_it(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "multigate"
    files = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted = {f"multigate/{p.relative_to(package).as_posix()}" for p in files}
    wanted |= {f"multigate/configs/{p.name}" for p in (ROOT / "configs").iterdir()}
    assert {name for name in held if ".dist-info/" not in name} == wanted


@pytest.mark.slow
def test_it_runs_in_an_empty_environment(wheel, tmp_path):
    """The core with its own dependencies; then the demo, report included, with two extras."""
    place = tmp_path / "env"
    venv.create(place)
    python = place / "bin" / "python"

    def run(*words):
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(what):
        pip = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python)
        run(*pip, "-c", ROOT / "constraints.txt", *links(), what)

    install(wheel)
    code = "import multigate as mg, torch; model = mg.GPT(mg.preset('tiny')); print(mg.__file__)"
    assert str(place) in run(python, "-c", code)
    install(f"{wheel}[train,plot]")
    assert "The report: " in run(python, "-m", "multigate", "demo", "--steps", "2")
    assert (tmp_path / "demo-report" / "report.html").stat().st_size > 1_000_000
