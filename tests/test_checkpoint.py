"""Checkpoints: what is kept, what is refused, and that nothing is lost when something breaks."""

import errno
import json
import os
import pickle
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from multigate.checkpoint import (
    CheckpointError,
    Saver,
    best,
    checkpoints,
    open_run,
    read_state,
    read_tensors,
)
from multigate.distributed import World
from multigate.evaluate import EvalConfig, evaluate, load_model
from multigate.log import Log, read_log
from multigate.train import NotFinite, Run
from runs import losses, prepared, quiet, run, small


def save(saver, step, val_loss=None):
    tensors = {"w": torch.full((3,), float(step))}
    saver.save(step, tensors, {"m": torch.tensor(step)}, {"step": step, "val_loss": val_loss})


def test_the_newest_and_the_best_are_kept(tmp_path):
    saver = Saver(tmp_path, keep=2, world=World())
    for step, val_loss in enumerate([3.0, 1.0, None, 2.0, 2.5, None], start=1):
        save(saver, step, val_loss)
    saver.wait()
    assert [p.name for p in checkpoints(tmp_path)] == [f"step-0000000{k}" for k in (2, 5, 6)]
    assert best(tmp_path).name == "step-00000002"
    assert not list((tmp_path / "checkpoints").glob(".*"))
    into = {"w": torch.zeros(3), "m": torch.zeros((), dtype=torch.long)}
    read_tensors(best(tmp_path), into)
    assert into["w"].tolist() == [2, 2, 2]
    assert into["m"].item() == 2


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path):
    saver = Saver(tmp_path, keep=1, world=World())
    for step, val_loss in enumerate([float("nan"), 2.0, 1.0, float("inf")], start=1):
        save(saver, step, val_loss)
    saver.wait()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert best(tmp_path).name == "step-00000003"


def test_what_a_user_puts_beside_checkpoints_stays_there(tmp_path):
    saver = Saver(tmp_path, keep=1, world=World())
    mine = tmp_path / "checkpoints" / "step-00000008-mine"
    mine.mkdir()
    for step in (1, 2, 3):
        save(saver, step)
    saver.wait()
    assert mine.exists()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]


def test_a_damaged_old_checkpoint_does_not_stop_new_ones(tmp_path):
    saver = Saver(tmp_path, keep=3, world=World())
    for step in (1, 2):
        save(saver, step, 1.0)
        saver.wait()
    (checkpoints(tmp_path)[0] / "state.json").write_text("{")
    save(saver, 3, 2.0)
    saver.wait()
    assert best(tmp_path).name == "step-00000002"


def test_what_is_saved_is_what_was_there_when_it_was_saved(tmp_path):
    """Training goes on while the file is written."""
    saver = Saver(tmp_path, keep=1, world=World())
    w = torch.ones(1000, 1000)
    saver.save(1, {"w": w}, {}, {"step": 1, "val_loss": None})
    w.zero_()
    saver.wait()
    into = {"w": torch.zeros(1000, 1000)}
    read_tensors(checkpoints(tmp_path)[0], into)
    assert into["w"].eq(1).all()


def test_no_pickle_is_ever_loaded(data, tmp_path, monkeypatch):
    run(small(data, tmp_path, steps=4))

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was loaded")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    config = small(
        data, tmp_path, name="on", steps=4, init=tmp_path / "tiny-mgr-competitive-data-0"
    )
    run(config)
    run(config)
    files = {p.name for p in checkpoints(config.folder)[-1].iterdir()}
    assert files == {"model.safetensors", "training.safetensors", "state.json"}


def test_weights_can_be_read_by_anybody(data, tmp_path):
    config = small(data, tmp_path, steps=4, eval_every=4)
    result, *_ = run(config)
    path, state = open_run(config.folder)
    model = load_model(path, state)
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert not [name for name in stored if "_orig_mod" in name or name.startswith("module.")]
    score = evaluate(EvalConfig(config.folder, tokens=512, device="cpu", json=True))
    assert score.loss == pytest.approx(result.val.loss, rel=1e-6)


