"""Processes of runs: several at once, a budget, failures, and what a kill leaves.

The workers of the fast tests are a few lines of Python that only pretend to train.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from multigate.__main__ import main
from multigate.config import resolve
from multigate.log import read_log
from multigate.repro import queue
from multigate.repro.kept import read_all, read_kept, write_kept
from multigate.repro.queue import Clock, Queue, slots
from multigate.repro.worker import Job, reason, sentence
from runs import numbers, prepared, write_documents
from studied import here, reproduce, study, text

PRETENDER = """
import json, os, signal, sys, time
told = json.load(open(sys.argv[1]))
name, folder = told["config"]["name"], os.path.dirname(sys.argv[1])
def note(word):
    with open(os.path.join(folder, "notes"), "a") as file:
        environment = (os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
        file.write(" ".join([word, str(time.monotonic()), *map(str, environment)]) + "\\n")
def saved(number, frame):
    note("saved")
    if "slow" in name:
        time.sleep(1)
    sys.exit(143)
if "deaf" in name:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, saved)
note("begin")
if "says" in name:
    print("failed: it is not finite.")
    sys.exit(1)
if "unseen" in name:
    print("not looked into: the disk is full.")
if "crash" in name:
    os.kill(os.getpid(), signal.SIGKILL)
if "status" in name:
    sys.exit(3)
