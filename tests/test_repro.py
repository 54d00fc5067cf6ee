"""A study from its runs to its tables, on models of two blocks."""

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

from multigate.__main__ import main, parse
from multigate.config import TrainConfig, from_table, read_toml, resolve
from multigate.evaluate import EvalConfig, evaluate
from multigate.log import read_log, read_records
from multigate.repro import worker
from multigate.repro.command import summary
from multigate.repro.config import ReproConfig, SummaryConfig
from multigate.repro.dry import dry_run
from multigate.repro.kept import read_all, read_kept, thinned, write_kept
from multigate.repro.queue import Clock
from multigate.train import NotFinite, train
from runs import prepared, quiet
from studied import here, reproduce, study, text

ROOT = Path(__file__).parents[1]
PUBLISHED = sorted(path.parent for path in (ROOT / "repro").glob("*/settings.json"))
SECTIONS = [
    "The rows of the paper's table",
    "AttnRes with and without 1/sqrt(d)",
    "Related work that the paper cites",
    "Learning rates, chosen on val by PreNorm",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    """A finished study, its configuration and what was shown; nobody changes it."""
    config = study(data, tmp_path_factory.mktemp("study"))
    with pytest.MonkeyPatch.context() as patch:
        here(patch)
        done, shown = reproduce(config)
    assert not done.failed
    assert not done.missing
    return config, shown


@pytest.fixture
def copied(made, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(made[0].out, tmp_path / "kept")
    shutil.copytree(made[0].runs, tmp_path / "runs")
    return replace(made[0], out=tmp_path / "kept", runs=tmp_path / "runs")


def rows(page, title):
    """The cells of a table of the page, by the label of its row and its column."""
    part = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_the_pages_sections_and_rows(made):
    page = (made[0].out / "TABLE.md").read_text()
    assert [t for t in re.findall(r"^## (.*)$", page, re.M) if t in SECTIONS] == SECTIONS
    # Full AttnRes is there in the better of its two forms.
    labels = list(rows(page, SECTIONS[0]))
    assert labels[0::2] == ["PreNorm", "Competitive MGR (n=4)"]
    assert labels[1].startswith("Full AttnRes")
    assert list(rows(page, SECTIONS[1])) == ["Full AttnRes", "Full AttnRes, 1/sqrt(d)"]
    assert list(rows(page, SECTIONS[2])) == ["Highway"]


def factor_of(config):
    return json.loads((config.out / "settings.json").read_text())["lr_factor"]


def folder_of(config, cell, seed):
    factor = factor_of(config)
    return config.runs / f"{cell}{'' if factor == 1 else f'-lr{factor:g}'}-seed{seed}"


def own_losses(config, cell, seed):
    """Train, val and test loss of a run, from its whole log and its last weights."""
    folder = folder_of(config, cell, seed)
    losses = [record["loss"] for record in read_log(folder)][-200:]
    found = {"train": fmean(losses)}
    for split in ("val", "test"):
        told = EvalConfig(folder, split=split, checkpoint="last", device="cpu")
        found[split] = evaluate(told, quiet()).loss
    return found


def test_every_number_is_that_of_the_runs_themselves(made):
    """Against the whole logs and the weights, without any of the code that made the table."""
    config = made[0]
    shown = rows((config.out / "TABLE.md").read_text(), SECTIONS[0])
    prenorm = [own_losses(config, "prenorm", seed) for seed in (0, 1)]
    mgr = [own_losses(config, "mgr-competitive-4", seed) for seed in (0, 1)]
    for label, runs in (("PreNorm", prenorm), ("Competitive MGR (n=4)", mgr)):
        for name in ("train", "val", "test"):
            one, two = (run[name] for run in runs)
            mean, deviation = map(float, shown[label][name].split(" ± "))
            assert mean == pytest.approx((one + two) / 2, abs=6e-5)
            assert deviation == pytest.approx(abs(one - two) / math.sqrt(2), abs=6e-5)
    for name in ("val", "test"):
        one, two = (m[name] - p[name] for m, p in zip(mgr, prenorm, strict=True))
        mean, half = map(float, shown["Competitive MGR (n=4)"][f"{name} - PreNorm"].split(" ± "))
        assert mean == pytest.approx((one + two) / 2, abs=6e-5)
        # One degree of freedom: tan(0.95 pi / 2) = 12.706.
        assert half == pytest.approx(12.7062 * abs(one - two) / 2, abs=7e-5)
    verdict = "cannot tell" if abs(mean) <= half else "lower" if mean < 0 else "higher"
    assert shown["Competitive MGR (n=4)"]["verdict"] == verdict
    assert shown["PreNorm"]["verdict"] == "-"
    speeds = []
    for seed in (0, 1):
        steps = [r for r in read_log(folder_of(config, "prenorm", seed)) if r["step"] > 6]
        speeds.append(median(r["tokens_per_second"] for r in steps))
    assert shown["PreNorm"]["tokens/s"] == f"{round(median(speeds)):,}"
    records = read_records(folder_of(config, "prenorm", 0))[0]
    assert shown["PreNorm"]["parameters"] == f"{records[0]['parameters']:,}"
    most = [
        r["memory_gib"]
        for seed in (0, 1)
        for r in read_log(folder_of(config, "prenorm", seed), "val")
    ]
    assert shown["PreNorm"]["peak GiB"] == f"{max(most):.2f}"


def test_pooled_verdicts_are_by_the_noise_of_all_rows(made):
    """Four cells of two seeds: three degrees of freedom, t = 3.182."""
    config = made[0]
    page = (config.out / "TABLE.md").read_text()
    keys = ("prenorm", "attnres-full", "attnres-full-scaled", "mgr-competitive-4")
    test = {key: [own_losses(config, key, seed)["test"] for seed in (0, 1)] for key in keys}
    apart = [one - two for one, two in test.values()]
    left = sum((x - fmean(apart)) ** 2 for x in apart) / 2
    deviation = math.sqrt(left / 3)
    assert f"standard deviation of {deviation:.4f} (3 degrees of freedom" in page
    highway = own_losses(config, "highway", 0)["test"]
    shown = {label: row for t in SECTIONS[:3] for label, row in rows(page, t).items()}
    for label, losses in (
        ("Competitive MGR (n=4)", test["mgr-competitive-4"]),
        ("Highway", [highway]),
    ):
        mean = fmean(a - b for a, b in zip(losses, test["prenorm"], strict=False))
        half = 3.182446 * deviation * math.sqrt(2 / len(losses))
        verdict, bound = shown[label]["pooled"].split(" (± ")
        assert float(bound.rstrip(")")) == pytest.approx(half, abs=6e-5)
        assert verdict == (
            "cannot tell" if abs(mean) <= half else "lower" if mean < 0 else "higher"
        )


def test_the_scores_are_of_the_last_weights_on_every_token(made, monkeypatch):
    """Not of the best on val, which would be a choice, and not of the trainer's sample."""
    config = made[0]
    told = []
    monkeypatch.setattr(
        worker, "evaluate", lambda c, console: told.append(c) or evaluate(c, console)
    )
    folder = folder_of(config, "prenorm", 1)
    job = worker.Job.read(folder / "job.json")
    score = worker.scored(job.config, "test")
    assert (told[0].checkpoint, told[0].tokens, told[0].device) == ("last", None, "cpu")
    kept = read_kept(config.out / "runs" / folder.name).score("test")
    assert score["loss"] == pytest.approx(kept["loss"], abs=1e-6)
    assert score["tokens"] == kept["tokens"] > 12000


def test_the_papers_figures_stand_beside(made):
    page = (made[0].out / "TABLE.md").read_text()
    shown = rows(page, SECTIONS[0])
    assert "The paper has no scale tiny. Its figures beside are those of S" in page
    assert shown["PreNorm"]["paper S: train / val"] == "2.9280 / 2.9440"
    assert shown["PreNorm"]["paper S: val - PreNorm"] == "-"
    assert shown["Competitive MGR (n=4)"]["paper S: train / val"] == "2.8889 / 2.9045"
    assert shown["Competitive MGR (n=4)"]["paper S: val - PreNorm"] == "-0.0395"


def test_the_better_form_of_attnres_stands_in_the_table(made):
    config = made[0]
    page = (config.out / "TABLE.md").read_text()
    both = rows(page, SECTIONS[1])
    keys = {"Full AttnRes": "attnres-full", "Full AttnRes, 1/sqrt(d)": "attnres-full-scaled"}
    val = {
        label: fmean(own_losses(config, key, seed)["val"] for seed in (0, 1))
        for label, key in keys.items()
    }
    best = min(val, key=val.__getitem__)
    assert rows(page, SECTIONS[0])[best] == both[best]
    for label, loss in val.items():
        assert float(both[label]["val"].split(" ± ")[0]) == pytest.approx(loss, abs=6e-5)


def test_the_learning_rate_is_chosen_on_val(made):
    config, shown = made
    page = (config.out / "TABLE.md").read_text()
    checked = rows(page, SECTIONS[3])
    val = {label: float(row["val"]) for label, row in checked.items()}
    assert len(val) == 3
    best = min(val, key=val.__getitem__)
    assert best == f"{factor_of(config):g} (chosen)"
    assert f"learning rates: {factor_of(config):g} times the recipe's" in shown
    for label, row in checked.items():
        assert float(row["Muon"]) == pytest.approx(0.02 * float(label.split()[0]))
        assert float(row["AdamW"]) == pytest.approx(0.006 * float(label.split()[0]))
    assert ("at an end of what was tried" in page) == (factor_of(config) != 1)
    # All other runs have it, and PreNorm's own is not trained twice.
    kept = read_all(config.out)
    assert len(kept) == 2 + 2 * 4 + 1
    for name, run in kept.items():
        if not name.startswith("prenorm"):
            assert run.config["optim"]["lr_muon"] == pytest.approx(0.02 * factor_of(config))


def test_one_seed_has_no_interval_and_says_so(made):
    related = rows((made[0].out / "TABLE.md").read_text(), SECTIONS[2])
    assert related["Highway"]["seeds"] == "1"
    assert related["Highway"]["verdict"] == "one seed, no interval"
    assert "±" not in related["Highway"]["val"]
    assert re.fullmatch(r"[+-]\d\.\d{4}", related["Highway"]["test - PreNorm"])


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_the_published_tables_are_what_the_published_logs_say(folder, tmp_path):
    out = tmp_path / folder.name
    shutil.copytree(folder, out)
    for page in [*out.glob("*.md"), *(p for p in out.glob("*.json") if p.name != "settings.json")]:
        page.unlink()
    written = summary(SummaryConfig(out), quiet())
    assert written
    for path in written:
        # The bytes of a picture are those of one version of matplotlib.
        if path.suffix == ".png":
            continue
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_what_is_published_is_small():
    sizes = [p.stat().st_size for p in (ROOT / "repro").rglob("*") if p.is_file()]
    assert 0 < sum(sizes) < 5e6


def test_rows_beside_each_other(made):
    """The pairs that have runs: here MGR and the better of the two forms of Full AttnRes."""
    config = made[0]
    page = (config.out / "TABLE.md").read_text()
    (shown,) = rows(page, "Beside each other").values()
    forms = {
        label: [own_losses(config, key, seed) for seed in (0, 1)]
        for label, key in (
            ("Full AttnRes", "attnres-full"),
            ("Full AttnRes, 1/sqrt(d)", "attnres-full-scaled"),
        )
    }
    better = min(forms, key=lambda label: sum(run["val"] for run in forms[label]))
    assert shown["model"] == "Competitive MGR (n=4)"
    assert shown["compared with"] == better
    mgr = [own_losses(config, "mgr-competitive-4", seed) for seed in (0, 1)]
    for name in ("val", "test"):
        one, two = (m[name] - f[name] for m, f in zip(mgr, forms[better], strict=True))
        mean, half = map(float, shown[name].split(" ± "))
        assert mean == pytest.approx((one + two) / 2, abs=6e-5)
        assert half == pytest.approx(12.7062 * abs(one - two) / 2, abs=7e-5)
    assert shown["verdict"] == (
        "cannot tell" if abs(mean) <= half else "lower" if mean < 0 else "higher"
    )
    assert shown["paper S: val"] == "-0.0021"


def test_the_summary_makes_the_same_files_from_what_is_kept(made, tmp_path):
    """Without the runs: logs and settings alone."""
    out = tmp_path / "published"
    shutil.copytree(made[0].out, out)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    assert set(before) == {"settings.json", "results.json", "TABLE.md", "TABLE.png"}
    for name in set(before) - {"settings.json"}:
        (out / name).unlink()
    written = summary(SummaryConfig(out), quiet())
    assert {p.name for p in written} == set(before) - {"settings.json"}
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


def test_the_page_says_what_results_json_says(made):
    found = json.loads((made[0].out / "results.json").read_text())
    page = (made[0].out / "TABLE.md").read_text()
    shown = {label: row for t in SECTIONS[:3] for label, row in rows(page, t).items()}
    count = 0
    for group in found["groups"]:
        for row in group["rows"]:
            for name, loss in row["losses"].items():
                assert shown[row["label"]][name].startswith(f"{loss['mean']:.4f}")
                count += 1
            for name in ("val", "test"):
                if name in row["differences"]:
                    said = shown[row["label"]][f"{name} - PreNorm"]
                    assert said.startswith(f"{row['differences'][name]['mean']:+.4f}")
    assert count == 3 * 6
    assert set(found["runs"]) == set(read_all(made[0].out))
    assert found["missing"] == []
    assert found["failed"] == {}


def test_the_command_stands_on_the_page(made):
    """As it can be typed elsewhere: no folders of this machine, nothing of the sitting."""
    page = (made[0].out / "TABLE.md").read_text()
    command = (
        "multigate repro table1 --scale tiny --data data --seeds 0 1 "
        "--rows prenorm attnres-full mgr-competitive-4 highway --steps 12 --config recipe.toml"
    )
    assert f"By `{command}`. `multigate repro summary`" in page
    parsed = parse(ReproConfig, command.split()[2:], "repro")
    config = replace(made[0], data="data", out=None, runs=None, config=(Path("recipe.toml"),))
    assert parsed == config


def test_what_is_kept_can_be_published(made, data):
    """Small, without text, checkpoints, places or the machine's name."""
    config = made[0]
    files = [p for p in config.out.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {
        *("settings.json", "results.json", "TABLE.md", "TABLE.png"),
        *("config.toml", "environment.json", "log.jsonl.gz"),
    }
    assert sum(p.stat().st_size for p in files) < 400_000
    for path in files:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
        for place in (config.out, config.runs, data):
            assert str(place).encode() not in content, path
        assert b"host" not in content
    environment = next(iter(read_all(config.out).values())).environment
    assert {"torch", "python", "commit", "source", "device", "precision"} <= set(environment)
    assert environment["micro_batch"] == 4


def test_a_kept_configuration_trains_the_same_run_again(made, data, tmp_path):
    config = made[0]
    name = folder_of(config, "mgr-competitive-4", 1).name
    table = read_toml(config.out / "runs" / name / "config.toml")
    again = replace(from_table(TrainConfig(), table, "kept"), data=str(data), out=tmp_path)
    train(again, quiet())
    whole = [record["loss"] for record in read_log(config.runs / name)]
    assert [record["loss"] for record in read_log(tmp_path / name)] == whole


def test_the_same_data_in_the_same_order_within_a_seed(made):
    """At a zero learning rate nothing would differ but the model: the first loss of every PreNorm
    run of a seed is the same whatever its learning rate, and another with another seed."""
    first = {
        name: run.of("train")[0]["loss"]
        for name, run in read_all(made[0].out).items()
        if name.startswith("prenorm")
    }
    assert len({loss for name, loss in first.items() if name.endswith("seed0")}) == 1
    assert len(set(first.values())) == 2


def test_nothing_finished_is_done_again(made, copied, monkeypatch):
    monkeypatch.setattr("multigate.repro.queue.command", lambda told: ["false"])
    done, shown = reproduce(copied)
    assert "9 of 9 runs are finished already" in shown
    assert not done.failed
    assert (copied.out / "TABLE.md").read_bytes() == (made[0].out / "TABLE.md").read_bytes()


def test_a_run_that_was_lost_is_made_again_and_is_the_same(made, copied, monkeypatch):
    """Without its kept log it is measured again, without its checkpoints trained again."""
    here(monkeypatch)
    kept, gone = (folder_of(copied, "mgr-competitive-4", seed).name for seed in (0, 1))
    for name in (kept, gone):
        shutil.rmtree(copied.out / "runs" / name)
    shutil.rmtree(copied.runs / gone)
    done, shown = reproduce(copied)
    assert "7 of 9 runs are finished already" in shown
    assert len(done.finished) == 9

    def numbers(out, name):
        records = read_kept(out / "runs" / name).records
        timing = ("tokens_per_second", "memory_gib")
        kept = [r for r in records if r["event"] != "start"]
        return [{k: v for k, v in r.items() if k not in timing} for r in kept]

    for name in (kept, gone):
        assert numbers(copied.out, name) == numbers(made[0].out, name)


def test_more_seeds_and_rows_join_those_there_are(copied, monkeypatch):
    here(monkeypatch)
    _, shown = reproduce(replace(copied, seeds=(0, 1, 2), rows=("prenorm", "mgr-competitive-4")))
    assert "4 of 6 runs are finished already" in shown
    page = (copied.out / "TABLE.md").read_text()
    assert rows(page, SECTIONS[0])["PreNorm"]["seeds"] == "3"
    assert rows(page, SECTIONS[1])["Full AttnRes"]["seeds"] == "2"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 13}, r"other settings \(steps 12 -> 13\)"),
        ({"lr_factors": (1.0, 3.0)}, r"\(lr_factors \[0.5, 1.0, 2.0\] -> \[1.0, 3.0\]\)"),
        ({"scale": "mini"}, r"scale tiny -> mini"),
    ],
)
def test_other_settings_are_refused(copied, changes, sentence):
    before = (copied.out / "TABLE.md").read_bytes()
    with pytest.raises(ValueError, match=sentence):
        reproduce(replace(copied, **changes))
    assert (copied.out / "TABLE.md").read_bytes() == before


