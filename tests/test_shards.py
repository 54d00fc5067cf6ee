"""Prepared data on disk: what is in it, reading windows of it, and what is said when it is bad."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from multigate.data import PrepareConfig, open_data, prepare
from multigate.data.tokenizer import dtype_for

TEXTS = [f"document number {k}, " * (k % 5 + 1) + "é" for k in range(50)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    lines = (json.dumps({"text": text}) for text in TEXTS)
    (folder / "a.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(
        out=folder / "data",
        sources=(str(folder / "a.jsonl"),),
        tokenizer="bpe:300",
        val_share=0.3,
        unit_mb=0.001,
    )
    prepare(config, progress=print)
    return folder / "data"


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "data")


def change_header(folder, **changes):
    header = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**header, **changes}))


def test_the_header_says_what_is_there(folder):
    header = json.loads((folder / "data.json").read_text())
    tokenizer = open_data(folder).tokenizer()
    assert header["format"] == 1
    assert header["vocab_size"] == tokenizer.vocab_size == 300
    assert header["eot"] == tokenizer.eot == 0
    assert header["dtype"] == "uint16"
    assert header["tokenizer"]["name"] == "bpe:300"
    assert header["settings"]["seed"] == 0
    assert header["settings"]["val_share"] == 0.3
    assert list(header["splits"]) == ["train", "val"]
    seen = []
    for name, split in header["splits"].items():
        assert [s["file"] for s in split["shards"]] == [
            f"{name}-{k:05d}.bin" for k in range(len(split["shards"]))
        ]
        documents = []
        for shard in split["shards"]:
            raw = (folder / shard["file"]).read_bytes()
            assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
            tokens = np.frombuffer(raw, "<u2")
            assert len(tokens) == shard["tokens"]
            assert tokens[-1] == 0
            ends = np.flatnonzero(tokens == 0)
            documents += [tokenizer.decode(d[:-1]) for d in np.split(tokens, ends + 1)[:-1]]
        assert split["tokens"] == sum(s["tokens"] for s in split["shards"])
        assert split["documents"] == len(documents)
        assert split["bytes"] == sum(len(d.encode()) for d in documents)
        seen += documents
    assert sorted(seen) == sorted(TEXTS)
    files = {"data.json", "tokenizer.json"}
    files |= {s["file"] for split in header["splits"].values() for s in split["shards"]}
    assert {f.name for f in folder.iterdir()} == files


def test_windows_and_rows(folder):
    split = open_data(folder).split("train")
    shards = [np.fromfile(f, "<u2") for f in sorted(folder.glob("train-*.bin"))]
    assert len(shards) == len(split.shards) > 2
    for context in (1, 7, 100):
        expected = [
            shard[k : k + context + 1]
            for shard in shards
            for k in range(0, len(shard) - context, context)
        ]
        assert split.windows(context) == len(expected)
        assert np.array_equal(split.rows(range(len(expected)), context), np.stack(expected))
        backwards = np.arange(len(expected))[::-1]
        assert np.array_equal(split.rows(backwards, context), np.stack(expected)[::-1])
    rows = split.rows([3, 3], 7)
    assert rows.dtype == np.uint16
    assert np.array_equal(rows[0], rows[1])
    for index in (-1, split.windows(7)):
        with pytest.raises(IndexError, match=f"has windows 0 to {split.windows(7) - 1} only"):
            split.rows([0, index], 7)


def test_a_shard_that_is_too_short_for_a_window_gives_none(folder):
    split = open_data(folder).split("train")
    lengths = [len(shard) for shard in split.shards]
    context = sorted(lengths)[len(lengths) // 2] - 1
    assert split.windows(context) == sum((n - 1) // context for n in lengths)
    assert min(lengths) - 1 < context
    longest = max(lengths)
    assert split.windows(longest - 1) == lengths.count(longest)
    with pytest.raises(ValueError, match=rf"too few for one window of {longest} \+ 1: prepare mo"):
        split.windows(longest)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        split.windows(0)


def test_dtypes():
    names = {1: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}
    for vocabulary, name in names.items():
        assert dtype_for(vocabulary).name == name
        assert dtype_for(vocabulary).str[0] in "<|"


def test_the_fingerprint_follows_the_tokens_and_the_tokenizer(folder):
    data = open_data(folder)
    assert open_data(folder).fingerprint == data.fingerprint
    change_header(folder, multigate="9", settings={})
    assert open_data(folder).fingerprint == data.fingerprint
    change_header(folder, eot=1)
    assert open_data(folder).fingerprint != data.fingerprint
    assert open_data(folder).tokenizer_fingerprint != data.tokenizer_fingerprint
    header = json.loads((folder / "data.json").read_text())
    header["splits"]["val"]["shards"].pop()
    change_header(folder, eot=0, splits=header["splits"])
    assert open_data(folder).fingerprint != data.fingerprint
    assert open_data(folder).tokenizer_fingerprint == data.tokenizer_fingerprint
    header["tokenizer"]["sha256"] = "0"
    change_header(folder, tokenizer=header["tokenizer"])
    assert open_data(folder, verify=False).tokenizer_fingerprint != data.tokenizer_fingerprint


def fails(folder, sentence, error=ValueError, verify=True):
    with pytest.raises(error, match=sentence) as caught:
        open_data(folder, verify)
    assert "\n" not in str(caught.value)


def test_no_data(tmp_path):
    fails(tmp_path, "holds no prepared data: make it with `multigate prepare`", FileNotFoundError)
    fails(tmp_path / "absent", "holds no prepared data", FileNotFoundError)
    (tmp_path / "file").write_text("x")
    fails(tmp_path / "file", "holds no prepared data", FileNotFoundError)
    (tmp_path / "progress.json").write_text("{}")
    fails(tmp_path, "half-finished preparation: run the same", FileNotFoundError)


def test_a_bad_header(folder):
    change_header(folder, format=2)
    fails(folder, "has format 2 and this multigate reads up to 1: install a newer one")
    change_header(folder, format=None)
    fails(folder, "data.json is not the header of prepared data")
    (folder / "data.json").write_text("{")
    fails(folder, "data.json is damaged: prepare the data again")


def test_no_such_split(folder):
    with pytest.raises(ValueError, match="unknown split 'vall': did you mean 'val'"):
        open_data(folder).split("vall")
    assert open_data(folder).splits() == ["train", "val"]


def test_a_missing_shard(folder):
    (folder / "train-00001.bin").unlink()
    fails(folder, "the shard .*train-00001.bin is missing", FileNotFoundError, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [-1, -2, 1])
def test_a_shard_of_another_size(folder, verify, size):
    shard = folder / "val-00000.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:size] if size < 0 else data + b"\0" * size)
    sentence = f"val-00000.bin has {len(data) + size} bytes instead of {len(data)}: it was cut"
    fails(folder, sentence, verify=verify)


@pytest.mark.parametrize("file", ["train-00000.bin", "train-00001.bin", "val-00000.bin"])
def test_a_damaged_shard(folder, file):
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes(data)
    fails(folder, rf"{file} is damaged \(its sha256 is another\): prepare the data again")
    open_data(folder, verify=False)


def test_a_damaged_tokenizer(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|andoftext|>"))
    fails(folder, r"tokenizer.json is damaged")
    file.unlink()
    fails(folder, r"tokenizer.json is missing", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer file .*tokenizer.json"):
        open_data(folder, verify=False).tokenizer()
    file.write_text("{}")
    header = json.loads((folder / "data.json").read_text())
    change_header(folder, tokenizer={**header["tokenizer"], "kind": "jsn"})
    with pytest.raises(ValueError, match="unknown kind of tokenizer 'jsn': did you mean 'json'"):
        open_data(folder, verify=False).tokenizer()


def test_a_token_beyond_the_vocabulary_is_found(tmp_path):
    """A header that says less than the shards hold: the model would have no row for the token."""
    (tmp_path / "text.txt").write_text("zebra " * 100)
    folder = tmp_path / "data"
    prepare(PrepareConfig(out=folder, sources=(str(tmp_path / "text.txt"),)), progress=print)
    header = json.loads((folder / "data.json").read_text())
    header["vocab_size"] = 100
    (folder / "data.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match="holds the token 122 in the split 'train', beyond"):
        open_data(folder)
