"""`multigate sample`: what it shows is what the run generates, and no character is broken."""

import io
import json
import random
import shutil
import sys

import pytest
import tokenizers
import torch

import multigate as mg
from multigate.__main__ import main
from multigate.checkpoint import open_run
from multigate.data import open_data
from multigate.data.bpe import JsonTokenizer
from multigate.data.tokenizer import ByteTokenizer, make_tokenizer
from multigate.evaluate import load_model
from multigate.sample import Continuation, SampleConfig, Screen, sample
from runs import document, prepared, run, small

MIXED = "na\u00efve \u20ac5, \u65e5\u672c\u8a9e, \U0001d11e and e\u0301\n"
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run over bytes, with a context of 32."""
    config = small(data, tmp_path_factory.mktemp("runs"), name="bytes")
    run(config)
    return config.folder


@pytest.fixture(scope="module")
def trained_bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    config = small(prepared(folder, "bpe:300"), folder / "runs", name="bpe")
    run(config)
    return config.folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


def feed(tokenizer, prompt, ids, stop=()):
    """Every piece of text that `ids` give, and the row itself."""
    row, pieces = Continuation(tokenizer, prompt, stop), []
    for token in ids:
        if row.ended:
            break
        pieces.append(row.add(int(token)))
    if not row.ended:
        pieces.append(row.end())
    assert "".join(pieces) == row.text
    return pieces, row


def bpe():
    return make_tokenizer("bpe:280", lambda: [document(n) for n in range(1, 20)])


@pytest.mark.parametrize("make", [ByteTokenizer, bpe], ids=["bytes", "bpe"])
def test_characters_come_whole_and_at_once(make):
    tokenizer = make()
    (ids,) = tokenizer.encode_batch([MIXED])
    prompt = tokenizer.encode_batch(["the "])[0].tolist()
    pieces, row = feed(tokenizer, prompt, ids)
    assert row.text == MIXED
    assert not any(BROKEN in piece for piece in pieces)
    # After every token, all characters that are whole by then have come.
    for count in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:count]).rstrip(BROKEN)
        assert "".join(pieces[:count]) == whole
    assert len(ids) > len(MIXED), "no character had more than one token"


def test_bytes_that_are_no_text_are_shown_as_such():
    tokenizer = ByteTokenizer()
    generator = random.Random(0)
    for _ in range(300):
        kinds = (range(1, 128), range(128, 192), range(192, 256))
        ids = [generator.choice(generator.choice(kinds)) for _ in range(generator.randint(1, 12))]
        pieces, row = feed(tokenizer, [65], ids)
        assert row.text == bytes(ids).decode(errors="replace")
        # At most one character waits for more bytes.
        for count in range(1, len(ids) + 1):
            now = bytes(ids[:count]).decode(errors="replace")
            assert "".join(pieces[:count]) in (now, now[:-1])


def test_a_space_that_belongs_to_the_token_before_is_not_lost():
    """A tokenizer that drops the space before the first word must not take any for the first."""
    words = {"<eos>": 0, "▁one": 1, "▁two": 2, "▁three": 3, "s": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="s"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = JsonTokenizer(inner, "words")
    pieces, row = feed(tokenizer, [1], [2, 4, 3, 4, 1, 0])
    assert row.text == " twos threes one"
    assert pieces == [" two", "s", " three", "s", " one", ""]


@pytest.mark.parametrize(
    ("text", "stop", "expected", "ended"),
    [
        ("one two three", ["two"], "one ", True),
        ("one two three", ["tw", "two", "e"], "on", True),
        ("a\n\nb", ["\n\n"], "a", True),
        ("a\n b", ["\n\n"], "a\n b", False),
        ("aaab", ["aab"], "a", True),
        ("one tw", ["two"], "one tw", False),
        ("one \u20ac5", ["\u20ac5"], "one ", True),
        ("stop", ["stop"], "", True),
    ],
)
def test_stop_texts(text, stop, expected, ended):
    row = Continuation(ByteTokenizer(), [65], stop)
    shown = ""
    for token in text.encode():
        if not row.ended:
            shown += row.add(token)
            # Nothing is shown that would have to be taken back.
            assert expected.startswith(shown)
    assert row.ended == ended
    assert shown + ("" if ended else row.end()) == row.text == expected


def test_the_end_of_text_ends_a_row_and_is_not_shown():
    pieces, row = feed(ByteTokenizer(), [65], [*b"ab", 0, *b"cd"])
    assert row.text == "ab"
    assert row.ended
    pieces, row = feed(ByteTokenizer(), [65], [*b"a", 0xE2, 0, *b"cd"])
    assert row.text == "a" + BROKEN


def test_rows_are_shown_one_after_the_other_as_they_grow():
    out = io.StringIO()
    screen = Screen(["x", "y"], out)
    assert out.getvalue() == "--- 1 of 2 ---\nx"
    screen.add(1, "2", False)
    screen.add(0, "1", False)
    assert out.getvalue() == "--- 1 of 2 ---\nx1"
    screen.add(0, "1", True)
    assert out.getvalue() == "--- 1 of 2 ---\nx11\n--- 2 of 2 ---\ny2"
    screen.add(1, "3", True)
    assert out.getvalue() == "--- 1 of 2 ---\nx11\n--- 2 of 2 ---\ny23\n"


def test_a_terminal_gets_no_control_characters_and_a_file_gets_all():
    text = "a\x1b[2J\x07b\tc\n\x9bd\r"
    for out, expected in ((io.StringIO(), text), (Terminal(), f"a{BROKEN}[2J{BROKEN}b\tc\n")):
        Screen([text], out)
        assert out.getvalue().startswith(expected)
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\x9b", "\r"}


def test_characters_that_the_output_cannot_write_become_question_marks():
    inside = io.BytesIO()
    out = io.TextIOWrapper(inside, encoding="ascii")
    Screen(["caf\u00e9"], out)
    assert inside.getvalue() == b"caf?"


def expected_text(folder, prompts, steps, which="best", **options):
    """The same by the library: the bytes of the new tokens up to the end of text."""
    model = load_model(*open_run(folder, which))
    rows = mg.generate(model, [list(p.encode()) for p in prompts], steps, stop=[0], **options)
    new = [row.tolist()[len(p.encode()) :] for row, p in zip(rows, prompts, strict=True)]
    return [bytes(t for t in row if t).decode(errors="replace") for row in new]


def test_the_command_shows_what_the_library_generates(trained, capsys):
    prompts = ["the gate", "a", "stream of"]
    flags = ["--tokens", "20", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95"]
    flags += ["--seed", "5", "--device", "cpu", "--checkpoint", "last"]
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["sample", str(trained), *given, *flags]) == 0
    shown = capsys.readouterr()
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "which": "last"}
    texts = expected_text(trained, prompts, 20, seed=[5, 6, 7], **options)
    assert shown.out == "".join(
        f"--- {n} of 3 ---\n{prompt}{text}\n"
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1)
    )
    assert "tokens in" in shown.err
    assert "a second; the first after" in shown.err
    # One of them alone, as a single prompt.
    assert main(["sample", str(trained), "--prompt", prompts[1], *flags, "--seed", "6"]) == 0
    assert capsys.readouterr().out == f"{prompts[1]}{texts[1]}\n"


def test_text_comes_while_it_is_generated(trained):
    class Watched(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    seen = []
    (text,) = sample(
        SampleConfig(trained, ("the ",), tokens=20, temperature=0.0, device="cpu"), Watched()
    )
    assert len(set(seen)) > 10
    assert seen[-1] == f"the {text}\n"


def test_a_run_with_a_bpe(trained_bpe):
    out = io.StringIO()
    prompt = MIXED[:12]
    config = SampleConfig(trained_bpe, (prompt,), tokens=8, temperature=0.0, device="cpu")
    tokenizer = open_data(trained_bpe.parent.parent / "data").tokenizer()
    model = load_model(*open_run(trained_bpe))
    assert tokenizer.vocab_size < model.config.vocab_size
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    (row,) = mg.generate(model, [ids], 8, temperature=0, stop=[tokenizer.eot])
    (text,) = sample(config, out)
    assert text == tokenizer.decode([i for i in row.tolist()[len(ids) :] if i != tokenizer.eot])
    assert out.getvalue() == f"{prompt}{text}\n"


def test_ids_that_the_tokenizer_does_not_have_are_never_written(trained_bpe, tmp_path):
    """The vocabulary is padded: were those rows the likeliest, they still could not come."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(trained_bpe, tmp_path / "run")
    path, _ = open_run(copy, "last")
    weights = load_file(path / "model.safetensors")
    weights["embed.weight"][300:] = 0
    weights["embed.weight"][300], weights["embed.weight"][301] = 10, -10
    save_file(weights, path / "model.safetensors")
    with torch.no_grad():
        assert load_model(*open_run(path))(torch.tensor([[5]])).argmax() >= 300
    config = SampleConfig(path, ("the ",), tokens=20, device="cpu")
    (text,) = sample(config, io.StringIO())
    assert len(text) > 5


