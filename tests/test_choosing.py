"""The numbers of the pages that explain and compare the residuals are what the code says."""

import json
import re

import pytest
import torch

import multigate as mg
from documents import ROOT, blocks
from multigate.config import resolve
from multigate.fit import Step, estimate
from multigate.residuals import flatten_state

DOCS = ROOT / "docs"
CHOOSING = (DOCS / "choosing.md").read_text()
REPRODUCE = (DOCS / "reproduce.md").read_text()
IDEA = (DOCS / "idea.md").read_text()
STEPS = [
    row
    for row in json.loads((ROOT / "benchmarks/results/h200.json").read_text())["rows"]
    if row["case"] == "step" and (row["scale"], row["memory"]) == ("s", "store")
]
NAMES = mg.residual_names()[:10]


def rows(text, heading):
    """The table under a heading: the cells of every row, by the name in its first cell."""
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", part, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def built(name, scale):
    config = mg.preset(scale)
    with torch.device("meta"):
        return mg.build_residual(name, config.width, 2 * config.blocks)


def vectors_moved(name, scale):
    """Vectors of width D that a step reads and writes at least, mean over the steps.

    Written is what a step leaves that was not there before. Read is what that depends on, as
    autograd sees it: the output y, and those parts of the state that have a gradient.
    """
    config = mg.preset(scale)
    residual = mg.build_residual(name, config.width, 2 * config.blocks)
    _, state = residual.start(torch.randn(config.width))
    total = 0
    for i in range(residual.depth):
        leaves = {}

        def leaf(part, leaves=leaves):
            if isinstance(part, tuple):
                return tuple(map(leaf, part))
            return leaves.setdefault(id(part), part.detach().clone().requires_grad_())

        before, y = leaf(state), torch.randn(config.width, requires_grad=True)
        h, state = residual.step(i, y, before)
        there = {id(t) for t in (*leaves.values(), y)}
        written = {id(t): t for t in (h, *flatten_state(state)) if id(t) not in there}.values()
        inputs = [*leaves.values(), y]
        made = sum(t.sum() for t in written)
        gradients = torch.autograd.grad(made, inputs, allow_unused=True)
        read = [t for t, g in zip(inputs, gradients, strict=True) if g is not None]
        total += sum(t.numel() for t in (*read, *written))
    return total / residual.depth / config.width


def test_the_count_of_moved_vectors_by_hand():
    """PreNorm reads x and y and writes x; MGR's gate reads y and n streams, writes n and h."""
    assert vectors_moved("prenorm", "tiny") == 3
    assert vectors_moved("mgr-competitive", "tiny") == (3 + 4 + 5 + 9 * 10) / 12
    assert vectors_moved("attnres-full", "tiny") == sum(range(3, 15)) / 12


def test_what_each_costs():
    found = rows(CHOOSING, "What each costs")
    assert list(found) == NAMES
    for name, (parameters, at_s, at_l, moved_s, moved_l, sent) in found.items():
        residual = built(name, "s")
        assert parameters == f"{sum(p.numel() for p in residual.parameters()):,}"
        for scale, state, moved in (("s", at_s, moved_s), ("l", at_l, moved_l)):
            whole = built(name, scale)
            largest = max(whole.state_size(i) for i in range(whole.depth + 1)) / whole.dim
            assert state == f"{largest:.1f}", (name, scale)
            assert moved == f"{vectors_moved(name, scale):.1f}", (name, scale)
        assert sent == f"{residual.handover_size(12) / residual.dim:g}", name


@pytest.mark.slow
def test_what_a_dry_run_says_each_keeps():
    found = rows(CHOOSING, "Memory and time in training")
    assert list(found) == NAMES
    for name, cells in found.items():
        model = mg.preset("s", residual=name)
        parts = estimate(model, resolve("s").optim, Step(32, 16, "bf16", "cuda"))
        assert cells[0] == f"{parts['residual'] / 2**30:.2f}", name


def test_what_was_measured_is_in_the_file():
    found = rows(CHOOSING, "Memory and time in training")
    measured = {(row["residual"], row["n"]): row for row in STEPS}
    for name, (_, ms, over, peak) in found.items():
        row = measured.get((name, 1)) or measured.get((name, 4))
        if row is None:
            assert (ms, over, peak) == ("", "", ""), name
        else:
            shown = (f"{row['ms']:.1f}", f"+{row['overhead']:.1%}", f"{row['peak_gib']:.1f}")
            assert (ms, over, peak) == shown, name
    eight = measured["mgr-competitive", 8]
    assert f"(+{eight['overhead']:.1%}, {eight['peak_gib']:.1f} GiB)" in CHOOSING


