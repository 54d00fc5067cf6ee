"""`multigate repro deep` looks into its runs: what it keeps of that, and what it makes of it."""

import gzip
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from hooked import small_gpt, some_tokens
from multigate.analysis.draw import named
from multigate.analysis.measure import measure, sections
from multigate.analysis.store import flattened, listed, restored
from multigate.repro import look, queue, worker
from multigate.repro.command import summary
from multigate.repro.config import SummaryConfig
from multigate.repro.kept import read_all
from multigate.repro.plan import run_name
from multigate.repro.settings import read_settings
from multigate.repro.summary import first_seed, looked_into
from runs import quiet
from studied import here, reproduce, study, text

ROWS = ("deep-prenorm", "deep-mgr-competitive-8")
NAMES = [f"{row}-seed0" for row in ROWS]


@pytest.fixture(scope="module", autouse=True)
def little():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "SAMPLES", 4)
        patch.setattr(look, "PRUNED", 2)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A deep study that is finished, and what was shown; nobody changes it."""
    data, place = text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("deep")
    config = study(data, place, study="deep", rows=ROWS, seeds=(0,), lr_factors=None, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        here(patch)
        done, shown = reproduce(config)
    assert list(done.finished) == NAMES
    return config, shown


@pytest.fixture
def copied(made, tmp_path, monkeypatch):
    """A copy of it to be changed, in which nothing is trained any more."""
    here(monkeypatch)
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("it was trained once more"))
    shutil.copytree(made[0].out, tmp_path / "kept")
    shutil.copytree(made[0].runs, tmp_path / "runs")
    return replace(made[0], out=tmp_path / "kept", runs=tmp_path / "runs", figures=False)


def inside(config, name):
    return config.out / "runs" / name / "inside.json.gz"


def test_all_that_was_measured_is_kept_to_six_digits(made):
    config = made[0]
    for name in NAMES:
        numbers = json.loads(gzip.decompress(inside(config, name).read_bytes()))
        assert {key.partition(".")[0] for key in numbers} >= {"dynamics", "angles", "pruning"}
        assert np.shape(numbers["pruning.delta_loss"]) == (12,)
        for value in numbers["dynamics.output_rms"]:
            assert value == float(f"{value:.6g}")
    assert np.shape(numbers["gates.beta.counts"]) == (24, look.KEPT_BINS)


def test_the_page_has_numbers_figures_claims_and_what_was_seen(made):
    config = made[0]
    found = json.loads((config.out / "deep.json").read_text())
    page = (config.out / "DEEP.md").read_text()
    for row, name in zip(found["inside"], NAMES, strict=True):
        numbers = json.loads(gzip.decompress(inside(config, name).read_bytes()))
        assert row["run"] == name
        largest = max(values[0] for values in numbers["massive.hidden"])
        assert row["largest activation"] == pytest.approx(largest, abs=1e-6)
        rms = numbers["dynamics.output_rms"]
        assert row["output rms, last / first block"] == pytest.approx(rms[-1] / rms[0], rel=1e-5)
        assert f"| {name} | {row['largest activation']:.4g} |" in page
    for chart in found["figures"]:
        assert (config.out / chart["file"]).exists()
        assert f"### {chart['title']}\n\n![{chart['title']}]({chart['file']})" in page
        assert chart["seen"] in page
        assert f"The paper: {chart['claim']}" in page or not chart["claim"]
    assert {path.suffix for path in (config.out / "analysis").iterdir()} == {".png"}
    titles = [chart["title"] for chart in found["figures"]]
    assert "Angular distance, PreNorm" in titles
    assert "Who wrote the final streams, Competitive MGR (n=8)" in titles


def test_all_of_it_is_made_again_from_the_kept_numbers(made, tmp_path):
    out = tmp_path / "published"
    shutil.copytree(made[0].out, out)
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*.*")}
    shutil.rmtree(out / "analysis")
    for name in ("DEEP.md", "DEEP.png", "deep.json"):
        (out / name).unlink()
    (out / "analysis").mkdir()
    (out / "analysis" / "of-before.png").write_bytes(b"")
    summary(SummaryConfig(out), quiet())
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*.*")} == before


def test_what_is_there_is_left_alone_and_what_is_missing_is_made(copied):
    before = inside(copied, NAMES[0]).stat().st_mtime_ns
    kept = inside(copied, NAMES[1]).read_bytes()
    inside(copied, NAMES[1]).unlink()
    _, shown = reproduce(copied)
    assert inside(copied, NAMES[0]).stat().st_mtime_ns == before
    assert inside(copied, NAMES[1]).read_bytes() == kept
    assert "2 of 2 runs are finished already, 1 of them to be looked into" in shown
    assert "not looked into" not in shown


def test_without_checkpoints_it_is_told_who_was_not_looked_into(copied):
    inside(copied, NAMES[0]).unlink()
    shutil.rmtree(copied.runs / NAMES[0])
    done, shown = reproduce(replace(copied, figures=True))
    assert list(done.finished) == NAMES
    assert f"not looked into: {NAMES[0]}, whose checkpoints are not in {copied.runs};" in shown
    found = json.loads((copied.out / "deep.json").read_text())
    assert [row["run"] for row in found["inside"]] == NAMES[1:]
    assert (copied.out / "analysis" / "gates-beta.png").exists()
    assert not (copied.out / "analysis" / "angles-PreNorm.png").exists()


def test_a_look_that_fails_leaves_the_run(copied, monkeypatch, capsys):
    """It is told, and the same command tries again."""
    inside(copied, NAMES[0]).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "look_into", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        done, shown = reproduce(copied)
    assert worker.said(capsys.readouterr().out, worker.UNSEEN) == "disk full"
    assert list(done.finished) == NAMES
    assert f"not looked into yet: {NAMES[0]}; the same command goes on" in shown
    reproduce(copied)
    assert inside(copied, NAMES[0]).exists()


def test_why_nobody_looked_into_a_run_is_said_with_its_losses(copied, monkeypatch):
    inside(copied, NAMES[0]).unlink()

    def drain(self, jobs):
        for job in jobs:
            self.ended(queue.Outcome(job, "finished", 1.0, "the disk is full."))

    monkeypatch.setattr(queue.Queue, "drain", drain)
    _, shown = reproduce(copied)
    line = next(line for line in shown.splitlines() if line.startswith(f"[2/2] {NAMES[0]}"))
    assert ", test " in line
    assert line.endswith(", not looked into: the disk is full.")


def test_damaged_numbers_are_named_before_anything_is_done(copied):
    inside(copied, NAMES[0]).write_bytes(b"no gzip")
    inside(copied, NAMES[1]).unlink()
    with pytest.raises(ValueError, match=r"inside.json.gz is damaged .* looked into again"):
        summary(SummaryConfig(copied.out, figures=False), quiet())
    with pytest.raises(ValueError, match=r"inside.json.gz is damaged"):
        reproduce(copied)
    assert not inside(copied, NAMES[1]).exists()


def test_another_run_in_the_same_place_is_not_looked_into(copied, capsys):
    """Checkpoints of other settings, or of a training that is not over."""
    inside(copied, NAMES[0]).unlink()
    config = worker.Job.read(copied.runs / NAMES[0] / "job.json").config
    config, keep = replace(config, out=copied.runs), inside(copied, NAMES[0]).parent
    with pytest.raises(ValueError, match="another run than the one that is kept"):
        look.look_into(replace(config, seed=7), keep)
    (state,) = (copied.runs / NAMES[0] / "checkpoints").glob("*/state.json")
    told = json.loads(state.read_text())
    state.write_text(json.dumps({**told, "step": told["step"] - 1}))
    with pytest.raises(ValueError, match="another run than the one that is kept"):
        look.look_into(config, keep)
    shutil.rmtree(copied.runs / NAMES[0] / "checkpoints")
    shutil.copytree(copied.runs / NAMES[1] / "checkpoints", copied.runs / NAMES[0] / "checkpoints")
    reproduce(copied)
    assert "another run than the one that is kept" in capsys.readouterr().out
    assert not inside(copied, NAMES[0]).exists()


def test_figures_are_of_one_seed_and_of_the_tables_learning_rate(made):
    """A run of the learning-rate check is another model; so is one of another seed."""
    study = made[0].declared()
    numbers = {
        (f"deep-{name}", seed): object()
        for name in ("prenorm", "attnres-full-scaled")
        for seed in (1, 2)
    }
    seen = {run_name(cell, seed, 2.0): value for (cell, seed), value in numbers.items()}
    assert first_seed(seen, study) == {
        "PreNorm": numbers["deep-prenorm", 1],
        "Full AttnRes, 1/sqrt(d)": numbers["deep-attnres-full-scaled", 1],
    }
    seen[run_name("deep-mgr-competitive-8", 0, 2.0)] = alone = object()
    assert first_seed(seen, study) == {"Competitive MGR (n=8)": alone}
    assert first_seed({}, study) == {}


def test_runs_at_another_learning_rate_are_not_on_the_page(copied):
    other = copied.out / "runs" / "deep-prenorm-lr2-seed0"
    shutil.copytree(copied.out / "runs" / NAMES[0], other)
    settings = read_settings(copied.out)
    asked = settings.asked("deep", [other.name], "multigate repro deep")
    asked.write(copied.out)
    assert list(looked_into(copied.out, asked, read_all(copied.out))) == sorted(NAMES)
    at_two = looked_into(copied.out, replace(asked, lr_factor=2.0), read_all(copied.out))
    assert list(at_two) == [other.name]


def test_without_figures_the_page_shows_none(copied):
    summary(SummaryConfig(copied.out, figures=False), quiet())
    assert "analysis/" not in (copied.out / "DEEP.md").read_text()
    assert "## Inside" in (copied.out / "DEEP.md").read_text()


def test_a_run_that_is_trained_anew_is_looked_into_anew(copied, monkeypatch):
    monkeypatch.undo()
    here(monkeypatch)
    kept = inside(copied, NAMES[0]).read_bytes()
    inside(copied, NAMES[0]).write_bytes(b"of another model")
    (copied.out / "runs" / NAMES[0] / "log.jsonl.gz").unlink()
    reproduce(copied)
    assert inside(copied, NAMES[0]).read_bytes() == kept


def test_figures_from_numbers_are_those_of_the_arrays():
    """With all digits the same to the bit; with fewer bins they say the same."""
    models = {name: small_gpt(name) for name in ("prenorm", "attnres-full", "mgr-competitive")}
    measured = {name: measure(model, some_tokens(6, 9), 2) for name, model in models.items()}
    flat = {name: flattened(families) for name, families in measured.items()}
    whole, brief = ({}, {})
    for label, arrays in flat.items():
        numbers = json.loads(json.dumps({name: listed(array) for name, array in arrays.items()}))
        for name, array in flattened(restored(numbers)).items():
            np.testing.assert_array_equal(array, arrays[name])
            assert array.dtype == arrays[name].dtype
        whole[label] = numbers
        brief[label] = {name: listed(look.brief(name, a)) for name, a in arrays.items()}
    known = named(chart for section in sections(measured) for chart in section.charts)
    assert len(known) > 10
    for found in (look.charts(whole), look.charts(brief)):
        assert list(found) == list(known)
        for name, chart in known.items():
            same = found[name]
            assert (same.title, same.seen, same.absent) == (chart.title, chart.seen, chart.absent)
            assert len(same.panels) == len(chart.panels)


@pytest.mark.filterwarnings("error")
def test_the_numbers_of_the_page_by_hand():
    """Of four blocks: the second is the shallow ones, the others but the first the deep ones."""
    steps = np.diag([0.4, 0.5, 0.25, 0.35], 1)
    numbers = {
        "massive.hidden": [[2.0, 1.0, 1.0], [40.0, 3.0, 1.0], [9.0, 2.0, 1.0], [8.0, 1.0, 0.5]],
        "massive.mean": [0.5, 2.0, 0.25, 1.0],
        "dynamics.output_rms": [0.5, 4.0, 4.0, 1.5],
        "dynamics.grad_rms": [0.9, 0.3, 0.05, 0.15],
        "angles.hidden": steps.tolist(),
        "pruning.delta_loss": [None, 0.5, 0.125, 0.375],
        "gates.beta.mean": [0.1],
    }
    assert look.measure(numbers) == {
        "largest activation": 40.0,
        "largest / mean": 36.0,
        "output rms, last / first block": 3.0,
        "gradient rms, shallow / deep": 3.0,
        "angle to the next block, shallow": 0.5,
        "the same, deep": 0.3,
        "loss without a block, deep, median": 0.25,
        "the same, smallest": 0.125,
    }
    few = numbers | {
        "dynamics.output_rms": [0.5, 1.5],
        "dynamics.grad_rms": [0.3, 0.1],
        "angles.hidden": steps[:3, :3].tolist(),
        "pruning.delta_loss": [None, 0.125],
    }
    missing = {name for name, value in look.measure(few).items() if value is None}
    assert missing == {"gradient rms, shallow / deep", "angle to the next block, shallow"}
    assert look.measure({"massive.mean": [1.0]}) == {}


def test_histograms_keep_their_sums():
    counts = np.arange(2 * look.BINS).reshape(2, -1)
    brief = look.brief("gates.beta.counts", counts)
    assert brief.shape == (2, look.KEPT_BINS)
    assert (brief.sum(1) == counts.sum(1)).all()
    # A tenth of the bins are the values below a tenth.
    assert brief[0, : look.KEPT_BINS // 10].sum() == counts[0, : look.BINS // 10].sum()
    assert look.brief("gates.beta.boxes", counts) is counts
