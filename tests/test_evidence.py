"""The tables of the pages, and the words of the evidence page, say what the kept results say."""

import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from multigate.repro.figure import apart
from multigate.repro.kept import read_all
from multigate.repro.results import Finished

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/evidence.md", "docs/kernels.md", "docs/memory.md")
RESULTS = ("repro/mini/results.json", "benchmarks/results/h200.json")
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
    assert f"Independent gate: {few:.1f} to {many:.1f}%" in text
    assert f"partly with older kernels, and {wide:.1f}%" in text
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


def test_what_it_says_of_the_kept_runs():
    """How far gates open, and what the curves in the figure are of."""
    text = " ".join(PAGE.read_text().split())
    opened, apart = [], []
    for run in sorted((ROOT / "repro/mini/runs").iterdir()):
        with gzip.open(run / "log.jsonl.gz", "rt") as lines:
            records = [json.loads(line) for line in lines]
        last = [r for r in records if r["event"] == "val"][-1]
        (score,) = [r for r in records if (r["event"], r.get("split")) == ("score", "val")]
        assert "eval_tokens = 524288" in (run / "config.toml").read_text()
        apart.append(score["loss"] - last["loss"])
        if "gate_max" in last and run.name.startswith("mgr-"):
            opened.append(last["gate_max"])
    assert f"the largest is {min(opened):.2f} to {max(opened):.2f}" in text
    assert f"the largest is {min(opened):.2f} to {max(opened):.2f}" in MEMORY.read_text()
    assert "on 524,288 tokens" in text
    assert f"about {min(apart):.2f} higher" in text
    assert f"{min(apart):.2f}" == f"{max(apart):.2f}"
    studies = json.loads((ROOT / "benchmarks/results/memory_modes.json").read_text())
    assert max(study["gate"]["max"] for study in studies.values()) < 0.2
    assert "when no gate is above 0.2" in text


def found():
    return json.loads((ROOT / "repro/mini/results.json").read_text())


def test_what_it_says_of_seeds_and_of_the_best_row():
    text = " ".join(PAGE.read_text().split())
    rows, _, related = (group["rows"] for group in found()["groups"])
    seeds = {row["label"]: len(row["seeds"]) for row in rows}
    assert seeds == {label: 2 if "AttnRes" in label else 3 for label in seeds}
    assert {len(row["seeds"]) for row in related} == {1}
    assert "have three seeds, Attention Residuals two, related work one" in text
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
    assert "has the lowest loss of all" in text
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
    words = f"± {half[3]:.4f} for three seeds, ± {half[2]:.4f} for two and ± {half[1]:.4f} for one"
    assert words in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "every alternative of the paper's table beats PreNorm by 0.04 to 0.05 nats" in readme
    assert {f"{-difference['mean']:.2f}" for difference in ahead.values()} == {"0.04", "0.05"}
    commits = found()["made_with"]["commit"]
    assert (len(commits), "with five commits of the code" in text) == (5, True)


def test_what_it_says_of_the_curves():
    """All leads shrink to the last step, and nobody is ahead of Full AttnRes from step 1000 on."""
    text = " ".join(PAGE.read_text().split())
    finished = Finished(read_all(ROOT / "repro/mini"), found()["learning_rate"]["factor"])
    rows = found()["groups"][0]["rows"]
    for row in rows[1:]:
        steps, losses = apart(finished.of(row["cell"]), finished.of("prenorm"))
        assert steps[-1] == 1500
        assert losses[-2] < losses[-1] < 0
    assert "All leads are still shrinking at the last step" in text
    for row in rows:
        if "MGR" in row["label"]:
            steps, losses = apart(finished.of(row["cell"]), finished.of("attnres-full-scaled"))
            early, late = losses[steps == 250], losses[steps >= 1000]
            assert early < -0.02
            assert late.min() > -0.002
    assert "MGR's early lead over Full AttnRes is gone by step 1000" in text


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
    assert f"The paper's lead, {min(papers):.3f} to {max(papers):.3f}, is within the noise" in text
    for pair in full:
        own = pair["differences"]["test"]
        assert (own["verdict"], own["pooled_verdict"]) == ("cannot tell", "cannot tell")
        assert abs(pair["paper"]) < own["pooled"]

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
    told = [pair["differences"]["test"]["verdict"] for pair in mgr.values()]
    assert sorted(told) == ["cannot tell"] * 3 + ["lower"]
    assert "two seeds by themselves tell it for one pair of four" in text
    for labels, pair in mgr.items():
        if labels[0].startswith("Competitive"):
            words = f"competitive MGR by {leads[labels]:.3f}, where the paper has"
            assert f"{words} {-pair['paper']:.3f}" in text
    ends = sorted(lead for labels, lead in leads.items() if labels[0].startswith("Independent"))
    assert f"behind independent MGR by {ends[0]:.3f} to {ends[1]:.3f}" in text

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


def test_what_is_missing_is_not_judged():
    """The claims that nothing was run for say so."""
    missing = {name.partition("-lr2")[0] for name in found()["missing"]}
    assert "attnres-full-scaled" in missing
    lines = [line for line in PAGE.read_text().splitlines() if "| nothing yet |" in line]
    kept = {path.name for path in (ROOT / "repro").iterdir()}
    assert (len(lines), kept) == (3, {"mini"})
    assert all(line.rpartition("| ")[2].startswith("to come") for line in lines)


def test_every_table_stands_on_a_page():
    """And pages have no tables of which the script knows nothing: that would be an error of it."""
    known = runpy.run_path(str(ROOT / "scripts/tables.py"))["TABLES"]
    marks = [re.findall(r"<!-- table (\w+) -->", (ROOT / name).read_text()) for name in PAGES]
    assert all(marks)
    assert sorted(sum(marks, [])) == sorted(known)