def test_more_learning_rates_join_those_there_are(copied, monkeypatch):
    """The choice is made anew, of the old runs and the new one."""
    here(monkeypatch)
    wider = replace(copied, lr_factors=(0.5, 1.0, 2.0, 0.25), rows=("prenorm",), seeds=(0,))
    monkeypatch.setattr("multigate.repro.dry.cost", lambda *_: (1, 1.0, 1e18))
    console = quiet()
    dry_run(wider, console)
    assert "first PreNorm chooses among 0.5, 1, 2, 0.25 times" in console.file.getvalue()
    _, shown = reproduce(wider)
    assert "3 of 4 runs are finished already" in shown
    page = (copied.out / "TABLE.md").read_text()
    table = rows(page, "Learning rates, chosen on val by PreNorm")
    assert [label.split()[0] for label in table] == ["0.5", "1", "2", "0.25"]
    losses = {label: float(row["val"]) for label, row in table.items()}
    assert min(losses, key=losses.__getitem__).endswith("(chosen)")
    _, shown = reproduce(replace(copied, rows=("prenorm",), seeds=(0,)))
    assert "1 of 1 runs are finished already" in shown


def test_other_text_is_refused(copied, tmp_path):
    other = text(tmp_path / "other")
    assert reproduce(replace(copied, data=str(other)))[0].missing == []
    with pytest.raises(ValueError, match="data data -> other text in"):
        reproduce(replace(copied, data=str(prepared(tmp_path / "more", count=61))))


