"""The loader: every window once an epoch, in an order that follows from the seed alone."""

import gc
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from multigate.data import Loader, PrepareConfig, open_data, prepare

CONTEXT = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 99 numbered characters; with its end of text each is a hundred tokens."""
    folder = tmp_path_factory.mktemp("loader")
    lines = [
        json.dumps({"text": "".join(chr(0x100 + (99 * d + k) % 5000) for k in range(99))})
        for d in range(40)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(
        out=folder / "data", sources=(str(folder / "a.jsonl"),), val_share=0.2, unit_mb=0.002
    )
    prepare(config, progress=print)
    return open_data(folder / "data")


@pytest.fixture
def split(data):
    return data.split("train")


def all_windows(split):
    return split.rows(range(split.windows(CONTEXT)), CONTEXT).astype(np.int64)


def take(loader, steps):
    """x with the last column of y, of some steps."""
    batches = [next(loader) for _ in range(steps)]
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert torch.equal(x[:, 1:], y[:, :-1])
    return [torch.cat([x, y[:, -1:]], 1).numpy() for x, y in batches]


def test_every_window_comes_once_in_an_epoch(split):
    assert len(split.shards) > 1
    windows = all_windows(split)
    count = len(windows)
    loader = Loader(split, CONTEXT, batch=1, seed=3)
    epochs = [np.concatenate(take(loader, count)) for _ in range(2)]
    for rows in epochs:
        assert sorted(map(bytes, rows)) == sorted(map(bytes, windows))
        assert not np.array_equal(rows, windows)
    assert not np.array_equal(*epochs)


def test_the_order_follows_from_the_seed(split):
    orders = [np.concatenate(take(Loader(split, CONTEXT, 4, seed=s), 10)) for s in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_the_order_is_the_one_written_down(split):
    """Raw bits of PCG64 seeded with [seed, epoch], sorted: so that no version changes it."""
    windows = all_windows(split)
    loader = Loader(split, CONTEXT, batch=len(windows), seed=7)
    for epoch in range(2):
        bits = np.random.PCG64([7, epoch]).random_raw(len(windows))
        assert np.array_equal(take(loader, 1)[0], windows[np.argsort(bits)])


def test_a_batch_may_be_larger_than_an_epoch_and_cross_epochs(split):
    count = split.windows(CONTEXT)
    one = np.concatenate(take(Loader(split, CONTEXT, 1), 5 * count))
    large = np.concatenate(take(Loader(split, CONTEXT, 2 * count + 1), 2))
    assert np.array_equal(large, one[: len(large)])


@pytest.mark.parametrize("world", [2, 3, 6])
def test_a_step_does_not_depend_on_the_number_of_processes(split, world):
    alone = take(Loader(split, CONTEXT, 6, seed=1), 30)
    ranks = [take(Loader(split, CONTEXT, 6, 1, rank, world), 30) for rank in range(world)]
    for step, whole in enumerate(alone):
        assert np.array_equal(np.concatenate([rows[step] for rows in ranks]), whole)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetching_changes_nothing(split, prefetch):
    plain = take(Loader(split, CONTEXT, 4, prefetch=0), 20)
    loader = Loader(split, CONTEXT, 4, prefetch=prefetch)
    for k, rows in enumerate(plain):
        assert loader.position == 4 * k
        assert np.array_equal(take(loader, 1)[0], rows)


@pytest.mark.parametrize("steps", [0, 1, 7, 60])
def test_going_on_from_a_state_is_exact(split, steps):
    whole = take(Loader(split, CONTEXT, 4, seed=2), steps + 10)
    first = Loader(split, CONTEXT, 4, seed=2)
    take(first, steps)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] == 4 * steps
    second = Loader(split, CONTEXT, 4, seed=2)
    take(second, 3)
    second.load_state_dict(state)
    assert np.array_equal(np.concatenate(take(second, 10)), np.concatenate(whole[steps:]))


def test_going_on_with_another_batch_and_number_of_processes(split):
    whole = np.concatenate(take(Loader(split, CONTEXT, 1), 32))
    first = Loader(split, CONTEXT, 8)
    take(first, 2)
    second = Loader(split, CONTEXT, 4, rank=1, world=2)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(np.concatenate(take(second, 2)), whole[[18, 19, 22, 23]])


def test_the_epoch(split):
    count = split.windows(CONTEXT)
    loader = Loader(split, CONTEXT, 2)
    seen = []
    for _ in range(count):
        seen.append(loader.epoch)
        next(loader)
    assert seen == [2 * k // count for k in range(count)]
    assert loader.epoch == 2


def test_sentences(data, split):
    with pytest.raises(ValueError, match="a batch of 8 windows cannot be shared equally by 3 proc"):
        Loader(split, CONTEXT, 8, world=3)
    with pytest.raises(ValueError, match="a batch of 0 windows"):
        Loader(split, CONTEXT, 0)
    with pytest.raises(ValueError, match="rank 2 does not exist among 2 processes"):
        Loader(split, CONTEXT, 8, rank=2, world=2)
    with pytest.raises(ValueError, match="seed of a loader must not be negative, got -1"):
        Loader(split, CONTEXT, 8, seed=-1)
    with pytest.raises(ValueError, match=r"too few for one window of 100000 \+ 1"):
        Loader(split, 100000, 8)
    state = Loader(split, CONTEXT, 8).state_dict()
    for loader, sentence in (
        (Loader(split, CONTEXT, 8, seed=1), r"begun with another seed \(0, now 1\)"),
        (Loader(split, CONTEXT - 1, 8), r"begun with another context \(16, now 15\)"),
        (Loader(data.split("val"), CONTEXT, 8), "begun with another split .'train', now 'val'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            loader.load_state_dict(state)
        assert loader.position == 0
    with pytest.raises(ValueError, match="begun with other data .'x', now"):
        Loader(split, CONTEXT, 8).load_state_dict({**state, "fingerprint": "x"})


def test_an_error_in_the_thread_comes_out_of_next_and_nothing_is_lost(split, monkeypatch):
    whole = take(Loader(split, CONTEXT, 4), 6)
    loader = Loader(split, CONTEXT, 4)
    take(loader, 2)
    loader.load_state_dict(loader.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(split, "rows", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                next(loader)
            assert loader.position == 8
    assert np.array_equal(np.concatenate(take(loader, 4)), np.concatenate(whole[2:]))


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("loader")]


def test_the_thread_ends(split):
    gc.collect()
    before = len(loader_threads())
    loader = Loader(split, CONTEXT, 4)
    next(loader)
    assert len(loader_threads()) == before + 1
    loader.close()
    assert len(loader_threads()) == before
    with pytest.raises(RuntimeError):
        next(loader)


def test_the_interpreter_ends_with_a_loader_at_work(data):
    code = f"""
from multigate.data import Loader, open_data
loader = Loader(open_data({str(data.folder)!r}).split("train"), {CONTEXT}, 4)
print(next(loader)[0].shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "[4, 16]" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4"])
def test_batches_on_the_gpu(split, monkeypatch, dtype):
    """The same as on the CPU, while many copies are in flight, ids with the highest bit set."""
    top = np.array(2 ** (8 * np.dtype(dtype).itemsize) - 256, dtype=dtype)
    monkeypatch.setattr(split, "shards", [s.astype(dtype) + top for s in split.shards])
    monkeypatch.setattr(split, "dtype", np.dtype(dtype))
    expected = np.concatenate(take(Loader(split, CONTEXT, 16), 200))
    loader = Loader(split, CONTEXT, 16, device="cuda")
    torch.cuda._sleep(10**8)
    batches = [next(loader) for _ in range(200)]
    rows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches])
    assert rows.device.type == "cuda"
    assert np.array_equal(rows.cpu().numpy(), expected)
