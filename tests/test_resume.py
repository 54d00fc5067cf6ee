"""Interrupted = uninterrupted: the same weights bit for bit, and a log with every step once."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from multigate.checkpoint import checkpoints
from multigate.config import to_table, to_toml
from multigate.log import Log, read_log, rewind
from multigate.signals import INSIST_SECONDS, caught_signals
from multigate.train import Run
from runs import numbers, run, small, wait_for_step


def weights(config):
    newest = checkpoints(config.folder)[-1]
    return {
        name: tensor
        for file in ("model.safetensors", "training.safetensors")
        for name, tensor in load_file(newest / file).items()
    }


def assert_the_same(whole, parts):
    """Weights, optimizer and log of two runs, all to the bit."""
    a, b = weights(whole), weights(parts)
    assert a.keys() == b.keys()
    different = [name for name in a if not a[name].equal(b[name])]
    assert not different
    assert numbers(read_log(parts.folder)) == numbers(read_log(whole.folder))
    assert numbers(read_log(parts.folder, "val")) == numbers(read_log(whole.folder, "val"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(number, data, tmp_path, monkeypatch):
    whole = small(data, tmp_path / "whole", steps=20)
    run(whole)
    parts = small(data, tmp_path / "parts", steps=20)
    read = Run._read

    def interrupted(self, reading):
        if reading.step == 7:
            # Twice, as launchers do that signal a process and its group.
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        read(self, reading)

    monkeypatch.setattr(Run, "_read", interrupted)
    result, shown, _ = run(parts)
    monkeypatch.undo()
    assert result.signal == number
    assert result.step in (7, 8)
    assert f"stopped by {number.name} after step {result.step}, which is saved" in shown
    assert checkpoints(parts.folder)[-1].name == f"step-{result.step:08d}"
    stopped = result.step
    result, shown, _ = run(parts)
    assert f"going on from step-{stopped:08d}" in shown
    assert (result.step, result.signal) == (20, None)
    assert_the_same(whole, parts)


@pytest.fixture
def interruptible():
    """Ctrl-C as at a terminal, whatever began the tests: a shell's background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_insisting_interrupts_at_once():
    with caught_signals() as caught:
        signal.raise_signal(signal.SIGINT)
        time.sleep(INSIST_SECONDS + 0.1)
        assert caught == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_the_last_step_leaves_a_finished_run(data, tmp_path, monkeypatch):
    config = small(data, tmp_path, steps=5)
    save = Run._save

    def signalled(self):
        signal.raise_signal(signal.SIGTERM)
        save(self)

    monkeypatch.setattr(Run, "_save", signalled)
    result, shown, _ = run(config)
    assert result.signal in (None, signal.SIGTERM)
    assert (result.signal is None) == (result.step == 5)
    monkeypatch.setattr(Run, "_save", save)
    result, shown, _ = run(config)
    assert (result.step, result.signal) == (5, None)
    assert "train loss" in shown