time.sleep(60 if "long" in name or "deaf" in name else 0.3)
note("end")
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Drain a queue of jobs of these names; the outcomes by name, and the notes of each."""
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER)
    monkeypatch.setattr(
        queue, "command", lambda told: [sys.executable, "-S", str(script), str(told)]
    )

    def drain(names, places=(None,), clock=None):
        config = replace(resolve("tiny"), out=tmp_path / "runs")
        jobs = [Job(replace(config, name=name), tmp_path / "kept" / name) for name in names]
        ended = []
        Queue(places, clock or Clock(), lambda line: None, ended.append).drain(jobs)
        notes = {
            name: [line.split() for line in (tmp_path / "runs" / name / "notes").open()]
            for name in names
            if (tmp_path / "runs" / name / "notes").exists()
        }
        return {str(o.job.config.name): o for o in ended}, notes

    return drain


def at(notes, name, word):
    return next(float(when) for what, when, *_ in notes[name] if what == word)


def test_runs_come_one_after_the_other(pretend):
    outcomes, notes = pretend(["a", "b", "c"])
    assert [o.state for o in outcomes.values()] == ["finished"] * 3
    assert list(outcomes) == ["a", "b", "c"]
    assert at(notes, "a", "end") < at(notes, "b", "begin")
    assert at(notes, "b", "end") < at(notes, "c", "begin")


def test_every_device_has_a_run_of_its_own(pretend):
    outcomes, notes = pretend(["a", "b", "c", "d"], places=("2", "5"))
    assert len(outcomes) == 4
    assert max(at(notes, n, "begin") for n in "ab") < min(at(notes, n, "end") for n in "ab")
    assert sorted(notes[n][0][2] for n in "ab") == ["2", "5"]
    assert sorted(notes[n][0][2] for n in "abcd") == ["2", "2", "5", "5"]


def test_a_look_that_went_wrong_is_no_failure(pretend, tmp_path):
    """Whether the worker says so or is killed: the run itself is kept."""
    score = {"event": "score", "step": 1000, "split": "val", "loss": 3.0, "bits_per_byte": 1.0}
    before = tmp_path / "kept" / "crash-at-the-look"
    write_kept(before, resolve("tiny"), {}, [{**score, "tokens": 100}])
    log = (before / "log.jsonl.gz").read_bytes()
    outcomes, _ = pretend(["unseen", "crash-at-the-look"])
    assert {name: (o.state, o.reason) for name, o in outcomes.items()} == {
        "unseen": ("finished", "the disk is full."),
        "crash-at-the-look": ("finished", "its process was ended by SIGKILL."),
    }
    assert (before / "log.jsonl.gz").read_bytes() == log


def test_runs_on_the_cpu_share_its_cores(pretend, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 5)
    seen = [
        pretend([name], places=places)[1][name][0][3]
        for name, places in (("one", [None]), ("two", [None] * 2), ("many", [None] * 9))
    ]
    assert seen == ["None", "2", "1"]
    assert pretend(["gpu"], places=["0", "0"])[1]["gpu"][0][2:] == ["0", "None"]


def test_failures_are_kept_with_their_reason_and_the_rest_goes_on(pretend, tmp_path):
    outcomes, _ = pretend(["says", "crash", "status", "good"])
    assert {name: (o.state, o.reason) for name, o in outcomes.items()} == {
        "says": ("failed", "it is not finite."),
        "crash": ("failed", "its process was ended by SIGKILL."),
        "status": ("failed", "its process ended with status 3."),
        "good": ("finished", ""),
    }
    kept = read_kept(tmp_path / "kept" / "crash")
    assert not kept.finished
    assert kept.failure == "step 0: its process was ended by SIGKILL."


def test_when_the_budget_is_over_runs_save_and_no_other_begins(pretend):
    """Not even on the place that is free while another run still saves."""
    names = ["long-1", "long-slow", "c"]
    outcomes, notes = pretend(names, ("0", "1"), Clock(minutes=1 / 60))
    assert {name: o.state for name, o in outcomes.items()} == {
        "long-1": "stopped",
        "long-slow": "stopped",
    }
    assert at(notes, "long-1", "saved") - at(notes, "long-1", "begin") < 10
    assert "c" not in notes


def test_ctrl_c_is_a_wish_of_the_command(pretend):
    caught = [signal.SIGINT]
    outcomes, notes = pretend(["a"], clock=Clock(None, caught))
    assert not outcomes
    assert not notes


def test_a_run_that_does_not_hear_is_ended(pretend, monkeypatch):
    monkeypatch.setattr(queue, "GRACE", 0.3)
    outcomes, _ = pretend(["deaf"], clock=Clock(minutes=1 / 60))
    assert outcomes["deaf"].state == "stopped"


def test_places(monkeypatch):
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert slots("auto", 1) == [None]
    assert slots("cpu", 2) == [None, None]
    with pytest.raises(ValueError, match="this machine has no cuda device"):
        slots("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert slots("auto", 1) == ["0", "1"]
    assert slots("cuda", 2) == ["0", "1", "0", "1"]
    assert slots("cpu", 1) == [None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7")
    assert slots("auto", 1) == ["3", "GPU-7"]


def test_why_a_run_could_not_go_on():
    assert sentence(ValueError("a sentence.\nmore")) == "a sentence."
    full = sentence(RuntimeError("CUDA out of memory"))
    assert "use fewer --jobs, or for training a smaller --micro-batch" in full
    assert sentence(RuntimeError("")) == "RuntimeError: "
    assert reason("x\nfailed: one\nfailed: two\n", 1) == "two"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text(tmp_path_factory.mktemp("text"))


def words(config):
    """The command as a person would give it."""
    found = ["repro", config.study, "--data", config.data, "--out", config.out]
    found += ["--runs", config.runs, "--config", config.config[0], "--seeds", *config.seeds]
    found += ["--rows", *config.rows, "--steps", config.steps, "--lr-factors", *config.factors]
    return [str(word) for word in found]


def wait_for(process, config, name, step):
    log = config.runs / name / "log.jsonl"
    while not (log.exists() and f'"train", "step": {step},' in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)


def workers(config, name):
    """The processes that train a run, by what the system says of all."""
    told = f"multigate.repro.worker {config.runs / name / 'job.json'}"
    lines = subprocess.check_output(["ps", "-ww", "-eo", "pid,args"], text=True).splitlines()
    return [int(line.split()[0]) for line in lines if line.rstrip().endswith(told)]


ONE = {"rows": ("prenorm", "mgr-competitive-4"), "seeds": (0,), "lr_factors": (1.0,)}


def same_runs(one, two, names):
    """Whether two studies have the same numbers in their logs, and the same scores."""
    for name in names:
        assert numbers(read_log(one.runs / name)) == numbers(read_log(two.runs / name))
        scores = [read_all(config.out)[name].score("test") for config in (one, two)]
        assert scores[0] == scores[1]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A study that nothing has disturbed."""
    config = study(data, tmp_path_factory.mktemp("whole"), steps=150, **ONE)
    with pytest.MonkeyPatch.context() as patch:
        here(patch)
        assert len(reproduce(config)[0].finished) == 2
    return config