def test_a_run_of_other_settings_in_the_folder_is_refused(copied):
    path = copied.out / "runs" / folder_of(copied, "mgr-competitive-4", 0).name / "config.toml"
    path.write_text(path.read_text().replace("streams = 4", "streams = 3"))
    with pytest.raises(ValueError, match=r"model.streams 3 -> 4\): remove .* to make it again"):
        reproduce(copied)


def test_a_damaged_run_is_named(copied):
    path = copied.out / "runs" / folder_of(copied, "prenorm", 0).name / "log.jsonl.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"is damaged .*remove it, and its run will be made again"):
        summary(SummaryConfig(copied.out), quiet())


def test_a_failing_run_is_named_and_the_others_are_there(data, tmp_path, monkeypatch):
    here(monkeypatch)

    def failing(config, console):
        if config.residual.startswith("attnres") and config.seed == 1:
            folder = config.folder
            raise NotFinite(f"the last good checkpoint is {folder}/checkpoints/step-00000004.")
        return train(config, console)

    monkeypatch.setattr(worker, "train", failing)
    config = study(data, tmp_path, rows=("prenorm", "attnres-full"), lr_factors=(1.0,))
    done, shown = reproduce(config)
    assert done.failed == ["attnres-full-seed1", "attnres-full-scaled-seed1"]
    assert len(done.finished) == 4
    assert "attnres-full-seed1, 0 s: failed: the last good" in shown
    page = (config.out / "TABLE.md").read_text()
    assert "`attnres-full-seed1` failed at step 0: the last good checkpoint is " in page
    assert str(tmp_path) not in page
    table = rows(page, SECTIONS[1])
    assert table["Full AttnRes"]["seeds"] == "1"
    assert table["Full AttnRes"]["verdict"] == "one seed, no interval"
    assert SECTIONS[3] not in page
    # The next sitting tries it again, and then it is there.
    monkeypatch.setattr(worker, "train", train)
    done, _ = reproduce(config)
    assert len(done.finished) == 6
    assert "failed" not in (config.out / "TABLE.md").read_text()


