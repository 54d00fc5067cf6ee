"""Every block of every page runs: Python as it is, commands through the real command line.

A new page needs nothing here. A block that cannot run like this fails, until a test of its own
has it and `ELSEWHERE` names that test.
"""

import contextlib
import io
import re
import shlex
import tomllib

import pytest
import torch

import multigate.__main__ as command_line
from documents import ROOT, blocks, commands, fenced, pages, without_blocks

PAGES = pages()
LANGUAGES = {"python", "bash", "text"}
ELSEWHERE = {
    "CONTRIBUTING.md": "test_docs.test_add_a_residual_in_one_file",
    "docs/pipeline.md": (
        "test_pipeline_document.test_the_script_of_the_document_trains_as_one_process_does"
    ),
    "docs/transformers.md": "test_export.test_the_page_on_transformers",
}
"""Pages whose Python needs more than a Python to run in, and the test that runs it."""


def with_blocks(language):
    return [name for name, text in PAGES.items() if blocks(text, language)]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_of_a_kind_that_is_run(name):
    for block in fenced(PAGES[name]):
        where = f"{name}, line {block.line}"
        assert block.language in LANGUAGES, f"{where}: nobody runs {block.language!r} blocks"
        assert not block.indented, f"{where}: an indented block is seen by no test"
        if block.language == "text":
            assert not re.search(r"^(import|from) \w", block.text, re.M), f"{where}: this is Python"


@pytest.mark.parametrize("name", PAGES)
def test_indented_lines_are_formulas(name):
    """What is only indented is shown as code, and no test runs it."""
    for line in re.findall(r"(?:\A|\n)\n((?: {4,}(?![-*\d]).*\n)+)", without_blocks(PAGES[name])):
        assert not re.search(r"\b(import|multigate|torchrun|pip install)\b", line), line


@pytest.mark.parametrize("name", [n for n in with_blocks("python") if n not in ELSEWHERE])
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for block in blocks(PAGES[name], "python"):
        exec(compile(block, name, "exec"), namespace)
    CHECKS.get(name, lambda found: None)(namespace)


def test_python_that_does_not_run_here_runs_elsewhere():
    for name, test in ELSEWHERE.items():
        assert blocks(PAGES[name], "python"), f"{name} has no Python any more"
        module, function = test.split(".")
        assert f"\ndef {function}(" in (ROOT / f"tests/{module}.py").read_text()


def check_readme(found):
    assert found["h"].shape == (2, 10, 64)
    assert torch.isfinite(found["loss"])
    assert 0 < found["steps"][11]["beta"].mean() < 1


def check_analysis(found):
    assert found["angles"]["streams"].shape == (4, 7, 7)
    assert found["shares"].shape == (4, 13)
    assert len(found["norms"].norms) == 13


def check_memory(found):
    assert all(f.weight.grad is not None for f in found["sublayers"])
    assert found["stack"].residual.memory.mode == "recompute"
    memory = found["model"].stack.residual.memory
    assert (memory.mode, memory.keep, memory.every) == ("invert", 0.02, 8)


def check_quickstart(found):
    assert found["losses"][-1] < 0.75 * found["losses"][0]
    assert len(found["written"]) == 24


