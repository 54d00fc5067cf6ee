"""Text to token shards: sources, tokenizers, the split, going on after a kill, and bad input."""

import base64
import errno
import gzip
import io
import json
import lzma
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from multigate.data import PrepareConfig, encode, open_data, prepare, words
from multigate.data.bpe import JsonTokenizer, splits_like_gpt2, train_bpe
from multigate.data.encode import split_of
from multigate.data.hub import HubPart
from multigate.data.ranks import RanksTokenizer
from multigate.data.sources import HUB_WORDS, documents, folder_files, open_source, stdlib_files
from multigate.data.tokenizer import ByteTokenizer, load_tokenizer, make_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
WORDS = (
    "the gate of a stream's norm, naïve — 12 34 “quoted” and\n\n  indented <|endoftext|> 世界 🙂"
)


def text(seed, words=40):
    chosen = random.Random(seed).choices(WORDS.split(" "), k=words)
    return " ".join(chosen) + f" {seed}"


TEXTS = [text(k) for k in range(60)]
OTHERS = [text(1000 + k, 10) for k in range(12)]


def jsonl(texts, key="text"):
    return "".join(json.dumps({"id": k, key: t}) + "\n" for k, t in enumerate(texts)).encode()


def write_source(folder, kind, texts):
    """A source of the kind with these documents; its name for `prepare`."""
    folder.mkdir()
    if kind == "folder":
        for k, t in enumerate(texts):
            (folder / f"{k:03d}.txt").write_text(t)
        return str(folder)
    file = folder / f"some.{kind}"
    if kind == "jsonl":
        file.write_bytes(jsonl(texts))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(jsonl(texts)))
    elif kind == "jsonl.xz":
        file.write_bytes(lzma.compress(jsonl(texts)))
    elif kind == "jsonl.zst":
        file.write_bytes(pytest.importorskip("zstandard").compress(jsonl(texts)))
    elif kind == "parquet":
        write_parquet(file, texts)
    elif kind == "hub":
        pytest.importorskip("datasets")
        # The default configuration comes first on the hub too, with other files.
        write_parquet(folder / "data/CC-MAIN-2013-20/000.parquet", ["not this"])
        for k in range(3):
            share = len(texts) // 3 + 1
            file = folder / f"sample/10BT/{k:03d}_00000.parquet"
            write_parquet(file, texts[k * share : (k + 1) * share])
        (folder / "README.md").write_text(HUB_README)
        return f"hf:{folder}:sample-10BT"
    return str(file)


HUB_README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
KINDS = ["folder", "jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst", "parquet", "hub"]


def write_parquet(file, texts, group=7):
    """With the columns of FineWeb."""
    pyarrow, parquet = (pytest.importorskip(m) for m in ("pyarrow", "pyarrow.parquet"))
    file.parent.mkdir(parents=True, exist_ok=True)
    same = {"dump": "CC-MAIN-2013-20", "url": "", "date": "2013", "file_path": "", "language": "en"}
    columns = {"text": texts, "id": [str(k) for k in range(len(texts))]}
    columns |= {name: [value] * len(texts) for name, value in same.items()}
    columns |= {"language_score": [0.9] * len(texts), "token_count": [1] * len(texts)}
    parquet.write_table(pyarrow.table(columns), file, row_group_size=group)


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", "jsonl", TEXTS)


def quiet(config):
    return prepare(config, progress=lambda progress: None)


def small(out, source, **changes):
    """Seven units, each a few documents."""
    return PrepareConfig(
        out=out,
        sources=(source,),
        val=changes.pop("val", ()),
        **{"val_share": 0.2, "processes": 1, "unit_mb": 0.002, **changes},
    )


def decoded(data, split):
    """The documents of a split, cut at the ends of text."""
    tokenizer = data.tokenizer()
    tokens = np.concatenate(data.split(split).shards)
    assert tokens[-1] == data.eot
    ends = np.flatnonzero(tokens == data.eot) + 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends)[:-1]]


def contents(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def fails(sentence, function, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=sentence) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)


# Sources


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_every_kind_of_source(tmp_path, kind):
    source = write_source(tmp_path / "source", kind, TEXTS)
    assert list(documents(source)) == TEXTS
    data = quiet(small(tmp_path / "out", source))
    order = {t: k for k, t in enumerate(TEXTS)}
    splits = {name: [order[d] for d in decoded(data, name)] for name in ("train", "val")}
    assert splits["train"] == sorted(splits["train"])
    assert splits["val"] == sorted(splits["val"])
    assert sorted(splits["train"] + splits["val"]) == list(range(len(TEXTS)))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_skipping_documents(tmp_path, kind):
    (part,) = open_source(write_source(tmp_path / "source", kind, TEXTS))
    for skip in (1, 6, 7, 20, 59, 60, 61):
        assert list(part.read(skip)) == TEXTS[skip:]


def test_skipping_inside_a_long_row_group(tmp_path):
    many = [str(k) for k in range(2000)]
    write_parquet(tmp_path / "a.parquet", many, group=900)
    (part,) = open_source(str(tmp_path / "a.parquet"))
    for skip in (255, 256, 257, 700, 1700, 1999):
        assert list(part.read(skip)) == many[skip:]