def test_a_run_that_has_diverged_is_a_failed_one(data, tmp_path, monkeypatch):
    """Its loss is no number, and is neither chosen nor compared."""
    here(monkeypatch)
    scored = worker.scored

    def diverged(config, split):
        lost = {"loss": math.nan} if config.name == "prenorm-lr0.5-seed0" else {}
        return {**scored(config, split), **lost}

    monkeypatch.setattr(worker, "scored", diverged)
    config = study(data, tmp_path, rows=("prenorm",), seeds=(0,), steps=4)
    done, _ = reproduce(config)
    assert len(done.finished) == 1
    assert factor_of(config) in (1.0, 2.0)
    page = (config.out / "TABLE.md").read_text()
    assert "nan" not in page
    assert rows(page, SECTIONS[3])["0.5"]["val"] == "-"
    assert "`prenorm-lr0.5-seed0` failed at step 4: the loss on val is not finite" in page


def test_no_learning_rate_at_all(data, tmp_path, monkeypatch):
    here(monkeypatch)

    def failing(config, console):
        raise NotFinite("it is not finite.")

    monkeypatch.setattr(worker, "train", failing)
    with pytest.raises(ValueError, match=r"failed at every learning rate.* step 0: it is not"):
        reproduce(study(data, tmp_path))