def check_faq(found):
    assert found["before"].std() < 1e-6 < 1e-3 < found["after"].std()
    assert found["features"].shape == (2, 8, 8, 16)
    sizes = [found["residual"].handover_size(i) // 768 for i in (6, 12, 18)]
    assert f"attnres-full {sizes}" in PAGES["docs/faq.md"]
    assert "steps.0.w2" in found["undecayed"]


def check_own_block(found):
    assert found["beta"].shape == (2, 12, 4)


CHECKS = {
    "README.md": check_readme,
    "docs/analysis.md": check_analysis,
    "docs/faq.md": check_faq,
    "docs/memory.md": check_memory,
    "docs/own_block.md": check_own_block,
    "docs/quickstart.md": check_quickstart,
}


class Parsed(BaseException):
    """The command line was understood; nothing was done."""


@pytest.fixture
def understood(monkeypatch):
    """Give words to a command of multigate up to the point where it has its configuration."""
    parse = command_line.parse

    def stop(*arguments, **keywords):
        raise Parsed(parse(*arguments, **keywords))

    monkeypatch.setattr(command_line, "parse", stop)

    def check(words):
        assert words[0] in command_line.COMMANDS, f"there is no command {words[0]}"
        with pytest.raises(Parsed):
            command_line.COMMANDS[words[0]](words[1:])

    return check


def check_torchrun(words, understood):
    from torch.distributed.run import get_args_parser

    launched = get_args_parser().parse_args(words)
    if launched.module:
        assert launched.training_script == "multigate"
        understood(launched.training_script_args)
    return launched.training_script


def check_harness(words, monkeypatch):
    harness = pytest.importorskip("lm_eval._cli.harness")
    monkeypatch.setattr("sys.argv", ["lm_eval", *words])
    assert harness.HarnessCLI().parse_args().command == words[0]


def check_pip(words):
    """What is installed from here has the extras that are asked for."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": None} | table["optional-dependencies"]
    asked = [w for w in words if re.match(r"(\.|multigate)(\[|$)", w)]
    assert asked, words
    for word in asked:
        for extra in word.partition("[")[2].rstrip("]").split(","):
            assert extra in extras, f"there is no extra {extra}"


@pytest.mark.parametrize("name", [n for n, text in PAGES.items() if commands(text)])
def test_commands_are_understood(name, understood, monkeypatch):
    for line in commands(PAGES[name]):
        program, *words = shlex.split(line.replace(".venv/bin/", ""))
        if program == "python" and words[:2] == ["-m", "multigate"]:
            program, words = "multigate", words[2:]
        if program == "python" and words[:2] == ["-m", "pip"]:
            program, words = "pip", words[2:]
        if program == "multigate":
            understood(words)
        elif program == "torchrun":
            script = check_torchrun(words, understood)
            assert script == "multigate" or f"# {script}" in PAGES[name], line
        elif program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert set(words) <= set(targets), line
        elif program == "lm_eval":
            check_harness(words, monkeypatch)
        elif program == "pip":
            assert words[0] == "install", line
            check_pip(words)
        elif program == "python" and words[:2] == ["-m", "pytest"]:
            assert (ROOT / words[2]).exists(), line
        elif program == "python" and words[0].endswith(".py"):
            assert (ROOT / words[0]).exists(), line
        else:
            assert line == "python -m venv .venv", f"{name}: nobody checks {line!r}"


@pytest.mark.parametrize("name", PAGES)
def test_prose_names_commands_that_exist(name):
    for word in re.findall(r"`(?:\.venv/bin/)?multigate ([a-z]\w*)", without_blocks(PAGES[name])):
        assert word in command_line.COMMANDS, f"{name}: there is no command {word}"
    # What changed, and what was measured, may tell of what is no more.
    if name not in ("CHANGELOG.md", "LOG.md"):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        for word in re.findall(r"`make ([a-z-]+)", without_blocks(PAGES[name])):
            assert word in targets, f"{name}: there is no target {word}"


@pytest.fixture(scope="module")
def flags():
    """Every flag that the help of some command shows."""
    found = set()
    for name, command in command_line.COMMANDS.items():
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
            command(["--help"])
        here = set(re.findall(r"--[a-z][\w.-]*", shown.getvalue()))
        assert len(here) > 1, f"the help of {name} was not read"
        found |= here
    return found


@pytest.mark.parametrize("name", [n for n in PAGES if n not in ("CHANGELOG.md", "LOG.md")])
def test_prose_names_flags_that_exist(name, flags):
    prose = " ".join(without_blocks(PAGES[name]).split())
    for code in re.findall(r"`([^`]*)`", prose):
        if code.startswith(("--", "multigate ")):
            unknown = set(re.findall(r"--[a-z][\w.-]*", code)) - flags
            assert not unknown, f"{name}: no command has {unknown}"
