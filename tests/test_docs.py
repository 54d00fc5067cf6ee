"""The commands of the documents run for real; their numbers are what the code says.

test_pages.py has every block of every page.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import multigate as mg
from documents import ROOT, blocks

README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def shell(command, folder, timeout=600):
    """Run a line as a reader would: the virtual environment of the tests is not active."""
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    kept |= {"MAKEFLAGS": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=kept, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh_copy(folder):
    """What a clone would hold: tracked files, and new ones that are not ignored."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target)
    return folder


def test_the_commands_of_the_readme_are_these():
    """`make test` is what runs this; the others run below."""
    assert blocks(README, "bash") == [
        "make demo\nmake test\n",
        "python -m venv .venv\n"
        '.venv/bin/python -m pip install -c constraints.txt -e ".[train,plot]"\n'
        ".venv/bin/python -m multigate demo\n",
        ".venv/bin/multigate prepare data/python --sources stdlib --tokenizer bpe:4096\n"
        ".venv/bin/multigate train --scale tiny --residual mgr-competitive --data data/python "
        "--name first\n"
        ".venv/bin/multigate eval runs/first\n"
        ".venv/bin/multigate analyze runs/first\n"
        '.venv/bin/multigate sample runs/first --prompt "def read("\n',
        ".venv/bin/torchrun --nproc-per-node 2 -m multigate train --scale tiny --data data/python "
        "--parallel fsdp\n",
    ]


@pytest.mark.slow
def test_make_demo_from_a_fresh_clone(tmp_path):
    shown = shell("make demo STEPS=2", fresh_copy(tmp_path))
    for word in ("order-1 byte counts", "GPT, prenorm", "GPT, mgr-competitive", "Done in"):
        assert word in shown
    assert f"The report: {tmp_path}/demo-report/report.html" in shown
    assert "mgr-competitive" in (tmp_path / "demo-report/report.html").read_text()
    installed = tmp_path / ".venv" / "bin"
    assert (installed / "multigate").exists()
    assert not (installed / "ruff").exists(), "the demo needs nothing of the developers'"


@pytest.mark.slow
def test_the_lines_without_make_from_a_fresh_clone(tmp_path):
    fresh_copy(tmp_path)
    for line in blocks(README, "bash")[1].splitlines():
        line = line.replace("python -m venv", f"{sys.executable} -m venv")
        shown = shell(line + (" --steps 2" if line.endswith("demo") else ""), tmp_path)
    assert "GPT, mgr-competitive" in shown


def shortened(lines, folder):
    """Run the commands of a page in turn, with few steps and little text."""
    (folder / ".venv").symlink_to(ROOT / ".venv")
    few = {
        "train": " --steps 4 --tokens-per-step 512 --eval-tokens 2048",
        "eval": " --tokens 4096",
        "analyze": " --samples 4",
        "sample": " --tokens 8",
    }
    shown = ""
    for line in lines:
        flags = next((flags for word, flags in few.items() if f" {word} " in line), "")
        shown += shell(line if "--dry-run" in line else line + flags, folder)
    return shown


@pytest.mark.slow
def test_train_your_own(tmp_path):
    shown = shortened("".join(blocks(README, "bash")[2:]).splitlines(), tmp_path)
    assert "data/python: train" in shown
    assert "bits per byte" in shown
    assert "processes 2 x" in shown
    assert (tmp_path / "analysis/report.html").exists()
    assert (tmp_path / "runs/first/checkpoints/step-00000004/model.safetensors").exists()
    (sharded,) = tmp_path.glob("runs/tiny-mgr-competitive-python-0/checkpoints/step-*")
    assert len(list(sharded.glob("shard-*"))) == 2


def test_the_quickstart_sets_up_as_the_readme_does():
    """Those commands are run from a fresh clone above."""
    demo, by_hand, *_ = blocks(QUICKSTART, "bash")
    assert demo == "make demo\n"
    assert by_hand == blocks(README, "bash")[1]


@pytest.mark.slow
def test_the_commands_of_the_quickstart(tmp_path):
    shown = shortened("".join(blocks(QUICKSTART, "bash")[2:]).splitlines(), tmp_path)
    assert "bits per byte" in shown
    assert "recompute" in shown, "the dry run shows the memory modes"
    page = (tmp_path / "analysis/report.html").read_text()
    assert "first" in page
    assert "plain" in page
    assert (tmp_path / "report/report.html").exists()


COMMANDS = re.compile(r"^(?:torchrun .* -m )?multigate (train|prepare) (.*?)(?: *#.*)?$", re.M)