def test_a_model_that_cannot_be_is_left_out_and_said(data, tmp_path, monkeypatch):
    here(monkeypatch)
    rows = ("prenorm", "mgr-competitive-4", "attnres-block-8")
    config = study(data, tmp_path, rows=rows, lr_factors=(1.0,), seeds=(0,))
    done, shown = reproduce(config)
    assert done.finished == ["prenorm-seed0", "mgr-competitive-4-seed0"]
    sentence = "Block AttnRes (n=8): attnres-block cannot cut 4 sublayers into 8 blocks"
    assert f"left out: {sentence}" in shown
    assert f"- {sentence}" in (config.out / "TABLE.md").read_text()


def test_without_test_text_the_verdict_is_on_val(tmp_path, monkeypatch):
    here(monkeypatch)
    config = study(prepared(tmp_path / "text"), tmp_path, lr_factors=(1.0,))
    reproduce(replace(config, rows=("prenorm", "mgr-competitive-4")))
    shown = rows((config.out / "TABLE.md").read_text(), SECTIONS[0])["Competitive MGR (n=4)"]
    assert "test" not in shown
    mean, half = map(float, shown["val - PreNorm"].split(" ± "))
    verdict = "cannot tell" if abs(mean) <= half else "lower" if mean < 0 else "higher"
    assert shown["verdict"] == verdict