def test_resuming_with_another_architecture_is_refused(data, tmp_path):
    config = small(data, tmp_path, name="run", steps=4)
    run(config)
    before = (checkpoints(config.folder)[-1] / "model.safetensors").read_bytes()
    for changes, said in [
        ({"residual": "prenorm"}, "residual mgr-competitive -> prenorm"),
        ({"model": {"width": 48}}, "model.width 32 -> 48"),
        ({"optim": {"lr_muon": 0.5}}, "optim.lr_muon 0.02 -> 0.5"),
        ({"steps": 8}, "steps 4 -> 8"),
    ]:
        with pytest.raises(ValueError, match="is a run with other settings") as caught:
            run(small(data, tmp_path, name="run", **{"steps": 4, **changes}))
        assert said in str(caught.value)
        assert "--init" in str(caught.value)
    with pytest.raises(ValueError, match="holds a run already: give this one another --name"):
        run(small(data, tmp_path, name="run", steps=4, resume="never"))
    for changes, said in [
        ({"model": {"width": 48}}, "width 32 -> 48"),
        ({"model": {"blocks": 1}}, "blocks 2 -> 1"),
        ({"residual": "prenorm"}, "residual mgr-competitive -> prenorm"),
    ]:
        with pytest.raises(ValueError, match="is of another architecture") as caught:
            run(small(data, tmp_path, name="new", init=config.folder, **changes))
        assert said in str(caught.value)
    longer = small(data, tmp_path, name="longer", model={"context": 64}, init=config.folder)
    assert run(longer)[0].step == 12, "the context is no matter to the weights"
    assert (checkpoints(config.folder)[-1] / "model.safetensors").read_bytes() == before


def test_other_data_is_refused(data, tmp_path):
    config = small(data, tmp_path, name="run", steps=4)
    run(config)
    other = prepared(tmp_path / "other", count=80)
    with pytest.raises(ValueError, match="data"):
        run(small(other, tmp_path, name="run", steps=4))
    tokens = prepared(tmp_path / "bpe", tokenizer="bpe:300")
    with pytest.raises(ValueError, match="was trained with another tokenizer"):
        run(small(tokens, tmp_path, name="new", init=config.folder))
    with pytest.raises(ValueError, match="was trained with another tokenizer"):
        evaluate(EvalConfig(config.folder, data=tokens, device="cpu"))
    assert evaluate(EvalConfig(config.folder, data=other, device="cpu", json=True)).loss < 6


def test_a_damaged_checkpoint_is_one_sentence_and_the_one_before_is_there(data, tmp_path):
    config = small(data, tmp_path, steps=12)
    whole = losses(config)
    newest = checkpoints(config.folder)[-1]
    file = newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged .*: remove it to go on from the one"):
        run(config)
    (newest / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        run(config)
    for part in newest.iterdir():
        part.unlink()
    newest.rmdir()
    assert losses(config) == whole


def test_a_run_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint: give the folder of a run"):
        open_run(tmp_path / "nothing")


def full_disk(monkeypatch, fails):
    """Writing weights fails for the calls in `fails`, as on a full disk, half of it written."""
    calls, real = [], safetensors.torch.save_file

    def save_file(tensors, path, **kwargs):
        calls.append(path)
        real(tensors, path, **kwargs)
        if len(calls) in fails:
            path.write_bytes(path.read_bytes()[:50])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)


def test_a_full_disk_during_a_checkpoint_loses_nothing(data, tmp_path, monkeypatch):
    whole = losses(small(data, tmp_path / "whole"))
    config = small(data, tmp_path / "full")
    full_disk(monkeypatch, fails={3})  # the weights of the second checkpoint, of step 8
    result, shown, log = run(config)
    assert "warning: a checkpoint could not be written" in shown
    assert "No space left on device" in shown
    assert "the last good one is step-00000004" in shown
    assert [r["loss"] for r in log] == whole
    assert [p.name for p in checkpoints(config.folder)] == ["step-00000004", "step-00000012"]
    assert result.checkpoint.name == "step-00000012"


def test_a_full_disk_at_the_end_is_an_error_and_the_run_can_go_on(data, tmp_path, monkeypatch):
    whole = losses(small(data, tmp_path / "whole"))
    config = small(data, tmp_path / "full")
    full_disk(monkeypatch, fails={5})
    with pytest.raises(
        CheckpointError, match="the last good one is step-00000008; free some space"
    ):
        run(config)
    monkeypatch.undo()
    assert [p.name for p in checkpoints(config.folder)] == ["step-00000004", "step-00000008"]
    assert losses(config) == whole


def test_a_log_that_cannot_be_written_holds_checkpoints_back(data, tmp_path, monkeypatch):
    """On a full disk nothing of the log is lost, and no checkpoint overtakes it."""
    config = small(data, tmp_path, save_every=2, keep=9)
    write, full = Log._write, []

    def refuse(self):
        if any(f'"train", "step": {k},'.encode() in self._unwritten for k in (6, 7, 8)):
            full.append(len(self._unwritten))
            if len(full) < 12:
                os.write(self._file.fileno(), self._unwritten[:10])
                os.truncate(self.path, self.path.stat().st_size - 10)
                raise OSError(errno.ENOSPC, "No space left on device")
        write(self)

    monkeypatch.setattr(Log, "_write", refuse)
    _, shown, log = run(config)
    assert shown.count("log.jsonl cannot be written (No space left on device), trying on") == 1
    assert "there will be no checkpoint until it can" in shown
    assert [r["step"] for r in log] == list(range(1, 13))
    steps = [int(p.name[-2:]) for p in checkpoints(config.folder)]
    assert 4 in steps
    assert 6 not in steps
    assert steps[-1] == 12


