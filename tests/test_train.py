"""The training loop: what is learned, what is logged, and what makes no difference to either."""

import json
import math
import re
import shutil

import pytest
import torch

import multigate as mg
from multigate.checkpoint import checkpoints, open_run
from multigate.config import resolve
from multigate.data import open_data
from multigate.distributed import World
from multigate.evals import Score, _batches, evaluate
from multigate.evaluate import load_model
from multigate.log import read_log
from runs import losses, prepared, run, small, write_documents


@pytest.mark.parametrize("residual", mg.residual_names())
def test_every_residual_learns(residual, data, tmp_path):
    """From 8 bits a byte to under 2.5 in 60 steps, on text of 33 words."""
    rates = {"lr_muon": 0.05, "lr_adamw": 0.02}
    config = small(
        *(data, tmp_path, None, rates),
        residual=residual,
        steps=60,
        tokens_per_step=512,
        eval_every=60,
    )
    result, _, log = run(config)
    assert log[0]["loss"] / math.log(2) == pytest.approx(8, abs=0.3)
    assert result.val.bits_per_byte < 2.5
    assert result.train_loss == pytest.approx(sum(r["loss"] for r in log) / 60)


def test_training_is_reproducible_and_follows_the_seed(data, tmp_path):
    first = losses(small(data, tmp_path / "a"))
    assert first == losses(small(data, tmp_path / "b"))
    assert first != losses(small(data, tmp_path / "c", seed=1))


def test_how_a_step_is_cut_up_is_no_matter(data, tmp_path):
    whole = losses(small(data, tmp_path / "4", micro_batch=4))
    for micro in (1, 2):
        cut = losses(small(data, tmp_path / str(micro), micro_batch=micro))
        assert cut == pytest.approx(whole, abs=1e-5)
        assert cut != whole


@pytest.mark.parametrize("attention", ["plain", "moda-ffn"])
def test_recomputed_activations_are_no_matter(attention, data, tmp_path):
    model = {"attention": attention}
    kept = losses(small(data, tmp_path / "kept", model=model, steps=6))
    again = small(data, tmp_path / "again", model=model, steps=6, checkpoint_activations=True)
    assert losses(again) == pytest.approx(kept, abs=1e-6)


GATED = {"streams": 2, "blocks": 4}
"""Seven gated steps: enough for chains of them."""


@pytest.mark.parametrize("memory", ["recompute", "invert", "exact"])
def test_memory_modes_train_alike(memory, data, tmp_path):
    """To the bit where the streams come back exactly, also with checkpointed sublayers."""
    # After six steps inversion is not seen yet in the last bit of a loss.
    settings = {"steps": 12, "micro_batch": 2}
    kept = losses(small(data, tmp_path / "store", GATED, **settings))
    for again in (False, True):
        config = small(
            *(data, tmp_path / str(again), {**GATED, "memory": memory}),
            checkpoint_activations=again,
            **settings,
        )
        _, shown, log = run(config)
        assert f"model tiny, mgr-competitive, memory {memory}: " in shown
        found = [record["loss"] for record in log]
        assert found == pytest.approx(kept, abs=1e-4)
        assert (found == kept) == (memory != "invert")


def test_going_on_in_another_memory_mode(data, tmp_path):
    """Also from a checkpoint that is older than the modes; and eval reads what comes of it."""
    whole = losses(small(data, tmp_path / "whole", GATED))
    config = small(data, tmp_path / "parts", GATED)
    run(config)
    for later in checkpoints(config.folder)[1:]:
        shutil.rmtree(later)
    path = checkpoints(config.folder)[0] / "state.json"
    state = json.loads(path.read_text())
    del state["config"]["model"]["memory"], state["model"]["memory"]
    path.write_text(json.dumps(state))
    mode = {**GATED, "memory": "recompute", "residual_options": {"every": 2}}
    _, shown, log = run(small(data, tmp_path / "parts", mode))
    assert "going on from step-" in shown
    assert [record["loss"] for record in log] == whole
    assert load_model(*open_run(config.folder)).config.memory == "recompute"
    begun = small(data, tmp_path / "begun", GATED, init=config.folder, steps=2)
    assert run(begun)[0].step == 2


def test_a_mode_that_a_residual_has_not_is_said_before_text_is_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small("stdlib", tmp_path, {"memory": "exact"}, residual="hc")
    with pytest.raises(ValueError, match="unknown option of hc 'memory'"):
        run(config)
    assert list(tmp_path.iterdir()) == []