def test_no_time_left(data, tmp_path, monkeypatch):
    """The budget is over before anything has begun: a table all the same, and what is missing."""
    monkeypatch.setattr(Clock, "over", lambda self: True)
    config = study(data, tmp_path)
    done, shown = reproduce(config)
    assert done.missing == ["prenorm-lr0.5-seed0", "prenorm-seed0", "prenorm-lr2-seed0"]
    assert "0 of 3 runs are finished; the same command goes on" in shown
    page = (config.out / "TABLE.md").read_text()
    assert "- not run yet, 3: `prenorm-lr0.5-seed0`" in page


def test_ablations_share_the_runs_of_the_table(copied, monkeypatch):
    here(monkeypatch)
    chosen = ("prenorm", "mgr-competitive-4", "mgr-competitive-2", "mgr-competitive-4-exact")
    ablations = replace(copied, study="ablations", rows=chosen, seeds=(0,))
    _, shown = reproduce(ablations)
    assert "2 of 4 runs are finished already" in shown
    page = (copied.out / "ABLATIONS.md").read_text()
    streams = rows(page, "Number of streams")
    assert list(streams) == ["PreNorm", "Competitive MGR (n=2)", "Competitive MGR (n=4)"]
    memory = rows(page, "Memory mode")["Competitive MGR (n=4), memory exact"]
    assert memory["compared with"] == "Competitive MGR (n=4)"
    # The gradients are those of store to the bit.
    assert memory["test difference"] == "+0.0000"
    names = {p.name for p in summary(SummaryConfig(copied.out, figures=False), quiet())}
    assert names == {"TABLE.md", "results.json", "ABLATIONS.md", "ablations.json"}