def test_skipping_does_not_decode(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n{bad\n\n" + jsonl(["x", "y"]))
    (part,) = open_source(str(tmp_path / "a.jsonl"))
    assert list(part.read(skip=1)) == ["x", "y"]


def test_a_dataset_goes_on_from_its_mark_without_reading_what_came_before(tmp_path, monkeypatch):
    monkeypatch.setattr("multigate.data.hub.BATCH", 9)
    source = write_source(tmp_path / "source", "hub", TEXTS)
    (part,) = open_source(source)
    reader = part.read()
    for count in range(1, 50):
        next(reader)
        mark = json.loads(json.dumps(part.mark()))
        assert 0 <= count - mark["documents"] <= 9
        if count in (1, 8, 9, 10, 21, 22, 49):
            (again,) = open_source(source)
            assert list(again.read(count, mark)) == TEXTS[count:]
    # The first of the three files plays no part any more.
    write_parquet(tmp_path / "source/sample/10BT/000_00000.parquet", ["other"])
    (again,) = open_source(source)
    assert mark["state"]["examples_iterable"]["examples_iterable"]["shard_idx"] == 2
    assert list(again.read(49, mark)) == TEXTS[49:]


@pytest.mark.parametrize("ending", ["gz", "xz", "zst"])
def test_compressed_text_is_one_document(tmp_path, ending):
    packages = {"gz": gzip, "xz": lzma}
    package = packages.get(ending) or pytest.importorskip("zstandard")
    (tmp_path / f"a.txt.{ending}").write_bytes(package.compress("one é\ntwo".encode()))
    (part,) = open_source(str(tmp_path / f"a.txt.{ending}"))
    assert list(part.read()) == ["one é\ntwo"]
    assert list(part.read(skip=1)) == []
    assert part.size is None


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", ".hidden.txt", ".git/x.txt", "a.txt", "d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "d.jsonl").write_bytes(jsonl(["one", "two"]))
    assert list(documents(str(tmp_path))) == [
        *("a.txt", "a/b/c.md", "a/z.txt", "b.txt", "one", "two"),
    ]
    assert list(documents(str(tmp_path), pattern="*.md")) == ["a/b/c.md"]
    assert list(documents(str(tmp_path), pattern="a/*")) == ["a/z.txt"]
    sizes = [part.size for part in open_source(str(tmp_path))]
    assert sizes == [5, 8, 7, 5, None]


def test_other_keys(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"], key="body"))
    assert list(documents(str(tmp_path / "a.jsonl"), text_key="body")) == ["one"]
    write_parquet(tmp_path / "a.parquet", ["one"])
    assert list(documents(str(tmp_path / "a.parquet"), text_key="language")) == ["en"]


def test_the_standard_library_is_a_source(tmp_path):
    files = stdlib_files()
    assert any(f.name == "argparse.py" for f in files)
    assert not any({"site-packages", "test"} & set(f.parts) for f in files)
    data = quiet(PrepareConfig(out=tmp_path / "out", limit_mb=0.3, val_share=0.2))
    texts = decoded(data, "train") + decoded(data, "val")
    assert 300_000 <= sum(len(t.encode()) for t in texts) < 900_000
    expected = [f.read_bytes().decode() for f in files[: len(texts) + 5]]
    assert sorted(texts) == sorted([t for t in expected if t][: len(texts)])
    fails("holds no .py file", stdlib_files, tmp_path, error=FileNotFoundError)


@pytest.mark.parametrize("word", ["fineweb", "fineweb-edu"])
def test_words_for_datasets(word):
    pytest.importorskip("datasets")
    (part,) = open_source(word)
    assert isinstance(part, HubPart)
    assert (part.path, part.subset) == (f"HuggingFaceFW/{word}", "sample-10BT")
    assert HUB_WORDS[word] == part.name
    fails(
        rf"the Hugging Face dataset 'HuggingFaceFW/{word}:sample-10BT' cannot be opened \(",
        next,
        part.read(),
    )


def test_names_of_datasets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, path, subset in (
        ("owner/name", "owner/name", None),
        ("owner/na.me:sub-set", "owner/na.me", "sub-set"),
        ("hf:name", "name", None),
        ("hf:/a/b:c", "/a/b", "c"),
    ):
        (part,) = open_source(name)
        assert (part.path, part.subset) == (path, subset)
    Path("owner/name").mkdir(parents=True)
    Path("owner/name/a.txt").write_text("a folder comes first")
    assert list(documents("owner/name")) == ["a folder comes first"]


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")

    def read(name, content=None, **options):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        return list(documents(str(tmp_path / name), **options))

    absent = FileNotFoundError
    fails("no source 'stdlb': the kinds of source are stdlib", open_source, "stdlb", error=absent)
    fails("no source '/a/b/c': the kinds of", open_source, "/a/b/c", error=absent)
    fails(r"holds no file that matches '\*.x'", folder_files, tmp_path, "*.x", error=absent)
    fails(r"bad.txt is not UTF-8 text \(at byte 3\)", read, "bad.txt", b"abc\xff")
    fails(r"b.jsonl line 2 is not JSON \(Expecting value\)", read, "b.jsonl", jsonl(["a"]) + b"x")
    fails("c.jsonl line 1: unknown key 'txt': did you mean 'text'?", read, "c.jsonl", jsonl(["a"]),
          text_key="txt")  # fmt: skip
    fails("d.jsonl line 1 is not a JSON object with the key 'text'", read, "d.jsonl", b"[1]\n")
    fails("e.jsonl line 1: 'text' is not text but int", read, "e.jsonl", jsonl([1]))
    fails(r"f.jsonl line 1 is not UTF-8 text \(at byte 1 of", read, "f.jsonl", b'"\xff"\n')
    fails("g.jsonl.gz cannot be decompressed", read, "g.jsonl.gz", b"no gzip")
    fails("h.txt.gz cannot be decompressed", read, "h.txt.gz", gzip.compress(b"abcd" * 99)[:-12])
    fails("i.txt.xz cannot be decompressed", read, "i.txt.xz", b"no xz")
    fails("j.txt.zst cannot be decompressed", read, "j.txt.zst", b"no zst")
    two = zstandard.compress(b"one" * 99) + zstandard.compress(b"two" * 99)
    assert read("two.txt.zst", two) == ["one" * 99 + "two" * 99]
    fails("cut.txt.zst cannot be decompressed", read, "cut.txt.zst", two[:-1])
    fails("k.parquet is not a parquet file", read, "k.parquet", b"no parquet")
    write_parquet(tmp_path / "l.parquet", ["x"])
    fails("l.parquet: unknown column 'txt': did you mean 'text'?", read, "l.parquet",
          text_key="txt")  # fmt: skip
    fails("'token_count' is not text but int", read, "l.parquet", text_key="token_count")
    part = open_source(str(tmp_path / "bad.txt"))[0]
    (tmp_path / "bad.txt").unlink()
    fails("bad.txt cannot be read: No such file", list, part.read(), error=OSError)
    for module, ending in (("zstandard", "txt.zst"), ("pyarrow.parquet", "parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        package = module.split(".")[0]
        fails(
            rf"needs the package {package}: pip install 'multigate\[data\]'",
            read,
            f"m.{ending}",
            b"x",
        )


def test_datasets_that_cannot_be_read(tmp_path, monkeypatch):
    source = write_source(tmp_path / "source", "hub", TEXTS)
    fails("BuilderConfig 'nope' not found", list, documents(f"hf:{tmp_path / 'source'}:nope"))
    fails("unknown column 'txt': did you mean 'text'", list, documents(source, text_key="txt"))
    fails(r"'owner/name' cannot be opened \(.*\): check its name", list, documents("owner/name"))
    (tmp_path / "source/sample/10BT/001_00000.parquet").unlink()
    (part,) = open_source(source)
    monkeypatch.setattr(HubPart, "_load", lambda self: Unreachable())
    fails(r"reading the dataset .* failed \(gone\): what is finished is kept", list, part.read(),
          error=OSError)  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails(r"needs the package datasets: pip install 'multigate\[data\]'", list, part.read())


class Unreachable:
    def state_dict(self):
        return {}

    def iter(self, batch_size):
        raise ConnectionError("gone")


# Tokenizers


@pytest.fixture(scope="module")
def bpe():
    return train_bpe("bpe:350", TEXTS)


def ranks_of(bpe):
    """The ranks of a byte-level BPE: its tokens as bytes, in the order of their ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {}
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    for point in [*range(128), *range(0x80, 0x800)]:
        letters.update(
            zip(split.pre_tokenize_str(chr(point))[0][0], chr(point).encode(), strict=True)
        )
    # Bytes that UTF-8 never has: whatever characters are left, each stands for one of them.
    vocabulary = sorted((i, t) for t, i in bpe._inner.get_vocab().items() if i != bpe.eot)
    rest = iter(sorted(set(range(256)) - set(letters.values())))
    for _, token in vocabulary:
        if len(token) == 1 and token not in letters:
            letters[token] = next(rest)
    return {bytes(letters[c] for c in token): i - 1 for i, token in vocabulary}


@pytest.fixture(scope="module")
def ranks(bpe):
    pytest.importorskip("tiktoken")
    return RanksTokenizer(ranks_of(bpe), "some")


def test_bytes():
    tokenizer = make_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.dtype) == (256, 0, np.uint8)
    (ids,) = tokenizer.encode_batch(["aé\0b"])
    # Byte 0 ends a text also inside one: nothing is lost, but readers see two documents.
    assert ids.tolist() == [97, 195, 169, 0, 98]
    assert tokenizer.decode(ids) == "aé\0b"
    assert tokenizer.decode([195]) == "�"


def test_a_bpe_is_trained_the_same_every_time(bpe, monkeypatch):
    assert (bpe.vocab_size, bpe.eot, bpe.dtype) == (350, 0, np.uint16)
    assert bpe._inner.token_to_id("<|endoftext|>") == 0
    for threads in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        assert train_bpe("bpe:350", iter(TEXTS)).to_bytes() == bpe.to_bytes()
    lengths = [len(ids) for ids in bpe.encode_batch(TEXTS)]
    assert sum(lengths) < 0.6 * sum(len(t.encode()) for t in TEXTS)


def test_ids_are_those_of_the_library(bpe, ranks):
    """Texts with and without characters that are left to the library."""
    expected = bpe._inner.encode_batch(TEXTS, add_special_tokens=False)
    assert {bpe._words(t) is None for t in TEXTS} == {True, False}
    for t, ids, tiktoken, e in zip(
        TEXTS, bpe.encode_batch(TEXTS), ranks.encode_batch(TEXTS), expected, strict=True
    ):
        assert ids.tolist() == e.ids
        assert (tiktoken + 1).tolist() == e.ids
        assert bpe.decode(ids) == ranks.decode(tiktoken) == t
        assert ids.dtype == np.uint16


PIECES = st.sampled_from(
    [*" \n\t\r\x0b\x1c\x85\xa0\u2003\u3000\u200b", "  ", "\n\n", "'s", "'t", "'re", "'ve", "'m"]
    + ["'ll", "'d", "'S", "'", "’s", "a", "Ab", "é", "ß", "ж", "字", "ｶ", "1", "²", "Ⅷ", "٣", "½"]
    + ["_", "-", "!", "“", "—", "€", "\u0301", "\ufeff", "🙂", "𝔘", "<|endoftext|>", "\0", "ᾳ", "ꙮ"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.characters(exclude_categories=["Cs"]), max_size=30).map("".join))
def test_ids_of_any_text_are_those_of_the_library(bpe, ranks, text):
    expected = bpe._inner.encode(text, add_special_tokens=False).ids
    assert bpe.encode_batch([text])[0].tolist() == expected
    assert (ranks.encode_batch([text])[0] + 1).tolist() == expected
    assert ranks._inner.encode_ordinary(text) == [i - 1 for i in expected]
    if words.unstable_pattern().search(text) is None:
        assert bpe._words(text) is not None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=30).map(
        lambda parts: words.unstable_pattern().sub("", "".join(parts))
    )
)
def test_words_are_cut_where_the_library_cuts_them(text):
    from tokenizers.pre_tokenizers import ByteLevel

    found = words.word_pattern().findall(text)
    expected = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert found == [text[begin:end] for _, (begin, end) in expected]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "LONGEST_TEXT", 3)
        parts = list(words.pieces(text))
    assert [word for part in parts for word in words.word_pattern().findall(part)] == found


def test_every_stable_character_is_of_the_class_that_tokenizers_has_it_in():
    """Behind a letter, a digit or a mark it is in one word with it if it is of the same class."""
    from tokenizers.pre_tokenizers import ByteLevel

    classes = words.stable_classes()
    assert [len(classes[k]) for k in "LNZO"] == pytest.approx([45638, 480, 25, 4116], rel=0.05)
    split = ByteLevel(add_prefix_space=False)
    for kind, probe in (("L", "a"), ("N", "0"), ("O", "!")):
        for other in "LNO":
            points = [chr(p) for p in classes[other] if chr(p) != "'"]
            joined = "\n".join(probe + c for c in points)
            found = [t for t, _ in split.pre_tokenize_str(joined) if t != "Ċ"]
            assert len(found) == len(points) * (1 if kind == other else 2), (kind, other)
    for point in classes["Z"]:
        assert len(split.pre_tokenize_str(chr(point) + "\n")) == 1


def test_every_stable_character_is_of_the_class_that_tiktoken_has_it_in():
    """Ranks in which the first byte of a character joins what stands before it, in one word."""
    pytest.importorskip("tiktoken")
    tokens = [bytes([k]) for k in range(256)]
    tokens += [probe.encode() + bytes([k]) for probe in "a0!\n" for k in range(256)]
    tokenizer = RanksTokenizer({token: k for k, token in enumerate(tokens)}, "probing")
    stable = [chr(p) for points in words.stable_classes().values() for p in points]
    everything = "".join(f"a{c}0{c}!{c}\n{c}" for c in stable)
    expected = tokenizer._inner.encode_ordinary(everything)
    assert np.frombuffer(tokenizer._words(everything), "<u2").tolist() == expected


def test_long_texts_and_a_full_memory_change_nothing(bpe, monkeypatch):
    long = "\n".join(t.replace("🙂", "smile") for t in TEXTS)
    (expected,) = bpe.encode_batch([long])
    monkeypatch.setattr(words, "LONGEST_TEXT", 100)
    monkeypatch.setattr(words, "MOST_WORDS", 20)
    assert len(list(words.pieces(long))) > 10
    assert "".join(words.pieces(long)) == long
    assert bpe._words(long) == expected.tobytes()
    assert len(bpe._words._known) <= 20


def test_the_end_of_text_is_ordinary_text_where_it_stands_in_a_text(bpe, ranks):
    for tokenizer in (bpe, ranks):
        literal = "a<|endoftext|>b <|endoftext|>"
        (ids,) = tokenizer.encode_batch([literal])
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == literal
        assert tokenizer.decode([*ids, tokenizer.eot]) == literal + "<|endoftext|>"


def other_tokenizer(tmp_path, edit, name="other.json"):
    """A tokenizer.json that differs from the trained BPE."""
    spec = json.loads(train_bpe("bpe:300", TEXTS).to_bytes())
    edit(spec)
    (tmp_path / name).write_text(json.dumps(spec))
    return str(tmp_path / name)


def rename_eot(spec, new, special=True):
    spec["added_tokens"][0].update(content=new, special=special)
    vocabulary = spec["model"]["vocab"]
    vocabulary[new] = vocabulary.pop("<|endoftext|>")


@pytest.mark.parametrize("eot", ["<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"])
@pytest.mark.parametrize("special", [True, False])
def test_usual_ends_of_text(tmp_path, eot, special):
    path = other_tokenizer(tmp_path, lambda spec: rename_eot(spec, eot, special))
    tokenizer = make_tokenizer(path)
    assert tokenizer.eot == 0
    literal = f"one {eot}{eot} two"
    (ids,) = tokenizer.encode_batch([literal])
    assert 0 not in ids
    assert tokenizer.decode(ids) == literal
    again = load_tokenizer(tmp_path, {**tokenizer.entry(), "file": "other.json"}, tokenizer.eot)
    assert np.array_equal(again.encode_batch([literal])[0], ids)


def test_an_end_of_text_by_name(tmp_path):
    path = other_tokenizer(tmp_path, lambda spec: rename_eot(spec, "<stop>"))
    fails(r"has none of the usual end-of-text tokens \(<\|endoftext", make_tokenizer, path)
    fails("has no token '<halt>' to end a text with", make_tokenizer, path, eot="<halt>")
    assert make_tokenizer(path, eot="<stop>").eot == 0
    fails("'bytes' brings its own end of text", make_tokenizer, "bytes", eot="<stop>")
    fails(
        "turns ordinary text into its end of text",
        make_tokenizer(path, eot="e").encode_batch,
        ["e"],
    )
    source = write_source(tmp_path / "source", "jsonl", TEXTS)
    data = quiet(small(tmp_path / "out", source, tokenizer=path, eot="<stop>"))
    assert data.tokenizer().eot == data.eot == 0
    assert set(decoded(data, "train") + decoded(data, "val")) == set(TEXTS)


def test_a_unigram_model_that_holds_its_end_of_text_as_a_word(tmp_path):
    from tokenizers import Tokenizer, models

    pieces = [("</s>", 0.0), ("<unk>", 0.0), *((c, -2.0) for c in "abc<>/s ")]
    inner = Tokenizer(models.Unigram(pieces, unk_id=1))
    assert inner.encode("a</s>b").ids == [2, 0, 3]
    tokenizer = JsonTokenizer(inner, "unigram")
    (ids,) = tokenizer.encode_batch(["</s>a</s></s>b"])
    assert 0 not in ids
    assert "".join(inner.id_to_token(i) for i in ids) == "</s>a</s></s>b"


def test_ids_may_have_gaps_but_none_is_beyond_the_vocabulary(tmp_path, bpe):
    def move(spec):
        spec["model"]["vocab"]["<unused>"] = 999

    assert make_tokenizer(other_tokenizer(tmp_path, move)).vocab_size == 1000
    fails("gave the token 350, beyond its vocabulary of 350", bpe.pack, [349, 350])


def changed(**changes):
    return lambda spec: spec.update(changes)


@pytest.mark.parametrize(
    "edit",
    [
        changed(normalizer={"type": "Lowercase"}),
        changed(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        ),
        changed(pre_tokenizer=None),
        changed(
            pre_tokenizer={
                **{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                "use_regex": False,
            }
        ),
        changed(
            truncation={
                **{"direction": "Right", "max_length": 8, "strategy": "LongestFirst"},
                "stride": 0,
            }
        ),
        lambda spec: spec["added_tokens"].append(
            {**spec["added_tokens"][0], "id": 300, "content": "gate", "special": False}
        ),
    ],
)
def test_other_tokenizer_files(tmp_path, edit):
    """They are encoded by the library, whole, with nothing added."""
    from tokenizers import Tokenizer

    path = other_tokenizer(tmp_path, edit)
    tokenizer, library = make_tokenizer(path), Tokenizer.from_file(path)
    library.no_truncation()
    library.encode_special_tokens = True
    truncated = json.loads(Path(path).read_text())["truncation"]
    assert splits_like_gpt2(json.loads(library.to_str())) == bool(truncated)
    for ids, expected in zip(
        tokenizer.encode_batch(TEXTS), library.encode_batch(TEXTS), strict=True
    ):
        assert ids.tolist() == expected.ids


def test_ranks_in_a_file(tmp_path, ranks):
    lines = ranks.to_bytes()
    assert lines.splitlines()[0] == base64.b64encode(b"!") + b" 0"
    (tmp_path / "a.tiktoken").write_bytes(lines)
    tokenizer = make_tokenizer(str(tmp_path / "a.tiktoken"))
    assert (tokenizer.vocab_size, tokenizer.eot) == (350, 349)
    for ids, expected in zip(tokenizer.encode_batch(TEXTS), ranks.encode_batch(TEXTS), strict=True):
        assert np.array_equal(ids, expected)

    def bad(content):
        (tmp_path / "b.tiktoken").write_bytes(content)
        make_tokenizer(str(tmp_path / "b.tiktoken"))

    fails("b.tiktoken line 2 is not a token in base64 and its rank", bad, b"IQ== 0\n!\n")
    fails("must be the numbers from 0 on, each once", bad, b"IQ== 0\nIg== 2\n")
    fails("has no rank for the byte 0", bad, b"IQ== 0\n")


def test_gpt2(tmp_path, source, ranks, monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    fails("fetched from the network the first time", make_tokenizer, "gpt2", error=OSError)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": ranks._inner}.__getitem__)
    data = quiet(small(tmp_path / "out", source, tokenizer="gpt2"))
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    data = open_data(tmp_path / "out")
    assert (data.vocab_size, data.eot, data.header["dtype"]) == (350, 349, "uint16")
    assert set(decoded(data, "train") + decoded(data, "val")) == set(TEXTS)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    fails(r"needs the package tiktoken: pip install 'multigate\[data\]'", data.tokenizer)


def test_words_that_name_no_tokenizer(tmp_path, monkeypatch):
    fails("unknown tokenizer 'bites': The kinds are bytes, bpe:SIZE", make_tokenizer, "bites")
    for word in ("bpe:256", "bpe:16k", "bpe:", "bpe:999999999"):
        fails(f"'{word}' must be bpe: and a number of ids from 257", make_tokenizer, word)
    absent = FileNotFoundError
    fails("there is no tokenizer file a/b.json", make_tokenizer, "a/b.json", error=absent)
    fails("there is no tokenizer file a.tiktoken", make_tokenizer, "a.tiktoken", error=absent)
    (tmp_path / "x.json").write_text("{}")
    fails("x.json is not a tokenizer.json of the package", make_tokenizer, str(tmp_path / "x.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    fails(
        r"needs the package tokenizers: pip install 'multigate\[train\]'", make_tokenizer, "bpe:300"
    )


def test_tokenizers_travel_to_other_processes(tmp_path, ranks):
    path = other_tokenizer(tmp_path, lambda spec: rename_eot(spec, "<stop>"))
    for tokenizer in (ByteTokenizer(), make_tokenizer(path, eot="<stop>"), ranks):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.entry() == tokenizer.entry()
        assert (again.eot, again.vocab_size) == (tokenizer.eot, tokenizer.vocab_size)
        pairs = zip(tokenizer.encode_batch(TEXTS), again.encode_batch(TEXTS), strict=True)
        assert all(np.array_equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("word", ["bytes", "bpe:300", "json", "tiktoken"])
def test_a_prepared_folder_decodes_by_itself(tmp_path, source, bpe, ranks, word):
    if word in ("json", "tiktoken"):
        tokenizer = {"json": bpe, "tiktoken": ranks}[word]
        file = tmp_path / f"mine.{word}"
        file.write_bytes(tokenizer.to_bytes())
        quiet(small(tmp_path / "out", source, tokenizer=str(file)))
        file.unlink()
    else:
        quiet(small(tmp_path / "out", source, tokenizer=word))
    (tmp_path / "source/some.jsonl").unlink()
    data = open_data(tmp_path / "out")
    assert sorted(decoded(data, "train") + decoded(data, "val")) == sorted(TEXTS)
    assert max(int(s.max()) for n in data.splits() for s in data.split(n).shards) < data.vocab_size


# The split


def test_the_held_out_share():
    many = [f"document {k}".encode() for k in range(20000)]
    for share in (0.01, 0.3):
        held = sum(split_of(t, 0, share) == "val" for t in many)
        assert held / len(many) == pytest.approx(share, abs=4 * (share / len(many)) ** 0.5)
    splits = [[split_of(t, seed, 0.3) for t in many[:500]] for seed in (0, 1, -1)]
    assert splits[0] != splits[1] != splits[2] != splits[0]
    small_share = {t for t in many if split_of(t, 0, 0.01) == "val"}
    assert small_share < {t for t in many if split_of(t, 0, 0.02) == "val"}
    assert {split_of(t, 0, 0.0) for t in many[:100]} == {"train"}


def test_the_split_follows_from_the_text_alone(tmp_path):
    texts = TEXTS + TEXTS[:20] + ["", TEXTS[3]]
    mixed = random.Random(0).sample(texts, len(texts))
    splits = {}
    for name, order in (("one", texts), ("two", mixed)):
        source = write_source(tmp_path / name, "jsonl", order)
        data = quiet(small(tmp_path / f"{name}-out", source))
        splits[name] = [sorted(decoded(data, s)) for s in ("train", "val")]
        assert not set(splits[name][0]) & set(splits[name][1])
        assert data.split("train").documents + data.split("val").documents == len(texts) - 1
    assert splits["one"] == splits["two"]
    other = quiet(small(tmp_path / "seed", str(tmp_path / "one"), seed=1))
    assert sorted(decoded(other, "val")) != splits["one"][1]


def test_given_splits(tmp_path, source):
    for kind in ("jsonl", "folder"):
        write_source(tmp_path / kind, kind, OTHERS)
    config = small(
        tmp_path / "out", source, val=(str(tmp_path / "jsonl"),), test=(str(tmp_path / "folder"),)
    )
    data = quiet(config)
    assert data.splits() == ["train", "val", "test"]
    assert decoded(data, "train") == TEXTS
    assert decoded(data, "val") == decoded(data, "test") == OTHERS
    data = quiet(replace(config, out=tmp_path / "held", val=()))
    assert decoded(data, "test") == OTHERS
    assert sorted(decoded(data, "val") + decoded(data, "train")) == sorted(TEXTS)


def test_several_sources_and_a_limit(tmp_path, source):
    other = write_source(tmp_path / "other", "folder", OTHERS)
    config = small(tmp_path / "out", source, val_share=0.0)
    config = replace(config, sources=(other, source))
    assert decoded(quiet(config), "train") == OTHERS + TEXTS
    limited = replace(config, out=tmp_path / "limited", limit_mb=0.001)
    texts = decoded(quiet(limited), "train")
    assert texts == (OTHERS + TEXTS)[: len(texts)]
    assert sum(len(t.encode()) for t in texts[:-1]) < 1000 <= sum(len(t.encode()) for t in texts)


def test_the_tokenizer_is_not_trained_on_what_is_held_out(tmp_path):
    held = [f"{'zq' * 10}{k}" for k in range(400)]
    held = [t for t in held if split_of(t.encode(), 0, 0.2) == "val"]
    source = write_source(tmp_path / "source", "jsonl", TEXTS + held)
    data = quiet(small(tmp_path / "out", source, tokenizer="bpe:350"))
    assert set(held) <= set(decoded(data, "val"))
    assert "zq" not in data.tokenizer()._inner.get_vocab()
    limited = quiet(small(tmp_path / "limited", source, tokenizer="bpe:350", bpe_sample_mb=0.002))
    texts = [t for t in TEXTS if split_of(t.encode(), 0, 0.2) == "train"]
    sizes = np.cumsum([len(t.encode()) for t in texts])
    count = int(np.searchsorted(sizes, 2000)) + 1
    assert limited.tokenizer().to_bytes() == train_bpe("bpe:350", texts[:count]).to_bytes()


# Processes, and going on


def test_the_number_of_processes_changes_nothing(tmp_path, source, monkeypatch):
    monkeypatch.setattr("multigate.data.units.CHUNK", 700)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    folders = []
    for processes in (1, 2, 3):
        folder = tmp_path / f"out{processes}"
        config = small(folder, source, tokenizer="bpe:300", processes=processes, unit_mb=0.01)
        quiet(config)
        folders.append(contents(folder))
    assert folders[0] == folders[1] == folders[2]
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_spawned_processes_do_the_same(tmp_path, source, monkeypatch):
    quiet(small(tmp_path / "one", source, tokenizer="bpe:300"))
    monkeypatch.setattr(encode, "start_method", lambda: "spawn")
    quiet(small(tmp_path / "two", source, tokenizer="bpe:300", processes=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_document_longer_than_a_unit(tmp_path):
    source = write_source(tmp_path / "source", "folder", [TEXTS[0], "long " * 5000, TEXTS[1]])
    data = quiet(small(tmp_path / "out", source, val_share=0.0))
    assert decoded(data, "train") == [TEXTS[0], "long " * 5000, TEXTS[1]]


def in_child(function, *args):
    """Run it in a forked process; its exit code."""
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    child.join(60)
    return child.exitcode


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def die(chunk):
    kill_me()


def killed_at_rename(config, number):
    """Prepare, but be killed before or after the `number // 2`-th rename."""
    rename, count = os.replace, iter(range(10**6))

    def replace_or_die(*args):
        at = next(count)
        if 2 * at == number:
            kill_me()
        rename(*args)
        if 2 * at + 1 == number:
            kill_me()

    os.replace = replace_or_die
    quiet(config)


@pytest.mark.parametrize(("kind", "step"), [("jsonl", 1), ("hub", 5)])
def test_killed_anywhere_and_run_again_it_is_as_if_nothing_had_happened(tmp_path, kind, step):
    """Killed before and after every rename that a preparation makes."""
    source = write_source(tmp_path / "source", kind, TEXTS)
    val = (write_source(tmp_path / "val", "folder", OTHERS),)
    config = small(tmp_path / "whole", source, val=val, tokenizer="bpe:300", unit_mb=0.006)
    quiet(config)
    whole = contents(tmp_path / "whole")
    assert len([name for name in whole if name.startswith("train-")]) == 3
    # Six files, and progress.json twice before the four units and after each.
    for number in range(0, 24, step):
        broken = replace(config, out=tmp_path / f"broken{number}")
        assert in_child(killed_at_rename, broken, number) == -signal.SIGKILL
        quiet(broken)
        assert contents(broken.out) == whole
    assert in_child(killed_at_rename, replace(config, out=tmp_path / "last"), 24) == 0


def test_killed_in_the_middle_of_a_unit(tmp_path, source, monkeypatch):
    """With other processes at work, which end with the one that was killed."""
    monkeypatch.setattr("multigate.data.units.CHUNK", 500)
    config = small(tmp_path / "whole", source, tokenizer="bpe:300", processes=2)
    quiet(config)
    whole = open_data(tmp_path / "whole")
    broken = replace(config, out=tmp_path / "broken")
    for share in (0.3, 0.7, 0.9):
        limit = share * (whole.split("train").tokens + whole.split("val").tokens)

        def kill_late(progress, limit=limit):
            if progress.tokens > limit:
                pids = [str(child.pid) for child in multiprocessing.active_children()]
                (tmp_path / "pids").write_text(" ".join(pids))
                kill_me()

        assert in_child(prepare, broken, kill_late) == -signal.SIGKILL
        assert (tmp_path / "broken/progress.json").exists()
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    notes = []
    # The tokenizer is there already.
    monkeypatch.setattr("multigate.data.bpe.train_bpe", None)
    prepare(broken, lambda progress: notes.append(progress.note))
    assert "going on after" in notes[0]
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_going_on_does_not_read_again_what_is_finished(tmp_path):
    source = write_source(tmp_path / "source", "folder", TEXTS)
    config = small(tmp_path / "whole", source)
    quiet(config)
    broken = replace(config, out=tmp_path / "broken")

    def kill_late(progress):
        if progress.documents > 40:
            kill_me()

    assert in_child(prepare, broken, kill_late) == -signal.SIGKILL
    done = json.loads((tmp_path / "broken/progress.json").read_text())["next"]["part"]
    assert done > 20
    stamp = os.stat(tmp_path / "source/000.txt")
    (tmp_path / "source/000.txt").write_bytes(b"\xff" * stamp.st_size)
    os.utime(tmp_path / "source/000.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    quiet(broken)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_going_on_inside_the_first_of_two_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("multigate.data.hub.BATCH", 4)
    sources = tuple(
        write_source(tmp_path / name, "hub", texts)
        for name, texts in (("one", TEXTS), ("two", OTHERS))
    )
    config = replace(small(tmp_path / "out", "", val_share=0.0), sources=sources)

    def kill_late(progress):
        if progress.documents > 20:
            kill_me()

    assert in_child(prepare, config, kill_late) == -signal.SIGKILL
    assert decoded(quiet(config), "train") == TEXTS + OTHERS


def test_a_full_disk_loses_nothing(tmp_path, source, monkeypatch):
    config = small(tmp_path / "whole", source)
    quiet(config)
    full = replace(config, out=tmp_path / "full")
    sync, count = os.fsync, iter(range(10**6))

    def no_space(descriptor):
        if next(count) >= 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        fails("no space left for .*full: what is finished is kept", quiet, full, error=OSError)
    assert list((tmp_path / "full").glob("train-*.bin"))
    assert not list((tmp_path / "full").glob("*.bin.tmp"))
    quiet(full)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_one_preparation_at_a_time(tmp_path, source):
    config, codes = small(tmp_path / "out", source), []

    def second():
        fails("another process is preparing .*out: wait", quiet, config, error=OSError)

    def meanwhile(progress):
        if not progress.note:
            codes.append(in_child(second))

    prepare(config, meanwhile)
    assert set(codes) == {0}
    assert not (tmp_path / "out/.lock").exists()


def test_a_worker_that_dies(tmp_path, source, monkeypatch):
    monkeypatch.setattr(encode, "_encode_in_worker", die)
    config = small(tmp_path / "out", source, tokenizer="bpe:300", processes=2)
    fails("a process that encodes text has died", quiet, config, error=ChildProcessError)
    monkeypatch.undo()
    assert set(decoded(quiet(config), "train")) < set(TEXTS)


def test_an_error_in_a_worker_is_the_same_sentence(tmp_path):
    """Of a source, while workers are at work; and of a tokenizer, inside of one."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b"x\n")
    config = small(tmp_path / "out", str(tmp_path / "a.jsonl"), tokenizer="bpe:300", processes=2)
    fails("a.jsonl line 61 is not JSON", quiet, config)
    path = other_tokenizer(tmp_path, lambda spec: None)
    source = write_source(tmp_path / "source", "jsonl", TEXTS)
    config = small(tmp_path / "two", source, tokenizer=path, eot="e", processes=2)
    fails("turns ordinary text into its end of text", quiet, config)
    assert multiprocessing.active_children() == []


# Settings, and what is said


def test_finished_data_is_left_alone(tmp_path, source):
    config = small(tmp_path / "out", source)
    quiet(config)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()}
    notes = []
    data = prepare(replace(config, processes=2), lambda progress: notes.append(progress.note))
    assert notes == [f"{tmp_path / 'out'} holds this data already."]
    assert data.fingerprint == open_data(tmp_path / "out").fingerprint
    for changes, sentence in (
        ({"seed": 1}, "holds data of other settings: seed was 0 and is now 1; choose another fold"),
        ({"tokenizer": "bpe:300"}, "tokenizer was 'bytes' and is now 'bpe:300'"),
        ({"val_share": 0.1}, "val_share was 0.2 and is now 0.1"),
    ):
        fails(sentence, quiet, replace(config, **changes))
    stat = os.stat(source)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    fails("the train files have changed since", quiet, config)
    Path(source).write_bytes(jsonl(TEXTS[1:]))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    fails("the train files have changed since", quiet, config)
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()} == before


def test_half_finished_data_of_other_settings_is_left_alone(tmp_path, source):
    config = small(tmp_path / "out", source)

    def kill_late(progress):
        if progress.documents > 30:
            kill_me()

    assert in_child(prepare, config, kill_late) == -signal.SIGKILL
    before = contents(tmp_path / "out")
    fails("a half-finished preparation of other settings: seed was 0 and is now 3", quiet,
          replace(config, seed=3))  # fmt: skip
    before.pop(".lock", None)
    assert contents(tmp_path / "out") == before


def test_a_try_that_finished_nothing_is_not_in_the_way(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "good.md").write_text("good")
    config = PrepareConfig(out=tmp_path / "out", sources=(str(tmp_path),), tokenizer="bpe:300")
    config = replace(config, processes=1, pattern="*.*", val_share=0.0)
    fails("bad.txt is not UTF-8 text", quiet, config)
    data = quiet(replace(config, pattern="*.md", tokenizer="bytes"))
    assert decoded(data, "train") == ["good"]
    files = {"data.json", "train-00000.bin"}
    assert {f.name for f in (tmp_path / "out").iterdir()} == files


def test_nothing_to_prepare(tmp_path, source):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "null.jsonl").write_bytes(jsonl([None, ""]))
    out = tmp_path / "out"
    for name in ("empty.txt", "null.jsonl"):
        config = small(out, str(tmp_path / name))
        fails(rf"the sources for train hold no text \(.*{name}\)", quiet, config)
        assert not out.exists()
    empty = (str(tmp_path / "empty.txt"),)
    fails("the sources for val hold no text", quiet, small(out, source, val=empty))
    assert not out.exists()
    single = write_source(tmp_path / "single", "folder", ["one"])
    for seed in range(30):
        if split_of(b"one", seed, 0.5) == "val":
            config = small(out, single, val_share=0.5, seed=seed)
            fails(r"all documents \(1\) fell into the held-out share of 0.5", quiet, config)
    notes = []
    seed = next(s for s in range(30) if split_of(b"one", s, 0.5) == "train")
    config = small(out, single, val_share=0.5, seed=seed)
    data = prepare(config, lambda progress: notes.append(progress.note))
    assert data.splits() == ["train"]
    assert notes[-1] == (
        f"{out}: train 4 tokens of 1 documents, no val, the documents are too few to hold any out."
    )


def test_folders_that_cannot_be_written(tmp_path, source):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file/below"):
        fails(f"{out} cannot be written: ", quiet, small(out, source), error=OSError)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    config = small(tmp_path / "mine", source)
    fails(
        r"mine holds other files \(thesis.txt\) and no prepared data: choose a new", quiet, config
    )
    assert set(contents(tmp_path / "mine")) == {"thesis.txt"}


def test_settings_that_make_no_sense(tmp_path):
    for changes, sentence in (
        ({"val_share": 1.0}, "val_share must be at least 0 and below 1, got 1.0"),
        ({"val_share": -0.1}, "val_share must be at least 0"),
        ({"processes": -1}, "processes must not be negative, got -1"),
        ({"unit_mb": 0}, "unit_mb must be more than 0, got 0"),
        ({"limit_mb": -1.0}, "limit_mb must be more than 0, got -1.0"),
        ({"sources": ()}, "there must be at least one source"),
        ({"sources": "stdlib"}, "sources must be a tuple of sources, not one text"),
    ):
        fails(sentence, PrepareConfig, out=tmp_path, **changes)
    assert PrepareConfig(out=str(tmp_path)).out == tmp_path


def test_halves_of_surrogate_pairs(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "a\\ud83d\\ude42b"}\n{"text": "c\\ud83dd"}\n{"text": "\\ude42\\ud83d"}\n'
    )
    data = quiet(small(tmp_path / "out", str(tmp_path / "a.jsonl"), val_share=0.0))
    assert decoded(data, "train") == ["a🙂b", "c�d", "��"]
    assert data.split("train").bytes == 6 + 5 + 6