def test_what_exact_could_not_keep_is_said(data, tmp_path, monkeypatch):
    forward = mg.GPT.forward

    def losing(self, *args):
        self.stack.residual.lost += 1000
        return forward(self, *args)

    _, shown, _ = run(small(data, tmp_path / "a", {"memory": "exact"}, steps=2))
    assert "found no room" not in shown
    monkeypatch.setattr(mg.GPT, "forward", losing)
    _, shown, _ = run(small(data, tmp_path / "b", {"memory": "exact"}, steps=2))
    assert re.search(r"memory exact: \d+,000 elements found no room and came back inexact", shown)


@pytest.mark.parametrize("residual", mg.residual_names())
def test_checkpointing_gives_the_same_gradients(residual):
    torch.manual_seed(0)
    model = mg.GPT(mg.preset("tiny", blocks=2, width=32, heads=2, context=16, residual=residual))
    tokens = torch.randint(256, (2, 17))
    gradients = []
    for model.stack.checkpointing in (False, True):
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-6, atol=1e-8)


def test_checkpointing_keeps_fewer_activations():
    model = mg.GPT(mg.preset("tiny", residual="prenorm"))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    sizes = []
    for model.stack.checkpointing in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            model(tokens, tokens)
        sizes.append(sum(saved))
    assert sizes[1] < 0.6 * sizes[0]


def test_the_log(data, tmp_path):
    config = small(data, tmp_path)
    result, shown, log = run(config)
    assert [r["step"] for r in log] == list(range(1, 13))
    assert [r["tokens"] for r in log] == [128 * k for k in range(1, 13)]
    peak = config.optim.lr_muon
    assert log[0]["lr_muon"] == pytest.approx(peak / 4)
    assert log[3]["lr_muon"] == pytest.approx(peak)
    assert log[-1]["lr_adamw"] / config.optim.lr_adamw == pytest.approx(log[-1]["lr_muon"] / peak)
    assert all(r["grad_norm"] > 0 and r["tokens_per_second"] > 0 for r in log)
    val = read_log(config.folder, "val")
    assert [r["step"] for r in val] == [6, 12]
    assert val[-1]["loss"] == result.val.loss
    assert 0 < val[-1]["gate_mean"] < val[-1]["gate_max"] < 1
    assert f"val loss {result.val.loss:.4f}" in shown
    assert f"train loss {result.train_loss:.4f}, the mean of the last 12 steps" in shown
    for part in ("step 12/12", "tok/s", "mem ", "GiB", "gate mean/max 0.", "ETA 0:00"):
        assert part in shown
    assert [r["step"] for r in read_log(config.folder, "checkpoint")] == [4, 8, 12]


def test_the_moving_average_is_over_the_last_200_steps(data, tmp_path):
    """One block, so that 210 steps take no time."""
    config = small(data, tmp_path, model={"blocks": 1, "width": 8, "heads": 1}, steps=210)
    result, shown, log = run(config)
    assert result.train_loss == pytest.approx(sum(r["loss"] for r in log[10:]) / 200)
    assert "the mean of the last 200 steps" in shown


def test_a_residual_without_gates_shows_none(data, tmp_path):
    config = small(data, tmp_path, residual="prenorm")
    _, shown, _ = run(config)
    assert "gate mean" not in shown
    assert "gate_mean" not in read_log(config.folder, "val")[0]


def test_the_resolved_configuration_is_written_beside_the_checkpoints(data, tmp_path):
    config = small(data, tmp_path, residual="hc", model={"streams": 2})
    run(config)
    assert resolve(None, [config.folder / "config.toml"]) == config
    state = json.loads((checkpoints(config.folder)[-1] / "state.json").read_text())
    assert state["config"]["residual"] == "hc"
    assert state["model"]["streams"] == 2


def test_evaluation_reads_every_token_once(data, tmp_path):
    """Against the loss of one token at a time, over the whole split."""
    config = small(data, tmp_path, steps=2)
    run(config)
    model = load_model(*open_run(config.folder))
    split = open_data(data).split("val")
    (shard,) = split.shards
    tokens = torch.from_numpy(shard.astype("int64"))
    nats = 0.0
    for begin in range(0, len(tokens) - 1, 32):
        x = tokens[begin : begin + 32][: len(tokens) - 1 - begin]
        logits = model(x[None])[0]
        picked = logits.log_softmax(-1).gather(1, tokens[begin + 1 : begin + 1 + len(x), None])
        nats -= picked.double().sum().item()
    score = evaluate(model, split, batch=7)
    assert score.tokens == len(tokens) - 1
    assert score.loss == pytest.approx(nats / score.tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    ratio = split.tokens / split.bytes
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2) * ratio)
    part = evaluate(model, split, batch=4, most=10 * 32)
    assert part.tokens == 320
    assert part.loss == pytest.approx(score.loss, abs=0.2)