def test_another_study_in_the_folder_has_its_learning_rate(copied, monkeypatch):
    """The deep study has no check of its own unless asked for."""
    here(monkeypatch)
    deep = replace(copied, study="deep", rows=("deep-prenorm",), seeds=(0,), steps=12)
    monkeypatch.setattr(Clock, "over", lambda self: True)
    done, _ = reproduce(deep)
    assert done.missing == [folder_of(copied, "deep-prenorm", 0).name]
    with pytest.raises(ValueError, match="lr_factors"):
        reproduce(replace(deep, lr_factors=(3.0,)))


def test_thinning_keeps_what_the_table_needs():
    records = [{"event": "start", "step": 0, "host": "x", "parameters": 5, "device": "cpu"}]
    for k in range(1, 1001):
        loss = None if k == 990 else 3 + math.sin(k) / 7
        records.append({"event": "train", "step": k, "loss": loss, "tokens": k, "grad_norm": 1.0})
        if k % 500 == 0:
            records.append({"event": "checkpoint", "step": k})
            records.append({"event": "val", "step": k, "loss": 3.0, "memory_gib": 1.5})
    kept = thinned(records)
    assert kept[0] == {"event": "start", "step": 0, "parameters": 5, "device": "cpu"}
    steps = [r["step"] for r in kept if r["event"] == "train"]
    # Step 990 is not finite, so that the last 200 begin at 800.
    assert steps == [1, *range(10, 800, 10), *range(800, 1001)]
    last = [r["loss"] for r in kept if r["event"] == "train" and r["loss"] is not None][-200:]
    whole = [r["loss"] for r in records if r["event"] == "train" and r["loss"] is not None][-200:]
    assert last == pytest.approx(whole, abs=1e-6)
    assert [r["step"] for r in kept if r["event"] == "val"] == [500, 1000]
    assert all(r["event"] != "checkpoint" for r in kept)