@pytest.mark.slow
def test_after_kills_it_goes_on_and_ends_with_the_same_numbers(whole, data, tmp_path):
    """SIGKILL for the worker of the first run, which has failed then, and is tried again last; and
    for the command in the middle of the second: its worker saves and ends."""
    config = study(data, tmp_path, steps=150, **ONE)
    first, second = "prenorm-seed0", "mgr-competitive-4-seed0"
    command = [sys.executable, "-m", "multigate", *words(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(process, config, first, 20)
    (number,) = workers(config, first)
    os.kill(number, signal.SIGKILL)
    wait_for(process, config, second, 20)
    process.kill()
    shown, _ = process.communicate()
    assert "failed: its process was ended by SIGKILL." in shown
    assert f"`{first}` failed at step " in (config.out / "TABLE.md").read_text()
    deadline = time.monotonic() + 60
    while workers(config, second) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers(config, second)
    assert list(read_all(config.out)) == [first]
    reached = len(read_log(config.runs / second))
    assert 20 <= reached < 150
    done, shown = reproduce(config)
    assert shown.index(f"[1/2] {second}") < shown.index(f"[2/2] {first}")
    assert len(done.finished) == 2
    output = (config.runs / second / "output.txt").read_text()
    assert f"going on from step-{reached:08d}" in output
    same_runs(whole, config, (first, second))


@pytest.mark.slow
def test_after_sigterm_and_the_budget_it_goes_on_with_the_same_numbers(
    whole, data, tmp_path, monkeypatch, capsys
):
    config = study(data, tmp_path, steps=150, **{**ONE, "rows": ("mgr-competitive-4",)})
    name = "mgr-competitive-4-seed0"

    def told(self):
        log = config.runs / name / "log.jsonl"
        if not self.caught and log.exists() and len(read_log(log.parent)) > 10:
            signal.raise_signal(signal.SIGTERM)
        return bool(self.caught)

    with monkeypatch.context() as patch:
        patch.setattr(Clock, "over", told)
        assert main(words(config)) == 128 + signal.SIGTERM
    assert f"stopped: {name}, which goes on with the same command" in capsys.readouterr().out
    before = len(read_log(config.runs / name))
    assert newest(config, name) == before < 150

    def over(self):
        return len(read_log(config.runs / name)) > before + 10

    with monkeypatch.context() as patch:
        patch.setattr(Clock, "over", over)
        _, shown = reproduce(config)
    assert f"stopped: {name}" in shown
    assert f"not run yet, 1: `{name}`" in (config.out / "TABLE.md").read_text()
    after = len(read_log(config.runs / name))
    assert before < newest(config, name) == after < 150
    assert reproduce(config)[0].finished == [name]
    same_runs(whole, config, (name,))


def newest(config, name):
    """The step of a run's last checkpoint."""
    found = sorted((config.runs / name / "checkpoints").iterdir())
    return int(found[-1].name.removeprefix("step-"))


@pytest.mark.slow
def test_the_whole_table_at_tiny(tmp_path, monkeypatch):
    """Every row of the paper and of related work, from text, as continuous integration runs it."""
    here(monkeypatch)
    apart = write_documents(tmp_path / "apart", count=4)
    data, out = prepared(tmp_path, count=20, test=(str(apart),)), tmp_path / "kept"
    few = tmp_path / "few.toml"
    few.write_text("tokens_per_step = 512\neval_tokens = 512\n")
    given = ["repro", "table1", "--scale", "tiny", "--data", data, "--out", out]
    given += ["--runs", tmp_path / "runs", "--steps", 3, "--seeds", 0, 1, "--jobs", 2]
    assert main([*map(str, given), "--config", str(few), "--device", "cpu"]) == 0
    found = json.loads((out / "results.json").read_text())
    assert len(found["runs"]) == 2 + 12 * 2 + 6
    assert [len(group["rows"]) for group in found["groups"]] == [9, 6, 6]
    assert all(row["losses"]["test"] for group in found["groups"] for row in group["rows"])
    assert "2 at once" in (out / "TABLE.md").read_text()
    assert sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) < 5e6