def test_the_memory_modes_on_this_page_are_those_of_the_training_page():
    training = (DOCS / "training.md").read_text()
    kept = dict(re.findall(r"^(\w+)(?: \*)?(?: +[\d.]+){4} +([\d.]+)", training, re.MULTILINE))
    assert list(kept) == ["store", "recompute", "invert", "exact"]
    assert rows(CHOOSING, "Memory and time in training")["mgr-competitive"][0] == kept["store"]
    least, *_, most = sorted((kept["recompute"], kept["invert"], kept["exact"]), key=float)
    assert f"bring the {kept['store']} of MGR down to {least} to {most}" in CHOOSING


def test_the_recipes_on_the_page_are_those_of_the_files():
    found = rows(REPRODUCE, "The models and their recipes")
    assert list(found) == ["tiny", "mini", "s", "m", "l"]
    for scale, cells in found.items():
        config, model = resolve(scale), mg.preset(scale, residual="prenorm")
        with torch.device("meta"):
            parameters = mg.GPT(model).parameter_count()
        assert cells == [
            f"{model.blocks} x {model.width}",
            f"{model.heads}",
            f"{model.vocab_size:,}",
            f"{parameters:,}",
            f"{config.steps:,}",
            f"{config.tokens_per_step:,}",
            f"{config.optim.lr_muon:g}",
            f"{config.optim.lr_adamw:g}",
            f"{config.optim.warmup}",
        ]


def test_what_the_pages_say_was_measured_is_in_the_log():
    """Under the date they give, in the words of the log or as a row of its tables."""
    log = " ".join((ROOT / "LOG.md").read_text().split("## 2026-11-15\n")[1].split())
    for said, logged in (
        ("2.127 and 2.103 bits per byte", "prenorm 2.127, mgr-competitive 2.103 bits per byte"),
        ("rises by 115, without any other by 0.4 to 1.3", None),
        ("by 0.56 to 0.77", None),
        ("-0.0006, the standard deviation 0.0015", "Mean -0.0006, standard deviation 0.0015"),
    ):
        assert said in REPRODUCE
        assert (logged or said) in log, said
    idea = " ".join(IDEA.split())
    assert "rises to 117 at the output of PreNorm; in MGR it is 18.5 after the second" in idea
    assert "rises to 117 at the output of PreNorm; in MGR it is 18.5 after the second" in log
    assert "8.7 at the output" in idea
    assert "8.7 at the output" in log


def test_speed_against_the_compiler_is_that_of_the_readme():
    """Where it is held against the file."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    there, back = re.search(
        r"(\S+ to \S+ times) as fast as `torch.compile`.* forward, and (\S+ to \S+ times) backward",
        readme,
    ).groups()
    assert f"{there} forward and {back} backward" in (DOCS / "faq.md").read_text()


def namespace_of(text):
    found = {}
    for block in blocks(text, "python"):
        exec(compile(block, "page", "exec"), found)
    return found


def test_the_first_gates_are_those_of_the_page():
    starts = namespace_of(REPRODUCE)["starts"]
    assert {key: f"{value:.4f}" for key, value in starts.items()} == {
        ("competitive", "paper"): "0.0474",
        ("independent", "paper"): "0.0553",
        ("independent", "calibrated"): "0.0474",
    }
    assert "starts at 0.0474, the independent one at 0.0553" in REPRODUCE


def test_the_drawings_show_what_the_code_computes():
    """The gates and weights of one step, and the curves."""
    found = namespace_of(IDEA)
    drawn = (DOCS / "step.svg").read_text()
    numbers = [f"{x:.2f}" for k in ("beta", "alpha") for x in found["step"][k].tolist()]
    written = re.findall(r">(0\.\d\d)</text>", drawn)
    assert [*written[::2], *written[1::2]] == numbers
    assert f"beta {' '.join(numbers[:4])}, alpha {' '.join(numbers[4:])}" in IDEA
    curves = (DOCS / "norms.svg").read_text()
    for name in ("prenorm", "attnres-block", "mgr-competitive"):
        (points,) = re.findall(rf'id="{name}"[^>]*points="([^"]*)"', curves)
        heights = [float(point.split(",")[1]) for point in points.split()]
        sizes = found["sizes"](name).tolist()
        assert [(300 - y) / 34 for y in heights] == pytest.approx(sizes, abs=0.005)
    ends = (found["sizes"](name)[-1].item() for name in ("prenorm", "mgr-competitive"))
    assert "# {:.2f} and {:.2f}".format(*ends) in IDEA