def test_the_same_records_make_the_same_bytes(made, tmp_path):
    records = read_records(next(made[0].runs.glob("prenorm-seed0")))[0]
    for name in ("one", "two"):
        write_kept(tmp_path / name, resolve("tiny"), {"torch": "2"}, records)
    for file in ("log.jsonl.gz", "config.toml", "environment.json"):
        one, two = ((tmp_path / name / file).read_bytes() for name in ("one", "two"))
        assert one == two
    # In the header of gzip, the time is not there and neither is a name.
    assert (tmp_path / "one/log.jsonl.gz").read_bytes()[3:8] == bytes(5)


def test_a_study_of_the_size_of_minis_is_under_five_megabytes(tmp_path):
    """1500 steps a run: what 70 of them take."""
    records = [{"event": "start", "step": 0, "parameters": 27_000_000}]
    for k in range(1, 1501):
        values = {"loss": 3 + math.sin(k * k) / 3, "grad_norm": 0.3 + math.cos(k**3) / 9}
        speed = round(1.6e6 + 1e5 * math.sin(k**2 / 3))
        records.append({"event": "train", "step": k, **values, "tokens_per_second": speed})
    write_kept(tmp_path, resolve("mini"), {"torch": "2"}, records)
    size = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert 70 * size < 2_000_000


def test_a_folder_without_results(tmp_path, capsys):
    assert main(["repro", "summary", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"multigate: {tmp_path} holds no results of `multigate repro`: give the folder of its "
        "--out.\n"
    )


def test_two_commands_in_one_folder(data, tmp_path):
    """A lock is a process's own, so the other one is another process."""
    config = study(data, tmp_path)
    config.runs.mkdir()
    code = (
        "import sys, fcntl; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(config.runs / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(OSError, match="another `multigate repro` has its runs in"):
            reproduce(config)
        other.stdin.close()
    assert not config.out.exists()


def test_a_dry_run_shows_the_plan_and_does_nothing(data, tmp_path, capsys):
    config = study(data, tmp_path)
    words = ["repro", "table1", "--data", str(data), "--out", str(config.out), "--dry-run"]
    words += ["--config", str(config.config[0]), "--steps", "12", "--seeds", "0", "1"]
    assert main([*words, "--rows", "prenorm", "attnres-full", "attnres-block-8"]) == 0
    shown = capsys.readouterr().out
    assert "Table 1, scale tiny: 8 runs, seed by seed" in shown
    assert "a run: 12 steps of 128 tokens = 1,536 tokens" in shown
    assert "first PreNorm chooses among 0.5, 1, 2 times these learning rates" in shown
    assert re.search(r"^prenorm +\d\d,\d{3} +0\.\d\d +4  0 1$", shown, re.M)
    assert re.search(r"^attnres-full-scaled +[\d,]+ +0\.\d\d +2  0 1$", shown, re.M)
    assert "attnres-block-8                     left out: attnres-block cannot cut" in shown
    assert not config.out.exists()


def test_a_dry_run_knows_what_is_finished(made, monkeypatch):
    """Also where the names of runs have the learning rate that was chosen."""
    monkeypatch.setattr("multigate.repro.dry.cost", lambda *_: (1, 1.0, 1e18))
    console = quiet()
    dry_run(replace(made[0], seeds=(0, 1, 2)), console)
    shown = console.file.getvalue()
    assert "11 of them are finished already" in shown
    assert re.search(r"^prenorm +1 +1.00 +1  2$", shown, re.M)
    assert re.search(r"^highway +1 +1.00 +0  -$", shown, re.M)
    assert "chooses among" not in shown


def test_the_dry_run_of_the_papers_table_is_one_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("multigate.repro.dry.cost", lambda *_: (123_587_328, 1.0, 1e18))
    monkeypatch.chdir(tmp_path)
    assert main(["repro", "table1", "--scale", "s", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "Table 1, scale s: 42 runs" in shown
    assert "20,000 steps of 524,288 tokens = 10,485,760,000 tokens of fineweb" in shown
    assert "Muon 0.01, AdamW 0.003, warm-up 200, cosine to 10%, weight decay 0.1" in shown
    assert "results in repro/s" in shown
    assert shown.count("123,587,328") == 18