def test_the_held_out_windows_do_not_depend_on_the_number_of_processes(data):
    """And every process is called equally often, as sharded models have to be."""
    split = open_data(data).split("val")
    alone = [rows for rows, _ in _batches(split, 32, 4, 31 * 32, World())]
    assert sum(len(rows) for rows in alone) == 31
    for size in (2, 3, 4, 40):
        shared = [list(_batches(split, 32, 4, 31 * 32, World(r, size))) for r in range(size)]
        assert len({len(batches) for batches in shared}) == 1
        counted = [rows for batches in shared for rows, counts in batches if counts]
        together = torch.cat(counted)
        assert len(together) == 31
        assert sorted(together.tolist()) == sorted(torch.cat(alone).tolist())


def test_what_one_process_repeats_to_keep_in_step_is_not_counted(data, tmp_path, monkeypatch):
    """The sums of 40 processes over 31 windows are those of one."""
    config = small(data, tmp_path, steps=2)
    run(config)
    model = load_model(*open_run(config.folder))
    split = open_data(data).split("val")
    alone = evaluate(model, split, batch=4, most=31 * 32)
    sums = []

    def reduce(total):
        sums.append(total.clone())
        total.fill_(1)

    monkeypatch.setattr("multigate.evals.dist.all_reduce", reduce)
    for rank in range(40):
        evaluate(model, split, 4, 31 * 32, world=World(rank, 40))
    nats, tokens = torch.stack(sums).sum(0).tolist()
    assert tokens == alone.tokens == 31 * 32
    assert nats / tokens == pytest.approx(alone.loss, rel=1e-6)


def test_a_hopeless_loss_has_a_perplexity(tmp_path):
    assert Score(1000.0, 1, 1.0).perplexity == math.inf


def test_without_muon_its_rate_is_not_logged(data, tmp_path):
    _, _, log = run(small(data, tmp_path, optim={"muon": False}, steps=3))
    assert "lr_muon" not in log[0]
    assert log[0]["lr_adamw"] > 0


def test_new_training_from_a_runs_weights(data, tmp_path):
    first, *_ = run(small(data, tmp_path, name="first", steps=40, eval_every=40))
    fresh = losses(small(data, tmp_path, name="fresh", steps=2))
    config = small(data, tmp_path, name="second", steps=2, init=tmp_path / "first", seed=5)
    begun = losses(config)
    assert begun[0] < fresh[0] - 2
    assert begun[0] == pytest.approx(first.val.loss, abs=0.3)
    assert losses(config) == begun, "going on with a finished run changes nothing"


def test_text_is_prepared_when_it_has_to_be(tmp_path, monkeypatch):
    """One command from a folder of text to a model."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "essays", count=400)
    config = small("essays", tmp_path / "runs", steps=2, residual="prenorm")
    _, shown, _ = run(config)
    assert "essays is prepared into data/essays-bytes first" in shown
    assert (tmp_path / "data/essays-bytes/data.json").exists()
    assert config.folder == tmp_path / "runs/tiny-prenorm-essays-0"
    _, shown, _ = run(small("essays", tmp_path / "more", steps=2))
    assert "is prepared" not in shown


def test_a_bpe_of_its_own(tmp_path):
    data = prepared(tmp_path, tokenizer="bpe:300")
    result, _, log = run(small(data, tmp_path / "runs", eval_every=12))
    assert log[0]["loss"] == pytest.approx(math.log(384), abs=0.3)
    split_ratio = result.val.bits_per_byte * math.log(2) / result.val.loss
    assert 0.1 < split_ratio < 0.6, "a token stands for several bytes"


def test_float16_trains_with_a_scaled_loss(data, tmp_path):
    exact = losses(small(data, tmp_path / "32", steps=8))
    scaled = losses(small(data, tmp_path / "16", steps=8, precision="fp16"))
    assert scaled == pytest.approx(exact, abs=0.02)
    assert scaled != exact


def test_bfloat16_trains(data, tmp_path):
    exact = losses(small(data, tmp_path / "32", steps=8))
    rounded = losses(small(data, tmp_path / "16", steps=8, precision="bf16"))
    assert rounded == pytest.approx(exact, abs=0.1)
    assert rounded != exact


def test_tensorboard_and_wandb_get_the_same_numbers(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = small(data, tmp_path, log=("tensorboard", "wandb"))
    _, _, log = run(config)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.folder / "tensorboard")).Reload()
    written = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert written == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in log]
    assert len(events.Scalars("val/loss")) == 2
    assert list((config.folder / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("missing", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_one_sentence(missing, data, tmp_path, monkeypatch):
    import sys

    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install 'multigate\[track\]'"):
        run(small(data, tmp_path, log=(missing,)))
