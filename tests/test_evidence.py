"""The tables of the pages, and the words of the evidence page, say what the kept results say."""

import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multigate.ops.gate_pool import reference
from multigate.repro.figure import apart
from multigate.repro.kept import read_all
from multigate.repro.results import Finished
from multigate.repro.stats import Noise, noise
from multigate.residuals import build_residual

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/evidence.md", "docs/kernels.md", "docs/memory.md")
RESULTS = (
    "repro/mini/results.json",
    "repro/mini/ablations.json",
    "repro/deep/deep.json",
    "benchmarks/results/h200.json",
)
PAGE, MEMORY = ROOT / "docs/evidence.md", ROOT / "docs/memory.md"


def run(folder, *flags):
    command = [sys.executable, str(folder / "scripts/tables.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_tables_are_those_of_the_results(tmp_path):
    """And a number that is changed is seen, and written anew."""
    assert run(ROOT, "--check").returncode == 0
    for name in (*PAGES, *RESULTS, "scripts/tables.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs/evidence.md"
    text = page.read_text()
    found = json.loads((ROOT / "repro/mini/results.json").read_text())
    loss = f"{found['groups'][0]['rows'][0]['losses']['test']['mean']:.4f}"
    assert loss in text
    page.write_text(text.replace(loss, "3.0000"))
    stale = run(tmp_path, "--check")
    assert (stale.returncode, stale.stdout.strip()) == (1, "out of date: evidence.md")
    assert page.read_text() != text
    assert run(tmp_path).returncode == 0
    assert page.read_text() == text


def test_one_command_makes_them_from_the_logs(tmp_path):
    """Results and pages in which losses were changed are as they were."""
    for name in ("repro", "scripts", "docs", "benchmarks/results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    changed = (*RESULTS[:3], "repro/mini/TABLE.md", "repro/deep/DEEP.md", "README.md")
    for name in changed:
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(re.sub(r"\b3\.2\d{3}", "3.0000", text))
        assert (tmp_path / name).read_text() != text
    words = ["make", "tables", "READY=", f"PY={sys.executable}"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    for name in changed:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name


def test_the_numbers_in_its_words_are_those_of_the_files():
    text = " ".join(PAGE.read_text().split())
    rows = json.loads((ROOT / "benchmarks/results/h200.json").read_text())["rows"]
    steps = {
        (row["scale"], row["memory"]): row
        for row in rows
        if row["case"] == "step" and (row["residual"], row["n"]) == ("mgr-competitive", 4)
    }
    shares = [100 * steps[scale, "store"]["overhead"] for scale in "sml"]
    assert f"{min(shares):.1f} to {max(shares):.1f}% over PreNorm's pass" in text
    assert f"{steps['wide', 'store']['overhead']:.1%} at width 4096" in text
    independent = {
        row["scale"]: 100 * row["overhead"]
        for row in rows
        if row["case"] == "step" and (row["residual"], row["n"]) == ("mgr-independent", 4)
    }
    wide = independent.pop("wide")
    few, many = min(independent.values()), max(independent.values())
    assert f"Independent gate: {few:.1f} to {many:.1f}%, and {wide:.1f}%" in text
    base = next(
        row["peak_gib"]
        for row in rows
        if row["case"] == "step" and (row["scale"], row["residual"]) == ("l", "prenorm")
    )
    assert f"{steps['l', 'invert']['peak_gib'] - base:.1f} GiB beyond PreNorm" in text
    studies = json.loads((ROOT / "benchmarks/results/memory_modes.json").read_text())
    least = min(
        study["gradients"]["invert, keep 1%"][f"{of} least"]
        for name, study in studies.items()
        if name.startswith("72 sublayers")
        for of in ("sublayers", "gates")
    )
    assert f"every gradient's cosine with store's is within {1 - least:.4f} of 1 at 72" in text
    (long,) = (study for name, study in studies.items() if "1500 steps" in name)
    worst = long["gradients"]["invert, keep 1%"]
    assert f"the least cosine is {worst['gates least']:.4f} and" in text
    assert f"a gate's; {worst['sublayers least']:.4f} and" in text


def test_what_it_says_of_the_kept_runs():
    """How far gates open, and what the curves in the figure are of."""
    text = " ".join(PAGE.read_text().split())
    opened, apart = {}, []
    for run in sorted((ROOT / "repro/mini/runs").iterdir()):
        with gzip.open(run / "log.jsonl.gz", "rt") as lines:
            records = [json.loads(line) for line in lines]
        last = [r for r in records if r["event"] == "val"][-1]
        (score,) = [r for r in records if (r["event"], r.get("split")) == ("score", "val")]
        assert "eval_tokens = 524288" in (run / "config.toml").read_text()
        apart.append(score["loss"] - last["loss"])
        if "gate_max" in last and run.name.startswith("mgr-"):
            opened[run.name] = last["gate_max"]
    one, two = (opened.pop(f"mgr-competitive-{n}-lr2-seed0") for n in (1, 2))
    opened = opened.values()
    words = f"the largest is {min(opened):.2f} to {max(opened):.2f} with four or more streams"
    assert f"{words} ({one:.2f} with one, {two:.2f} with two)" in text
    assert words in MEMORY.read_text()
    assert "on 524,288 tokens" in text
    assert f"about {min(apart):.2f} higher" in text
    assert f"{min(apart):.2f}" == f"{max(apart):.2f}"
    studies = json.loads((ROOT / "benchmarks/results/memory_modes.json").read_text())
    short = [study["gate"]["max"] for name, study in studies.items() if "1500" not in name]
    assert (len(short), max(short) < 0.2) == (6, True)
    assert "trained for 300 steps, when no gate is above 0.2" in text


def found():
    return json.loads((ROOT / "repro/mini/results.json").read_text())


def test_what_it_says_of_seeds_and_of_the_best_row():
    text = " ".join(PAGE.read_text().split())
    rows, _, related = (group["rows"] for group in found()["groups"])
    seeds = {row["label"]: len(row["seeds"]) for row in rows}
    assert set(seeds.values()) == {3}
    scaled = {row["label"]: len(row["seeds"]) for row in found()["groups"][1]["rows"]}
    assert scaled == {label: 3 if "sqrt" in label else 1 for label in scaled}
    assert json.loads((ROOT / "repro/mini/ablations.json").read_text())["missing"] == []
    more = {row["label"] for row in (*rows, *found()["groups"][1]["rows"])}
    others = {
        len(row["seeds"])
        for title in TITLES
        for label, row in ablations(title).items()
        if label not in more
    }
    assert {len(row["seeds"]) for row in related} == others - {0} == {1}
    assert {len(row["seeds"]) for row in deep()["groups"][0]["rows"]} == {0, 1}
    words = "have three seeds; related work, Attention Residuals without 1/sqrt(d), the ablations"
    assert f"{words} and the deep models have one seed." in text
    best = min((*rows, *related), key=lambda row: row["losses"]["test"]["mean"])
    assert best["label"] == "mHC (n=4)"
    assert f"{best['parameters'] / rows[0]['parameters'] - 1:.0%} more parameters" in text
    sizes = {row["label"]: f"{row['parameters'] / 1e6:.1f} M" for row in (*rows, *related)}
    larger = ("mHC-lite (n=4)", "mHC (n=4)", "MoDA with keys of the MLPs")
    told = [f"{label.removesuffix(' (n=4)')} ({sizes.pop(label)})" for label in larger]
    words = f"but {told[0]}, {told[1]} and {told[2]}"
    assert f"have {sizes['PreNorm']} parameters, {words}" in text
    assert set(sizes.values()) <= {"27.5 M", "27.6 M"}
    test = {name: run["test"] for name, run in found()["runs"].items()}
    for name, loss in test.items():
        if name.startswith("mgr-"):
            assert loss < test[f"prenorm-lr2-seed{name[-1]}"]
    assert "has the lowest loss outside the ablations" in text
    noisy = [row["cell"] for row in rows if "MGR" in row["label"]]
    steady = [row["cell"] for row in rows if "MGR" not in row["label"]]
    finished = Finished(read_all(ROOT / "repro/mini"), found()["learning_rate"]["factor"])
    mgr, others = (noise(finished.losses(cell, "test") for cell in of) for of in (noisy, steady))
    words = f"({mgr.deviation:.4f} and {others.deviation:.4f} on test): by them alone one seed has"
    assert f"{words} ± {mgr.half(1):.3f}, so" in text
    assert "every MGR is ahead in every seed" in text


def test_what_it_says_in_short():
    text = " ".join(PAGE.read_text().split())
    rows = found()["groups"][0]["rows"]
    ahead = {row["label"]: row["differences"]["test"] for row in rows[1:]}
    assert {difference["verdict"] for difference in ahead.values()} == {"lower"}
    assert "every row of the paper's table is ahead of PreNorm" in text
    mgr = {label: -d["mean"] for label, d in ahead.items() if "MGR" in label}
    assert f"by {min(mgr.values()):.3f} to {max(mgr.values()):.3f} in the mean" in text
    papers = [-row["paper"]["difference"] for row in rows if "MGR" in row["label"]]
    assert f"at S the paper has {min(papers):.3f} to {max(papers):.3f}" in text
    assert min(mgr.values()) > max(papers)
    for row in rows[1:]:
        assert row["differences"]["test"]["mean"] < row["paper"]["difference"]
    assert "by more than in the paper at S" in text
    best = [row["losses"]["test"]["mean"] for row in rows[1:] if "Block" not in row["label"]]
    assert max(best) - min(best) < 0.005
    assert "MGR, Full AttnRes and mHC-lite end within 0.005 nats of each other" in text
    noise = found()["noise"]["test"]
    words = f"what row and seed do not explain has a standard deviation of {noise['deviation']:.4f}"
    assert f"{words} nats ({noise['freedom']} degrees of freedom)" in text
    half = {
        len(d["seeds"]): d["pooled"]
        for group in found()["groups"]
        for row in group["rows"]
        if (d := row["differences"].get("test"))
    }
    assert f"± {half[3]:.4f} for three seeds and ± {half[1]:.4f} for one" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "every alternative of the paper's table beats PreNorm by 0.04 to 0.05 nats" in readme
    assert {f"{-difference['mean']:.2f}" for difference in ahead.values()} == {"0.04", "0.05"}
    commits = found()["made_with"]["commit"]
    assert (len(commits), "with six commits of the code" in text) == (6, True)


def test_what_it_says_of_the_curves():
    """All leads shrink to the last step, and nobody is ahead of Full AttnRes from step 1000 on by
    more than the noise.
    """
    text = " ".join(PAGE.read_text().split())
    finished = Finished(read_all(ROOT / "repro/mini"), found()["learning_rate"]["factor"])
    rows = found()["groups"][0]["rows"]
    for row in rows[1:]:
        steps, losses = apart(finished.of(row["cell"]), finished.of("prenorm"))
        assert steps[-1] == 1500
        assert losses[-2] < losses[-1] < 0
    assert "All leads are still shrinking at the last step" in text
    noise = found()["noise"]["val"]
    for row in rows:
        if "MGR" in row["label"]:
            steps, losses = apart(finished.of(row["cell"]), finished.of("attnres-full-scaled"))
            early, late = losses[steps == 250], losses[steps >= 1000]
            assert early < -0.02
            assert abs(late).max() < Noise(noise["deviation"], noise["freedom"]).half(3)
    assert "early lead over Full AttnRes is within the pooled noise from step 1000 on" in text


def test_what_it_says_of_rows_beside_each_other():
    """The claims' words, and that no row says more than its intervals do."""
    text = " ".join(PAGE.read_text().split())
    pairs = {(pair["label"], pair["against"]): pair for pair in found()["pairs"]}
    full = [
        pair
        for (label, against), pair in pairs.items()
        if "MGR" in label and against.startswith("Full")
    ]
    means = [pair["differences"]["test"]["mean"] for pair in full]
    papers = [-pair["paper"] for pair in full]
    assert f"are from {max(means):.3f} behind to {-min(means):.3f} ahead" in text
    assert f"The paper's lead, {min(papers):.3f} to {max(papers):.3f}, is within the pooled" in text
    for pair in full:
        own = pair["differences"]["test"]
        assert (own["verdict"], own["pooled_verdict"]) == ("cannot tell", "cannot tell")
        outside = abs(pair["paper"] - own["mean"]) > own["pooled"]
        assert outside == (pair["label"] == "Independent MGR (n=8)")

    hyper = [pair for (_, against), pair in pairs.items() if against.startswith("mHC-lite")]
    for pair in hyper:
        own = pair["differences"]["test"]
        assert own["pooled_verdict"] == "cannot tell"
        assert pair["paper"] < own["mean"] - own["pooled"]
    leads = [-pair["paper"] for pair in hyper]
    assert f"lead of {min(leads):.3f} to {max(leads):.3f} at S is outside the pooled" in text

    block = {labels: pair for labels, pair in pairs.items() if labels[1].startswith("Block")}
    leads = {labels: -pair["differences"]["test"]["mean"] for labels, pair in block.items()}
    assert f"by {min(leads.values()):.3f} to {max(leads.values()):.3f}, outside the pooled" in text
    verdicts = [pair["differences"]["test"] for pair in block.values()]
    assert {own["pooled_verdict"] for own in verdicts} == {"lower"}
    mgr = {labels: pair for labels, pair in block.items() if "MGR" in labels[0]}
    own = {labels[0]: pair["differences"]["test"]["verdict"] for labels, pair in mgr.items()}
    assert {label for label, verdict in own.items() if verdict != "lower"} == {
        "Independent MGR (n=8)"
    }
    assert "the independent gate with eight streams alone would not tell it" in text
    ends = sorted(lead for labels, lead in leads.items() if labels[0].startswith("Competitive"))
    papers = {
        f"{-pair['paper']:.3f}"
        for labels, pair in mgr.items()
        if labels[0].startswith("Competitive")
    }
    words = f"behind competitive MGR by {ends[0]:.3f} to {ends[1]:.3f}, where the paper has"
    assert (f"{words} {papers.pop()}" in text, papers) == (True, set())
    four, eight = (
        leads[f"Independent MGR (n={n})", f"Block AttnRes (n={n}), 1/sqrt(d)"] for n in (4, 8)
    )
    words = f"independent MGR by {four:.3f} with four streams and {eight:.3f} with eight"
    assert words in text

    eight = {
        gate: pairs[f"{gate} MGR (n=8)", f"{gate} MGR (n=4)"]
        for gate in ("Independent", "Competitive")
    }
    tests = {gate: pair["differences"]["test"] for gate, pair in eight.items()}
    assert {own["pooled_verdict"] for own in tests.values()} == {"cannot tell"}
    own, paper = -tests["Competitive"]["mean"], -eight["Competitive"]["paper"]
    # The paper's 0.0025 is a half, which rounds either way.
    assert f"competitive MGR is better by {own:.3f} (paper {paper + 1e-6:.3f})" in text
    own, paper = tests["Independent"]["mean"], -eight["Independent"]["paper"]
    assert f"independent MGR is worse by {own:.3f} (paper: better by {paper:.3f})" in text


TITLES = (
    "Initial gate bias",
    "Number of streams",
    "Depth at nearly equal parameters",
    "Streams in float32",
    "Memory mode",
)


def ablations(title):
    """The rows of a table of the ablations, by their labels."""
    groups = json.loads((ROOT / "repro/mini/ablations.json").read_text())["groups"]
    return {row["label"]: row for of in groups if of["title"] == title for row in of["rows"]}


def beside(row):
    """Whether what a row is compared with is a row of the ablations, too."""
    return row["against"] != "PreNorm"


def test_what_it_says_of_the_initial_bias():
    text = " ".join(PAGE.read_text().split())
    rows = ablations("Initial gate bias")
    own = {label: row["differences"]["test"] for label, row in rows.items() if beside(row)}
    competitive, independent = (
        own.pop(f"{gate} MGR (n=4), bias -1") for gate in ("Competitive", "Independent")
    )
    worse = f"{competitive['mean']:.3f} (competitive) and {independent['mean']:.3f} (independent)"
    assert f"-1 is worse, by {worse}" in text
    assert {d["pooled_verdict"] for d in (competitive, independent)} == {"higher"}
    told = {label: d for label, d in own.items() if d["pooled_verdict"] != "cannot tell"}
    minus5, calibrated = (
        told.pop(f"Independent MGR (n={name}") for name in ("4), bias -5", "8), calibrated")
    )
    assert not told
    assert f"the independent gate is worse by {minus5['mean']:.3f} with -5" in text
    assert f"with eight streams better by {-calibrated['mean']:.3f} when calibrated" in text
    for difference in (minus5, calibrated):
        assert 1 < abs(difference["mean"]) / difference["pooled"] < 1.1
    assert "the last two just outside the pooled interval" in text
    eight = ablation_pairs()[
        "Independent MGR (n=8), calibrated", "Independent MGR (n=4), calibrated"
    ]
    assert (
        f"the independent gate with eight is ahead of four by {-eight['test']['mean']:.3f}" in text
    )
    assert max(abs(d["mean"]) for d in own.values()) < 0.008


def ablation_pairs():
    pairs = json.loads((ROOT / "repro/mini/ablations.json").read_text())["pairs"]
    return {(pair["label"], pair["against"]): pair["differences"] for pair in pairs}


def test_what_it_says_of_the_number_of_streams():
    text = " ".join(PAGE.read_text().split())
    rows = {
        label: row["differences"]["test"]["mean"]
        for label, row in ablations("Number of streams").items()
        if label != "PreNorm"
    }
    one, two, *many = (rows[f"Competitive MGR (n={n})"] for n in (1, 2, 4, 8, 12))
    runs = found()["runs"]
    four = runs["mgr-competitive-4-lr2-seed0"]["test"] - runs["prenorm-lr2-seed0"]["test"]
    assert one / four == pytest.approx(1 / 4, abs=0.03)
    assert two / four == pytest.approx(4 / 5, abs=0.05)
    assert max(many) - min(many) < 0.002
    (highway,) = (row for row in found()["groups"][2]["rows"] if row["label"] == "Highway")
    assert abs(highway["differences"]["test"]["mean"] - one) < 0.001
    words = "has a quarter of four's lead over PreNorm, as much as Highway, and two have about four"
    assert words in text
    choosing = " ".join((ROOT / "docs/choosing.md").read_text().split())
    assert "one stream has a quarter of four's lead over PreNorm, and two about four" in choosing
    assert "one stream has a quarter of the lead that four have; eight and twelve have no" in text
    pairs = ablation_pairs()
    behind = pairs["Competitive MGR (n=2)", "Competitive MGR (n=4)"]
    assert behind["test"]["pooled_verdict"] == "cannot tell"
    assert behind["val"]["pooled_verdict"] == "higher"
    words = f"behind four by {behind['test']['mean']:.4f} on test, within the pooled interval, and"
    assert f"{words} by {behind['val']['mean']:.4f} on val, outside it" in text
    more = pairs["Competitive MGR (n=12)", "Competitive MGR (n=8)"]["test"]
    assert more["pooled_verdict"] == "cannot tell"
    (level,) = (
        pair["differences"]["test"]
        for pair in found()["pairs"]
        if (pair["label"], pair["against"]) == ("Competitive MGR (n=8)", "Competitive MGR (n=4)")
    )
    assert level["pooled_verdict"] == "cannot tell"
    assert "Four, eight and twelve cannot be told apart." in text


def test_what_it_says_of_depth():
    text = " ".join(PAGE.read_text().split())
    rows = ablations("Depth at nearly equal parameters")
    ahead, losses = {}, {}
    for name in ("PreNorm", "Full AttnRes", "Competitive MGR (n=4)"):
        shapes = [rows[f"{name}{shape}"] for shape in (", 6x512", "", ", 24x256")]
        losses[name] = [row["losses"]["test"]["mean"] for row in shapes]
        if name != "PreNorm":
            ahead[name] = [-row["differences"]["test"]["mean"] for row in shapes]
    full, mgr = ahead.values()
    runs = found()["runs"]
    own = runs["prenorm-lr2-seed0"]["test"] - runs["mgr-competitive-4-lr2-seed0"]["test"]
    first, _, last = (f"{lead:.3f}" for lead in mgr)
    assert f"{first} with 6 blocks of width 512, {own:.3f} with 12 of 384, {last} with 24" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"models: {first} with 6 blocks, {own:.3f} with 12, {last} with 24;" in readme
    assert f"the lead of MGR is {first}, {own:.3f} and {last}." in text
    words = f"by {first}, {mgr[1]:.3f} ({own:.3f} in the seed of the others) and {last}; each step"
    assert words in text
    assert "1/sqrt(d) is ahead by {:.3f}, {:.3f} and {:.3f}.".format(*full) in text
    assert "little at 6 blocks ({:.3f}), then {:.3f} and {:.3f}, which".format(*full) in text
    pooled = [
        rows[f"Competitive MGR (n=4){shape}"]["differences"]["test"]["pooled"]
        for shape in (", 6x512", "")
    ]
    noise = sum(half**2 for half in pooled) ** 0.5
    assert f"pooled noise of such a difference ({noise:.3f})" in text
    assert min(mgr[1] - mgr[0], mgr[2] - mgr[1]) > noise
    assert full[2] - full[1] < noise
    pairs = ablation_pairs()
    apart = {
        shape: pairs[f"Competitive MGR (n=4){shape}", f"Full AttnRes{shape}"]["test"]
        for shape in (", 6x512", "", ", 24x256")
    }
    verdicts = [own["pooled_verdict"] for own in apart.values()]
    assert verdicts == ["lower", "cannot tell", "lower"]
    first, level, last = (f"{-own['mean']:.4f}" for own in apart.values())
    assert f"MGR is ahead of it, by {first} and {last}, and at 12 x 384 by {level}, within" in text
    half = Noise(**found()["noise"]["test"]).half(1)
    for name in ("block-4", "block-8", "full"):
        by, plain = (runs[f"attnres-{name}{of}-lr2-seed0"] for of in ("-scaled", ""))
        assert by["val"] < plain["val"]
        assert (0 < plain["test"] - by["test"] < half) == (name == "full")
    behind = {name: f"{loss[2] - loss[0]:.3f}" for name, loss in losses.items()}
    words = f"PreNorm loses {behind['PreNorm']} and MGR {behind['Competitive MGR (n=4)']}; the"
    assert words in text
    wide, own, narrow = ((b * 12 * w**2 / 1e6, 16384 * w / 1e6) for b, w in SIZES)
    sizes = [f"{x:.1f}, {y:.1f} and {z:.1f} M" for x, y, z in zip(wide, own, narrow, strict=True)]
    assert f"blocks have {sizes[0]} parameters, the embedding {sizes[1]}." in text
    for (blocks, width), shape in zip(SIZES, (", 6x512", "", ", 24x256"), strict=True):
        expected = 12 * blocks * width**2 + 16384 * width
        assert rows[f"PreNorm{shape}"]["parameters"] == pytest.approx(expected, rel=1e-3)


SIZES = ((6, 512), (12, 384), (24, 256))


def test_what_it_says_of_streams_in_float32():
    assert "No difference can be told." in PAGE.read_text()
    rows = ablations("Streams in float32")
    own = [row["differences"]["test"] for label, row in rows.items() if "float32" in label]
    assert [difference["pooled_verdict"] for difference in own] == 3 * ["cannot tell"]


def test_what_it_says_of_the_memory_modes():
    text = " ".join(PAGE.read_text().split())
    rows = ablations("Memory mode")
    apart = {
        mode: rows[f"Competitive MGR (n=4), memory {mode}"]["differences"]["test"]
        for mode in ("recompute", "invert", "exact")
    }
    assert {own["pooled_verdict"] for own in apart.values()} == {"cannot tell"}
    assert text.count("difference can be told.") == 2
    size = {mode: abs(own["mean"]) for mode, own in apart.items()}
    assert size["invert"] < min(size["recompute"], size["exact"])
    assert max(size.values()) < 0.003
    assert "invert, whose gradients are only near store's, differs from it by less" in text
    val = rows["Competitive MGR (n=4), memory invert"]["differences"]["val"]["mean"]
    words = f"told from store ({apart['invert']['mean']:+.4f} on test, {val:+.4f} on val, one seed)"
    assert words in text
    losses = re.search(r"these held-out losses: (.*?) \(store, backend", MEMORY.read_text())[1]
    one, again, *others = map(float, re.findall(r"[\d.]{6}", losses))
    assert f"two runs of it ended {abs(one - again):.4f} apart" in text
    assert max(abs(one - other) for other in others) < 0.003


def deep():
    return json.loads((ROOT / "repro/deep/deep.json").read_text())


def test_what_it_says_of_the_gates_at_the_start():
    text = " ".join(PAGE.read_text().split())

    def starts(gate, n, **options):
        residual = build_residual(f"mgr-{gate}", dim=8, depth=24, streams=n, **options)
        step = residual.steps[n - 1]
        streams = torch.ones(1, n, 8)
        return step.b1.detach(), reference.gate(streams, step.w1, step.b1, gate, 1e-6)[0, 0].item()

    (carry, first), (bias, second) = (starts(g, 4) for g in ("competitive", "independent"))
    assert f"carry logit begins at {carry[0]:.2f} and" in text
    assert f"independent gate's biases at {bias[0]:.2f};" in text
    assert (
        f"with eight the independent gate's begin at {starts('independent', 8)[0][0]:.2f}" in text
    )
    calibrated = [starts("independent", n, bias_init="calibrated") for n in (4, 8)]
    assert f"({calibrated[0][0][0]:.2f} and {calibrated[1][0][0]:.2f})" in text
    for (_, beta), n in zip(calibrated, (4, 8), strict=True):
        assert beta == pytest.approx(starts("competitive", n)[1])
    shown = {
        b: [starts(gate, 4, bias_init=b)[1] for gate in ("competitive", "independent")]
        for b in (-1.0, -3.0, -5.0)
    }
    one, three, five = shown.values()
    assert f"at {first:.3f} and {second:.3f} by the formula" in text
    assert f"at {one[0]:.2f} and {one[1]:.2f} with -1, at {three[0]:.3f} and {three[1]:.3f}" in text
    assert {f"{beta:.3f}" for beta in five} == {"0.007"}


def test_what_is_missing_is_not_judged():
    """The claims that nothing was run for say so."""
    missing = {name.partition("-lr2")[0] for name in found()["missing"]}
    assert missing == {"attnres-block-4", "attnres-block-8", "attnres-full"}
    later = {name.partition("-lr2")[0] for name in deep()["missing"]}
    assert later == {"deep-mgr-competitive-8", "deep-mgr-competitive-8-invert"}
    shapes = ablations("Depth at nearly equal parameters")
    assert [label for label in shapes if "sqrt" in label] == ["Full AttnRes, 1/sqrt(d)"]
    assert (
        "Not run yet: competitive MGR as a deep model, Attention Residuals with 1/sqrt(d) at "
        "6 x 512 and 24 x 256, and second seeds where differences are small."
    ) in PAGE.read_text()
    assert PAGE.read_text().count("The competitive gate is to come |") == 4
    assert {path.name for path in (ROOT / "repro").iterdir()} == {"mini", "deep"}


def test_every_table_stands_on_a_page():
    """And pages have no tables of which the script knows nothing: that would be an error of it."""
    known = runpy.run_path(str(ROOT / "scripts/tables.py"))["TABLES"]
    marks = [re.findall(r"<!-- table (\w+) -->", (ROOT / name).read_text()) for name in PAGES]
    assert all(marks)
    assert sorted(sum(marks, [])) == sorted(known)
