"""The small trainer, the text it reads, and what it is measured with."""

import math

import numpy as np
import pytest
import torch

import multigate as mg
from multigate.data import byte_corpus, stdlib_files, windows
from multigate.evals import bits_per_byte, order1_bits_per_byte
from multigate.generate import generate
from multigate.train import TrainConfig, learning_rate, optimizer_for, train


def small(residual="mgr-competitive", **changes):
    torch.manual_seed(0)
    sizes = {"blocks": 2, "width": 32, "heads": 2, "context": 32, **changes}
    return mg.GPT(mg.preset("tiny", residual=residual, **sizes))


def text(pattern=b"the quick brown fox jumps over the lazy dog. ", repeats=200):
    return np.frombuffer(pattern * repeats, dtype=np.uint8)


@pytest.mark.parametrize("residual", mg.residual_names())
def test_every_residual_learns_a_repeating_text(residual):
    """From 8 bits a byte to under half a bit in 80 steps."""
    model = small(residual)
    before = bits_per_byte(model, text())
    train(model, text(), TrainConfig(steps=80, batch=8, warmup=10, lr=1e-2))
    assert before == pytest.approx(8, abs=0.2)
    assert bits_per_byte(model, text()) < 0.5


def test_training_is_reproducible_and_follows_the_seed():
    def losses(seed):
        seen = []
        config = TrainConfig(steps=5, batch=2, seed=seed)
        train(small(), text(), config, lambda p: seen.append((p.step, p.loss)))
        return seen

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)
    assert [step for step, _ in losses(0)] == list(range(5))


def test_the_schedule_at_its_corners():
    config = TrainConfig(steps=1000, warmup=100, lr=1.0)
    assert learning_rate(0, config) == pytest.approx(1 / 101)
    assert learning_rate(99, config) == pytest.approx(100 / 101)
    assert learning_rate(100, config) == pytest.approx(1.0)
    assert learning_rate(550, config) == pytest.approx(0.55)
    assert learning_rate(1000, config) == pytest.approx(0.1)


@pytest.mark.parametrize("residual", mg.residual_names())
def test_gates_queries_biases_and_norms_are_not_decayed(residual):
    model = small(residual)
    decayed, others = optimizer_for(model, TrainConfig()).param_groups
    assert decayed["weight_decay"] > 0
    assert others["weight_decay"] == 0
    names = {id(p): n for n, p in model.named_parameters()}
    free = {names[id(p)] for p in others["params"]}
    for name, p in model.named_parameters():
        ending = name.split(".")[-1]
        if p.ndim < 2 or ending in ("w1", "w2", "b1", "query", "gain", "bias"):
            assert name in free
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    static = {n for n in names.values() if n.endswith(".mix")}
    assert static <= free, "hyper-connections' static mixing matrix must not decay"


def test_windows_are_text_and_its_next_bytes():
    tokens = np.arange(100, dtype=np.uint8)
    x, y = windows(tokens, 10, 64, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (64, 10)
    assert torch.equal(y, x + 1)
    assert torch.equal(x[:, 1:], x[:, :-1] + 1)
    assert len(x[:, 0].unique()) > 20
    assert x[:, 0].min() >= 0
    assert y.max() <= 99


def test_the_corpus_is_this_pythons_own_source():
    train_text, val_text = byte_corpus()
    assert len(train_text) > 3_000_000
    assert 0.01 < len(val_text) / len(train_text) < 0.15
    files = stdlib_files()
    assert any(f.name == "argparse.py" for f in files)
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)
    whole = bytes(train_text) + bytes(val_text)
    assert b"class ArgumentParser" in whole
    assert whole.count(b"\0") >= len(files)
    again, _ = byte_corpus()
    assert np.array_equal(train_text, again)


def test_the_split_is_by_file(tmp_path):
    for k in range(60):
        (tmp_path / f"m{k}.py").write_text(f"# file {k}\n" * 5)
    train_text, val_text = byte_corpus(tmp_path, val_share=0.3)
    pieces = [set(bytes(t).split(b"\0")) - {b""} for t in (train_text, val_text)]
    assert len(pieces[0]) + len(pieces[1]) == 60
    assert not pieces[0] & pieces[1]
    (tmp_path / "new.py").write_text("# one more\n")
    later, _ = byte_corpus(tmp_path, val_share=0.3)
    assert set(bytes(later).split(b"\0")) >= pieces[0]


def test_too_little_text_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no .py file"):
        byte_corpus(tmp_path)
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(ValueError, match="too small to split"):
        byte_corpus(tmp_path)
    with pytest.raises(ValueError, match="too few for windows of 10"):
        windows(np.arange(10), 10, 1, torch.Generator())
    with pytest.raises(ValueError, match="too few for one window of 32"):
        bits_per_byte(small(), np.arange(20))


def test_order_1_counts():
    """On 'abab...': after a comes b for certain, up to the added counts."""
    tokens = np.frombuffer(b"ab" * 500, dtype=np.uint8)
    expected = -math.log2((500 + 1) / (500 + 256))
    assert order1_bits_per_byte(tokens, tokens[:200], 50) == pytest.approx(expected, abs=0.01)
    uniform = order1_bits_per_byte(tokens, np.frombuffer(b"zq" * 50, dtype=np.uint8), 50)
    assert uniform == pytest.approx(8.0)


def test_bits_per_byte_is_the_mean_over_all_windows():
    model = small()
    tokens = text()[: 32 * 5 + 1]
    rows = torch.from_numpy(tokens.astype(np.int64))
    nats = [
        model(rows[None, k : k + 32], rows[None, k + 1 : k + 33]).item() for k in range(0, 160, 32)
    ]
    expected = sum(nats) / 5 / math.log(2)
    assert bits_per_byte(model, tokens, batch=2) == pytest.approx(expected, rel=1e-6)
    # With fewer windows than the text has, they are spread from its beginning to its end.
    ends = (nats[0] + nats[4]) / 2 / math.log(2)
    assert bits_per_byte(model, tokens, most=64) == pytest.approx(ends, rel=1e-6)


def test_generate_greedily_is_the_argmax_one_by_one():
    model = small(context=8)
    prompt = torch.randint(256, (2, 3))
    out = generate(model, prompt, 10, temperature=0)
    assert torch.equal(out[:, :3], prompt)
    for k in range(3, 13):
        logits = model(out[:, max(0, k - 8) : k])
        assert torch.equal(out[:, k], logits[:, -1].argmax(-1))


def test_generate_follows_its_generator_and_temperature():
    model = small()
    prompt = torch.zeros(1, 2, dtype=torch.long)

    def draw(seed, temperature=1.0):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, 12, temperature, generator).tolist()

    assert draw(0) == draw(0) != draw(1)
    assert draw(0, 1e-4) == generate(model, prompt, 12, temperature=0).tolist()
    with pytest.raises(ValueError, match="must not be negative"):
        generate(model, prompt, 1, temperature=-1)
    with pytest.raises(ValueError, match="prompt of shape"):
        generate(model, prompt[:, :0], 1)