@pytest.mark.parametrize(("page", "count"), [("training", 6), ("memory", 2)])
def test_the_commands_of_the_training_pages_are_understood(page, count):
    """Each is parsed as the command line would; what they would do is tested elsewhere."""
    from multigate.__main__ import parse, train_flags
    from multigate.data import PrepareConfig

    found = COMMANDS.findall((ROOT / f"docs/{page}.md").read_text())
    assert len(found) == count
    for command, line in found:
        words = line.split()
        if command == "prepare":
            assert parse(PrepareConfig, words, command).out == Path(words[0])
        else:
            config, dry = train_flags(words)
            assert config.scale == words[words.index("--scale") + 1]
            assert dry == ("--dry-run" in words)
            options = config.gpt(256).options()
            assert options.get("memory", "store") == config.model.memory
            if "every" in words:
                assert options == {"memory": "invert", "keep": 0.02, "every": 8}


def test_the_estimate_on_the_training_page_is_what_a_dry_run_shows(capsys, monkeypatch):
    from multigate.__main__ import main

    page = (ROOT / "docs/training.md").read_text()
    (line,) = re.findall(r"^multigate (train .* --dry-run)$", page, re.M)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(line.split()) == 0
    row = re.compile(r"^ *(\w+(?: \*)?)((?: +\d+\.\d\d){7}) *$", re.M)
    shown, written = (dict(row.findall(text)) for text in (capsys.readouterr().out, page))
    assert list(shown) == list(written) == ["store *", "recompute", "invert", "exact"]
    for mode, numbers in shown.items():
        expected = [float(x) for x in numbers.split()]
        assert [float(x) for x in written[mode].split()] == pytest.approx(expected, abs=0.011)


def rows_of_the_h200():
    return json.loads((ROOT / "benchmarks/results/h200.json").read_text())["rows"]


def test_a_few_tokens_are_fast():
    """The CUDA kernels hold the goal for decoding, and are faster than compile; or it is told."""
    few = [
        row
        for row in rows_of_the_h200()
        if row["case"] == "gate_pool" and row["n"] == 4 and row["tokens"] <= 4096
    ]
    plain, normed = (
        {
            (row["tokens"], row["pass"], row["backend"], row["width"]): row["us"]
            for row in few
            if row["norm"] == norm
        }
        for norm in (False, True)
    )
    ours = {key: us for key, us in plain.items() if key[2] == "cuda"}
    ratios = {"forward": [], "backward": []}
    beside = 0
    for (tokens, name, _, width), us in ours.items():
        if other := plain.get((tokens, name, "compile", width)):
            beside += us < other
            if tokens >= 256:
                ratios[name].append(other / us)
        assert us <= 3 or name == "backward" or tokens > 16
    # At the tokens of the table, of all that were timed.
    assert (beside, len(ours)) == (5 * 2 * 3, 7 * 2 * 3)
    decoding = {key: us for key, us in normed.items() if key[0] <= 16 and key[1] == "forward"}
    assert len(decoding) == 2 * 3
    missed = {key: us for key, us in decoding.items() if us > 3}
    page = (ROOT / "docs/kernels.md").read_text()
    one, two = (f"{min(of):.1f} to {max(of):.1f} times" for of in ratios.values())
    assert f"takes {one} as long forward and {two} backward" in page
    assert bool(missed) == ("It is met, but for one width" in page)
    if missed:
        assert {key[3] for key in missed} == {1280}
        told = " and ".join(f"{us:.1f}" for us in missed.values())
        assert f": {told} us at C = 1280." in page


def test_the_ratios_in_the_readme_are_those_of_the_file():
    readme = " ".join((ROOT / "README.md").read_text().split())
    times = {
        (row["pass"], row["backend"], row["width"]): row.get("us")
        for row in rows_of_the_h200()
        if row["case"] == "gate_pool" and (row["n"], row["tokens"]) == (4, 32768)
    }
    for name in ("forward", "backward"):
        ratios = [
            times[name, "compile", width] / times[name, "cuda", width]
            for width in (768, 1024, 1280, 2048, 4096)
        ]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in readme
        ratios = [
            times[name, "paper", width] / times[name, "cuda", width]
            for width in (768, 1024, 1280, 2048, 4096)
        ]
        assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in readme
    steps = {
        (row["n"], row["residual"]): row
        for row in rows_of_the_h200()
        if row["case"] == "step" and (row["scale"], row["memory"]) == ("s", "store")
    }
    four, eight = (steps[n, "mgr-competitive"] for n in (4, 8))
    assert f"takes {four['ms']:.1f} ms, {four['overhead']:.1%} more than PreNorm's" in readme
    assert f"with eight, {eight['overhead']:.1%} more" in readme