def test_without_a_prompt_a_pipe_is_read_or_a_text_begun(trained, monkeypatch, capsys):
    flags = ["--tokens", "10", "--temperature", "0", "--device", "cpu"]

    def shown(stdin):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["sample", str(trained), *flags]) == 0
        return capsys.readouterr().out

    (text,) = expected_text(trained, ["the gate"], 10, temperature=0)
    assert shown(io.StringIO("the gate\n")) == f"the gate{text}\n"
    (text,) = expected_text(trained, ["\0"], 10, temperature=0)
    assert shown(Terminal("not read")) == f"{text}\n"
    assert shown(io.StringIO("")) == f"{text}\n"


def test_the_stop_text_of_the_command(trained):
    def text(*stop):
        config = SampleConfig(
            trained, ("the gate ",), tokens=20, stop=stop, temperature=1.0, device="cpu"
        )
        return sample(config, io.StringIO())[0]

    whole = text()
    stop = whole[6:8]
    assert text(stop, "never in it") == whole[: whole.index(stop)]


def test_bf16(trained):
    config = SampleConfig(trained, ("the gate",), tokens=10, device="cpu", precision="bf16")
    (text,) = sample(config, io.StringIO())
    assert len(text.encode()) >= 5


def test_the_tokenizer_is_all_that_is_needed_of_the_data(trained_bpe, tmp_path):
    data = shutil.copytree(trained_bpe.parent.parent / "data", tmp_path / "data")
    for shard in data.glob("*.bin"):
        shard.unlink()
    config = SampleConfig(trained_bpe, ("the ",), tokens=5, temperature=0.0, device="cpu")
    moved = SampleConfig(trained_bpe, ("the ",), tokens=5, temperature=0.0, device="cpu", data=data)
    assert sample(moved, io.StringIO()) == sample(config, io.StringIO())


