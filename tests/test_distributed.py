"""Many processes give what one gives: DDP and FSDP2 by torchrun, on CPUs."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from multigate.checkpoint import checkpoints, open_run, read_tensors
from multigate.config import to_table, to_toml
from multigate.evaluate import EvalConfig, evaluate, load_model
from multigate.log import read_log
from runs import numbers, run, small, wait_for_step

pytestmark = pytest.mark.slow


def torchrun(config, folder, processes=2, before=""):
    """The run as processes of torchrun, each after the Python of `before`."""
    folder.mkdir(parents=True, exist_ok=True)
    file, script = folder / "config.toml", folder / "script.py"
    file.write_text(to_toml(to_table(config)))
    script.write_text(
        f"{before}\nimport sys\nfrom multigate.__main__ import main\nsys.exit(main())"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launch, str(script), "train", "--config", str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process, timeout=240):
    try:
        shown, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, shown
    return shown


def values(config, key):
    return [record[key] for record in read_log(config.folder)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("residual", ["mgr-competitive", "mhc", "highway"])
def test_two_processes_reach_the_losses_of_one(parallel, residual, data, tmp_path):
    settings = {"steps": 20, "tokens_per_step": 256, "micro_batch": 2, "residual": residual}
    settings |= {"parallel": parallel, "eval_every": 10, "save_every": 10}
    one, two = (small(data, tmp_path / n, **settings) for n in ("one", "two"))
    run(one)
    shown = finished(torchrun(two, tmp_path))
    assert "step 256 tokens = processes 2 x micro-batches 2 x windows 2 x tokens 32" in shown
    assert shown.count("train loss") == 1, "one process speaks"
    assert values(two, "step") == list(range(1, 21))
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=1e-5)
    assert values(two, "grad_norm") == pytest.approx(values(one, "grad_norm"), rel=1e-4)
    vals = [[r["loss"] for r in read_log(c.folder, "val")] for c in (one, two)]
    assert vals[1] == pytest.approx(vals[0], abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_with_kernels_reach_the_losses_of_one_without(
    parallel, data, tmp_path, monkeypatch
):
    settings = {"steps": 4, "tokens_per_step": 128, "micro_batch": 2, "parallel": parallel}
    one, two = (small(data, tmp_path / n, **settings) for n in ("one", "two"))
    run(one)
    monkeypatch.setenv("MULTIGATE_BACKEND", "triton")
    shown = finished(torchrun(two, tmp_path))
    assert shown.count("gate_pool by triton: fused kernels can run here") == 1
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=1e-5)
    assert values(two, "grad_norm") == pytest.approx(values(one, "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(("parallel", "memory"), [("ddp", "exact"), ("fsdp", "recompute")])
def test_two_processes_with_fewer_streams_kept(parallel, memory, data, tmp_path):
    settings = {"steps": 4, "tokens_per_step": 256, "micro_batch": 2, "parallel": parallel}
    one, two = (small(data, tmp_path / n, **settings) for n in ("one", "two"))
    run(one)
    finished(torchrun(replace(two, model=replace(two.model, memory=memory)), tmp_path))
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=1e-5)
    assert values(two, "grad_norm") == pytest.approx(values(one, "grad_norm"), rel=1e-4)


THREADS = """
import atexit, pathlib
def show_threads():
    threads = pathlib.Path("/proc/self/task").glob("*/comm")
    print("at the end:", *(p.read_text().strip() for p in threads))
atexit.register(show_threads)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_no_thread_of_a_process_group_outlives_python(parallel, data, tmp_path):
    config = small(data, tmp_path / "run", steps=2, parallel=parallel)
    shown = finished(torchrun(config, tmp_path, before=THREADS))
    assert shown.count("at the end:") == 2
    assert "gloo" not in shown


LATE = """
import sys, time, torch
from multigate import distributed

sys.setswitchinterval(1000)
with distributed.join("cpu") as world:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if world.first:
        time.sleep(3)
    torch.distributed.all_reduce(torch.ones(8), async_op=True)
del model
print("went on")
"""


def test_a_model_may_go_while_a_thread_of_its_group_still_holds_a_tensor(tmp_path):
    """The second process leaves at once; what it sends is received three seconds later."""
    (tmp_path / "late.py").write_text(LATE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(tmp_path / "late.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shown = finished(subprocess.Popen(command, env=environment, **pipe), timeout=100)
    assert shown.count("went on") == 2


def forget(config, step):
    """Remove the checkpoints after `step`."""
    for path in checkpoints(config.folder):
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)


@pytest.mark.parametrize(("before", "after"), [("ddp", 1), ("fsdp", 1), (1, "fsdp")])
def test_a_checkpoint_goes_on_with_another_number_of_processes(before, after, data, tmp_path):
    """Eight steps by some processes and the next twelve by others are one process's twenty."""
    settings = {"steps": 20, "tokens_per_step": 256, "micro_batch": 2, "save_every": 8, "keep": 9}
    whole = small(data, tmp_path / "whole", **settings)
    run(whole)
    for parallel in (before, after):
        if parallel == 1:
            parts = small(data, tmp_path / "parts", **settings)
            shown = run(parts)[1]
        else:
            parts = small(data, tmp_path / "parts", parallel=parallel, **settings)
            shown = finished(torchrun(parts, tmp_path))
        if parallel == before:
            sharded = list(checkpoints(parts.folder)[0].glob("shard-*.safetensors"))
            assert len(sharded) == (2 if before == "fsdp" else 0)
            forget(parts, 8)
    assert "going on from step-00000008" in shown
    assert values(parts, "step") == list(range(1, 21))
    assert values(parts, "loss") == pytest.approx(values(whole, "loss"), abs=1e-5)
    files = [p.suffix for p in (parts.folder / "checkpoints").rglob("*") if p.is_file()]
    assert set(files) == {".safetensors", ".json"}, "nothing that could be a pickle"
    a, b = (load_model(*open_run(c.folder, "last")) for c in (whole, parts))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)