def test_the_figures_of_the_memory_page_are_those_of_the_files():
    results = ROOT / "benchmarks/results"
    text = (ROOT / "docs/memory.md").read_text()
    steps = {
        (row["scale"].upper(), str(row["n"]), row["residual"], row["memory"]): row
        for row in rows_of_the_h200()
        if row["case"] == "step"
    }
    shown = re.findall(r"^\| ([SML]) \| ([48]) \| `(\w+)` \| (.*) \|$", text, re.M)
    modes = [key for key in steps if key[2] == "mgr-competitive" and key[0] in "SML"]
    assert sorted((*line[:2], "mgr-competitive", line[2]) for line in shown) == sorted(modes)
    for scale, n, memory, cells in shown:
        row = steps[scale, n, "mgr-competitive", memory]
        base = steps[scale, "1", "prenorm", "store"]["peak_gib"]
        most = steps[scale, n, "mgr-competitive", "store"]["peak_gib"] - base
        more = row["peak_gib"] - base
        expected = f"{row['ms']:.1f} | {row['baseline_ms']:.1f} | +{row['overhead']:.1%}"
        assert cells == f"{expected} | {row['peak_gib']:.2f} | {more:.2f} | {more / most:.0%}"
    for name, study in json.loads((results / "memory_modes.json").read_text()).items():
        gate, found = study["gate"], study["gradients"]
        inverted, often = found["invert, keep 1%"], found["invert, keep 1%, every 8"]
        line = (
            f"| {name} | {gate['share below 0.1']:.1%} | {gate['max']:.2f} "
            f"| {inverted['sublayers least']:.6f} | {inverted['gates least']:.6f} "
            f"| {often['gates least']:.6f} |"
        )
        assert line in text
        long = "1500 steps" in name
        assert inverted["sublayers least"] >= (0.9996 if long else 0.9999)
        assert inverted["gates least"] >= (0.995 if long else 0.999)
    for name, run in json.loads((results / "memory_curves.json").read_text()).items():
        assert f"{run['val']:.4f} ({name})" in text


def test_the_table_of_residuals_is_what_the_code_says():
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| ([\d,]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert [row[0] for row in rows] == mg.residual_names()[:10]
    for name, parameters, state in rows:
        with torch.device("meta"):
            residual = mg.build_residual(name, 768, 24)
        assert f"{sum(p.numel() for p in residual.parameters()):,}" == parameters
        largest = max(residual.state_size(i) for i in range(25))
        assert f"{largest / 768:.2f}" == state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("prepare.py stdlib bpe:500 --mb 1 --repeat 1", "prepare / library"),
        ("train_speed.py --scale tiny --micro-batch 2 --steps 8 --device cpu", "whole / alone"),
        ("stream_dtype.py DATA --scale tiny --steps 2 --tokens 600 --out OUT", "bf16 - float32 ="),
    ],
)
def test_benchmarks_run(command, word, data, tmp_path):
    """On a CPU, at sizes that show nothing but that."""
    line = command.replace("DATA", str(data)).replace("OUT", str(tmp_path))
    shown = shell(f"OMP_NUM_THREADS=1 {sys.executable} benchmarks/{line}", ROOT)
    assert word in shown


def test_links_and_pictures_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def follow_contributing(folder):
    """Put the worked example where its first lines say: a new file, or the end of an old one."""
    fresh_copy(folder)
    for block in blocks(CONTRIBUTING, "python"):
        path, code = block.split("\n", 1)
        target = folder / path.removeprefix("# ")
        before = target.read_text() if target.exists() else ""
        target.write_text(before + "\n\n" + code if before else code)
    return folder / "src/multigate/residuals/rezero.py"


def in_copy(folder, *arguments):
    """Run this Python on the copy instead of on the installed package."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def run_example(folder):
    (command,) = blocks(CONTRIBUTING, "bash")
    arguments = command.strip().removeprefix("python ").split()
    return in_copy(folder, *arguments, "-p", "no:cacheprovider")


@pytest.mark.slow
def test_add_a_residual_in_one_file(tmp_path):
    """The worked example of CONTRIBUTING passes the suite; with a wrong sign in it, it does not."""
    file = follow_contributing(tmp_path)
    done = run_example(tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b[12]\d passed", done.stdout), "the suite did not run over the new residual"
    use = (
        "import torch, multigate as mg; x = torch.ones(3, 8);"
        "print(mg.Stack([torch.sin, torch.cos], 'rezero', dim=8)(x).sum().item());"
        "mg.GPT(mg.preset('tiny', residual='rezero'))(torch.zeros(1, 4, dtype=torch.long))"
    )
    assert in_copy(tmp_path, "-c", use).stdout == "24.0\n"
    others = in_copy(
        tmp_path,
        "-m",
        "pytest",
        "tests/test_public.py",
        "tests/test_docs.py",
        "-k",
        "names or branches or small_rooms or table",
        "-p",
        "no:cacheprovider",
    )
    assert others.returncode == 0, others.stdout
    file.write_text(file.read_text().replace("+ share * wide(y)", "- share * wide(y)"))
    done = run_example(tmp_path)
    assert done.returncode == 1
    assert "FAILED tests/test_conformance.py::test_values_are_those_of_the_equations" in done.stdout