def test_one_process_at_a_time(data, tmp_path):
    """The same command given twice, or two that share a name by accident."""
    config = small(data, tmp_path)
    config.folder.mkdir(parents=True)
    code = f"""
import time
from pathlib import Path
from multigate.lock import locked
with locked(Path({str(config.folder / ".lock")!r}), "taken"):
    print("locked", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(OSError, match="another process is training .*: give this run another"):
            run(config)
        other.kill()
    assert run(config)[0].step == 12


def test_going_on_in_another_precision(data, tmp_path):
    whole = run(small(data, tmp_path / "whole", steps=20))[2]
    config = small(data, tmp_path / "parts", steps=20)
    run(config)
    for later in checkpoints(config.folder)[1:]:
        shutil.rmtree(later)
    _, shown, log = run(small(data, tmp_path / "parts", steps=20, precision="fp16"))
    assert "going on from step-00000016" in shown
    assert [r["loss"] for r in log] == pytest.approx([r["loss"] for r in whole], abs=0.02)


def test_epochs_and_accumulation_survive(data, tmp_path, monkeypatch):
    """Steps of 64 windows go through the text several times; two micro-batches each."""
    settings = {"steps": 14, "tokens_per_step": 64 * 32, "micro_batch": 32, "residual": "mhc-lite"}
    whole, parts = (small(data, tmp_path / n, **settings) for n in ("whole", "parts"))
    run(whole)
    event = Log.event

    class Killed(BaseException):
        pass

    def killed(self, kind, step, **values):
        event(self, kind, step, **values)
        if (kind, step) == ("train", 11):
            raise Killed

    monkeypatch.setattr(Log, "event", killed)
    with pytest.raises(Killed):
        run(parts)
    monkeypatch.undo()
    assert len(read_log(parts.folder)) == 11
    assert checkpoints(parts.folder)[-1].name == "step-00000008"
    run(parts)
    assert_the_same(whole, parts)


def test_a_cut_off_line_and_later_steps_are_dropped_from_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [f'{{"event": "train", "step": {k}, "loss": {k}}}' for k in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"event": "tra')
    rewind(path, 3)
    assert path.read_text() == "\n".join(lines[:3]) + "\n"
    rewind(tmp_path / "nothing.jsonl", 3)
    assert not (tmp_path / "nothing.jsonl").exists()


def command(config, tmp_path, before=""):
    """The run as a process of its own, after the Python of `before`."""
    file = tmp_path / "config.toml"
    file.write_text(to_toml(to_table(config)))
    code = f"import sys, torch; torch.set_num_threads(1)\n{before}\n"
    code += "from multigate.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, "train", "--config", str(file)]


def kill_at(config, step, tmp_path, patience):
    """Start the run, SIGKILL it once its log has `step` and `patience` seconds have passed."""
    process = subprocess.Popen(command(config, tmp_path), stdout=subprocess.DEVNULL)
    log = config.folder / "log.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and f'"train", "step": {step},' in log.read_text():
            time.sleep(patience)
            break
        time.sleep(0.002)
    alive = process.poll() is None
    process.kill()
    process.wait()
    return alive


@pytest.mark.slow
def test_ten_kills_at_random_steps(data, tmp_path):
    """One run, SIGKILLed ten times wherever it is, against one that was left alone."""
    settings = {"steps": 300, "save_every": 10, "eval_every": 50}
    whole, parts = (small(data, tmp_path / n, **settings) for n in ("whole", "parts"))
    subprocess.run(command(whole, tmp_path), check=True, stdout=subprocess.DEVNULL)
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    points = sorted(draw.sample(range(12, 290), 10))
    killed = sum(kill_at(parts, p, tmp_path, draw.uniform(0, 0.03)) for p in points)
    assert killed == 10, points
    subprocess.run(command(parts, tmp_path), check=True, stdout=subprocess.DEVNULL)
    assert_the_same(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_a_kill_in_the_middle_of_a_checkpoint_write(call, data, tmp_path):
    """SIGKILL in front of the n-th fsync: no file, half of them, all but the rename, the next."""
    whole, parts = (small(data, tmp_path / n, save_every=3) for n in ("whole", "parts"))
    run(whole)
    before = f"""
import os, signal
from multigate import checkpoint
calls, fsync = [], checkpoint.fsync
def killing(path):
    calls.append(path)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(path)
checkpoint.fsync = killing
"""
    done = subprocess.run(command(parts, tmp_path, before), check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    left = list((parts.folder / "checkpoints").iterdir())
    assert len([p for p in left if p.name.startswith(".")]) == (0 if call == 5 else 1)
    assert len(checkpoints(parts.folder)) == (0 if call < 5 else 1)
    run(parts)
    assert_the_same(whole, parts)
    assert not list((parts.folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_sigterm_to_a_process_ends_it_cleanly(data, tmp_path):
    config = small(data, tmp_path / "run", steps=5000, eval_every=5000, save_every=5000)
    process = subprocess.Popen(
        command(config, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(process, config, 5)
    process.send_signal(signal.SIGTERM)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in shown
    assert errors == ""
    step = len(read_log(config.folder))
    assert checkpoints(config.folder)[-1].name == f"step-{step:08d}"