def test_what_is_wrong_with_the_tokenizer_is_one_sentence(trained, trained_bpe, tmp_path, capsys):
    def said(folder):
        flags = ["--prompt", "a", "--device", "cpu", "--data", str(folder)]
        assert main(["sample", str(trained_bpe), *flags]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "needs its tokenizer, and" in said(tmp_path / "gone")
    assert "with --data" in said(tmp_path / "gone")
    _, state = open_run(trained)
    assert "was trained with another tokenizer" in said(state["data"])
    data = shutil.copytree(trained_bpe.parent.parent / "data", tmp_path / "data")
    file = data / "tokenizer.json"
    spec = json.loads(file.read_text())
    file.write_text(json.dumps(spec, indent=1))
    assert "tokenizer.json is damaged" in said(data)
    file.unlink()
    assert "tokenizer.json is missing" in said(data)


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (["--prompt", ""], 2, "an empty --prompt or --stop says nothing"),
        (["--prompt", "a", "--stop", ""], 2, "an empty --prompt or --stop says nothing"),
        (["--prompt", "a", "--tokens", "0"], 2, "tokens must be at least 1, got 0."),
        (["--prompt", "a", "--temperature", "-1"], 2, "temperature must be a number of at least"),
        (["--prompt", "a", "--top-p", "1.5"], 2, "top_p must be above 0 and at most 1, got 1.5."),
        (["--prompt", "a", "--top-k", "0"], 2, "top_k must be at least 1, got 0."),
        (["--prompt", "a" * 33], 1, "a prompt of 33 tokens is longer than the model's context"),
        (["--prompt", "a", "--tokens", "32"], 1, "1 tokens of prompt and 32 new ones exceed the"),
        (["--prompt", "a", "--checkpoint", "first"], 2, "--checkpoint"),
    ],
)
def test_errors_are_one_sentence(flags, status, sentence, trained, capsys):
    try:
        returned = main(["sample", str(trained), *flags, "--device", "cpu"])
    except SystemExit as stopped:
        returned = stopped.code
    shown = capsys.readouterr()
    assert returned == status
    assert sentence in " ".join(shown.err.replace("\u2502", "").split())
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_folder_that_is_no_run_and_weights_that_are_not_finite(trained, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    assert main(["sample", str(tmp_path), "--prompt", "a"]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    path, _ = open_run(shutil.copytree(trained, tmp_path / "run"), "last")
    weights = load_file(path / "model.safetensors")
    weights["embed.weight"][:] = float("nan")
    save_file(weights, path / "model.safetensors")
    assert main(["sample", str(path), "--prompt", "a", "--tokens", "5", "--device", "cpu"]) == 1
    assert "the model's logits are not finite" in capsys.readouterr().err


def test_a_context_that_slides(trained, capsys):
    flags = ["--prompt", "the gate", "--tokens", "40", "--temperature", "0", "--device", "cpu"]
    assert main(["sample", str(trained), *flags, "--slide", "True"]) == 0
    (text,) = expected_text(trained, ["the gate"], 40, temperature=0)
    assert capsys.readouterr().out == f"the gate{text}\n"