FULL_DISK = """
import os
from torch.distributed.checkpoint.filesystem import FileSystemWriter
write, calls = FileSystemWriter._write_data, []
def refuse(self, *arguments):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        raise OSError(28, "No space left on device")
    return write(self, *arguments)
FileSystemWriter._write_data = refuse
"""


def test_a_full_disk_under_one_process_loses_nothing(data, tmp_path):
    """The second of three sharded checkpoints fails on one process: all warn and go on."""
    config = small(data, tmp_path, parallel="fsdp", keep=9)
    shown = finished(torchrun(config, tmp_path, before=FULL_DISK))
    assert "warning: a checkpoint could not be written" in shown
    assert "No space left on device): the last good one is step-00000004" in shown
    assert [p.name for p in checkpoints(config.folder)] == ["step-00000004", "step-00000012"]
    assert not list((config.folder / "checkpoints").glob(".*"))
    assert values(config, "step") == list(range(1, 13))


NOT_FINITE = """
import os
from multigate.train import Run
backward = Run._backward
def poisoned(self, batches):
    loss = backward(self, batches)
    return loss * float("nan") if os.environ["RANK"] == "1" and self.session.step == 4 else loss
Run._backward = poisoned
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_loss_that_is_not_finite_in_one_process_is_left_out_by_all(parallel, data, tmp_path):
    config = small(data, tmp_path, parallel=parallel, steps=8)
    shown = finished(torchrun(config, tmp_path, before=NOT_FINITE))
    assert shown.count("not finite, the step is left out") == 1
    losses = values(config, "loss")
    assert losses[4] is None
    assert all(loss is not None for k, loss in enumerate(losses) if k != 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16"},
        {"checkpoint_activations": True, "model": {"attention": "moda-ffn"}},
    ],
)
def test_sharded_in_other_ways(settings, data, tmp_path):
    settings = {"steps": 8, "tokens_per_step": 256, "micro_batch": 2, **settings}
    one = small(data, tmp_path / "one", **settings)
    run(one)
    two = small(data, tmp_path / "two", parallel="fsdp", **settings)
    finished(torchrun(two, tmp_path))
    assert values(two, "loss") == pytest.approx(values(one, "loss"), abs=1e-3)


def test_a_sharded_checkpoint_can_be_evaluated(data, tmp_path):
    config = small(data, tmp_path, parallel="fsdp", steps=10, eval_every=10, eval_tokens=4096)
    finished(torchrun(config, tmp_path))
    (val,) = read_log(config.folder, "val")
    score = evaluate(EvalConfig(config.folder, tokens=4096, device="cpu", json=True))
    assert score.loss == pytest.approx(val["loss"], abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_signal_to_torchrun_saves_and_ends(parallel, data, tmp_path):
    settings = {"steps": 5000, "tokens_per_step": 256, "micro_batch": 4, "parallel": parallel}
    config = small(data, tmp_path, eval_every=5000, save_every=5000, **settings)
    process = torchrun(config, tmp_path)
    wait_for_step(process, config, 5)
    process.send_signal(signal.SIGTERM)
    shown, _ = process.communicate(timeout=120)
    step = len(read_log(config.folder))
    assert f"stopped by SIGTERM after step {step}, which is saved" in shown
    assert [p.name for p in checkpoints(config.folder)] == [f"step-{step:08d}"]


def test_one_sharded_process_is_one_process(data, tmp_path):
    one = small(data, tmp_path / "one")
    run(one)
    sharded = small(data, tmp_path / "sharded", parallel="fsdp")
    finished(torchrun(sharded, tmp_path, processes=1))
    assert values(sharded, "loss") == pytest.approx(values(one, "loss"), abs=1e-6)
    assert numbers(read_log(sharded.folder))[0]["lr_muon"] == read_log(one.folder)[0]["lr_muon"]


def test_steps_that_two_processes_cannot_share(data, tmp_path):
    config = small(data, tmp_path, tokens_per_step=96)
    process = torchrun(config, tmp_path)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "multigate: tokens_per_step 96 is no multiple of 32 tokens of context times 2" in shown


def test_reading_tensors_checks_names_first(data, tmp_path):
    config = small(data, tmp_path, steps=2)
    run(config)
    path, _ = open_run(config.folder)
    with pytest.raises(ValueError, match="has no 'unknown'"):
        read_tensors(path, {"unknown": torch.zeros(1)})