def test_what_is_reported(tmp_path):
    source = write_source(tmp_path / "source", "folder", TEXTS)
    reports = []
    data = prepare(small(tmp_path / "out", source), reports.append)
    reports, summary = reports[:-1], reports[-1]
    size = sum(len(t.encode()) for t in TEXTS)
    assert [r.total for r in reports] == [size] * len(reports)
    assert [r.bytes for r in reports] == sorted(r.bytes for r in reports)
    last = reports[-1]
    assert (last.bytes, last.documents) == (size, len(TEXTS))
    assert last.tokens == sum(data.split(s).tokens for s in data.splits()) == size + len(TEXTS)
    train, val = data.split("train"), data.split("val")
    assert summary.note == (
        f"{tmp_path / 'out'}: train {train.tokens:,} tokens of {train.documents} documents, "
        f"val {val.tokens:,} tokens of {val.documents} documents."
    )
    limited = []
    prepare(small(tmp_path / "limited", source, limit_mb=0.001), limited.append)
    assert limited[0].total == 1000


def test_the_bar(tmp_path, source):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    prepare(small(tmp_path / "out", source, tokenizer="bpe:300"), console=console)
    shown = console.file.getvalue()
    assert "training bpe:300 on the first text of the sources." in shown
    assert "tokens" in shown
    assert "kB" in shown
    prepare(small(tmp_path / "out", source, tokenizer="bpe:300"), console=console)
    assert "holds this data already" in console.file.getvalue()