def test_half_a_line_is_taken_back(tmp_path):
    log = Log(tmp_path, {}, steps=9, console=quiet())
    log.event("train", 1, loss=2.0)
    whole, file = (tmp_path / "log.jsonl").read_bytes(), log._file

    class Full:
        def write(self, data):
            return file.write(data[:7])

    log._file = Full()
    log.event("train", 2, loss=1.0)
    log.event("train", 3, loss=0.5)
    assert (tmp_path / "log.jsonl").read_bytes() == whole
    log._file = file
    log.event("train", 4, loss=0.25)
    log.close()
    assert [r["loss"] for r in read_log(tmp_path)] == [2.0, 1.0, 0.5, 0.25]


@pytest.mark.slow
def test_a_real_limit_on_the_size_of_files(data, tmp_path):
    """The kernel refuses to write past 20 kB: one sentence, exit status 1, no half checkpoint."""
    code = f"""
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
from runs import small
from multigate.config import to_table, to_toml
from multigate.__main__ import main
config = small({str(data)!r}, Path({str(tmp_path)!r}), steps=6)
file = Path({str(tmp_path / "config.toml")!r})
file.write_text(to_toml(to_table(config)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
sys.exit(main(["train", "--config", str(file)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a checkpoint could not be written to" in done.stderr
    assert "Traceback" not in done.stderr
    folder = small(data, tmp_path, steps=6).folder
    assert list((folder / "checkpoints").iterdir()) == []
    assert len(read_log(folder)) == 6


def test_a_folder_that_cannot_be_written_to(data, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="the run cannot be kept in .*: choose a folder that can be"):
        run(small(data, tmp_path / "file"))


def poison(monkeypatch, steps):
    """The gradients of these steps are NaN."""
    backward = Run._backward

    def poisoned(self, batches):
        loss = backward(self, batches)
        if self.session.step + 1 in steps:
            for p in self.model.parameters():
                p.grad.fill_(float("nan"))
            return loss * float("nan")
        return loss

    monkeypatch.setattr(Run, "_backward", poisoned)


def test_a_step_that_is_not_finite_is_left_out(data, tmp_path, monkeypatch):
    poison(monkeypatch, {3, 4, 9})
    config = small(data, tmp_path, bad_steps=3)
    result, shown, log = run(config)
    assert result.step == 12
    assert [r["step"] for r in log if r["loss"] is None] == [3, 4, 9]
    assert shown.count("not finite, the step is left out") == 3
    assert all(json.loads(line) for line in (config.folder / "log.jsonl").open())
    good = [r["loss"] for r in log if r["loss"] is not None]
    assert good[-1] < good[0]
    assert result.train_loss == pytest.approx(sum(good) / 9)


def test_amid_bad_steps_no_good_checkpoint_is_rotated_out(data, tmp_path, monkeypatch):
    config = small(data, tmp_path, bad_steps=9, steps=40, keep=1)
    poison(monkeypatch, set(range(10, 41)))
    with pytest.raises(NotFinite, match=r"the last good checkpoint is .*step-00000008; try"):
        run(config)
    assert [read_state(p)["bad"] for p in checkpoints(config.folder)] == [0]


def test_too_many_bad_steps_stop_the_run_at_its_last_good_checkpoint(data, tmp_path, monkeypatch):
    config = small(data, tmp_path, bad_steps=3, steps=30)
    poison(monkeypatch, set(range(10, 40)))
    with pytest.raises(
        NotFinite, match="not finite in 3 steps in a row up to step 12: the last good"
    ):
        run(config)
    monkeypatch.undo()
    kept = checkpoints(config.folder)
    assert read_state(kept[-1])["step"] == 8
    result, _, log = run(config)
    assert result.step == 30
    assert [r["step"] for r in log] == list(range(1, 31))
    assert all(r["loss"] is not None for r in log)


def test_too_little_held_out_text_is_said_before_training(data, tmp_path):
    config = small(data, tmp_path, model={"context": 8192}, tokens_per_step=8192)
    with pytest.raises(ValueError, match="the split 'val' has .* too few for one window of 8192"):
        run(config)
    assert not config.folder.exists()
