"""Held-out text when there are few files: the end of each."""

import gzip

import pytest

from multigate.data import PrepareConfig, prepare
from runs import document, quiet, run, small


def texts(data, split):
    """The documents of a split."""
    whole = b"".join(bytes(shard) for shard in data.split(split).shards)
    return [text.decode() for text in whole.split(b"\0")[:-1]]


def lines(seed, count=300):
    return "\n".join(document(seed + k, words=10).strip() for k in range(count)) + "\n"


def prepared(folder, **settings):
    config = PrepareConfig(out=folder / "data", processes=1, **settings)
    return prepare(config, console=quiet())


def test_of_one_file_the_end_is_held_out(tmp_path):
    text = lines(1)
    (tmp_path / "book.txt").write_text(text)
    data = prepared(tmp_path, sources=(str(tmp_path / "book.txt"),), val_share=0.1)
    (train,), (val,) = texts(data, "train"), texts(data, "val")
    assert train + val == text
    assert train.endswith("\n")
    assert len(val) / len(text) == pytest.approx(0.1, abs=0.01)
    assert data.split("val").documents == 1


def test_of_a_few_files_the_end_of_each(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    books = {f"{k}.txt": lines(1000 * k) for k in (1, 2)}
    for name, text in books.items():
        (folder / name).write_text(text)
    with gzip.open(folder / "3.txt.gz", "wt") as file:
        file.write(lines(3000))
    data = prepared(tmp_path, sources=(str(folder),), val_share=0.1)
    joined = [a + b for a, b in zip(texts(data, "train"), texts(data, "val"), strict=True)]
    assert joined == [*books.values(), lines(3000)]


def test_many_files_stay_whole(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for k in range(40):
        (folder / f"{k}.txt").write_text(lines(100 * k, count=10))
    data = prepared(tmp_path, sources=(str(folder),), val_share=0.2)
    whole = {lines(100 * k, count=10) for k in range(40)}
    assert {*texts(data, "train"), *texts(data, "val")} == whole


def test_a_thousand_bytes_are_held_out_at_least(tmp_path):
    (tmp_path / "note.txt").write_text(lines(1, count=150))
    data = prepared(tmp_path, sources=(str(tmp_path / "note.txt"),), val_share=0.001)
    assert 900 < data.split("val").bytes < 1100


def test_what_is_too_short_to_cut_is_left_whole(tmp_path, monkeypatch):
    (tmp_path / "note.txt").write_text(lines(1, count=40))
    data = prepared(tmp_path, sources=(str(tmp_path / "note.txt"),))
    assert data.splits() == ["train"]
    with pytest.raises(ValueError, match="has no held-out text, its documents are too few"):
        run(small(data.folder, tmp_path / "runs"))


def test_val_sources_of_their_own_need_no_cut(tmp_path):
    (tmp_path / "a").write_text(lines(1))
    (tmp_path / "b").write_text(lines(7))
    sources = {"sources": (str(tmp_path / "a"),), "val": (str(tmp_path / "b"),)}
    data = prepared(tmp_path, **sources)
    assert texts(data, "train") == [lines(1)]
    assert texts(data, "val") == [lines(7)]


def test_a_line_that_never_ends_is_cut_where_it_must_be(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 9999 + "a\n")
    data = prepared(tmp_path, sources=(str(tmp_path / "a.txt"),), val_share=0.25)
    assert [len(t) for t in texts(data, "val")] == [5000]


def test_one_file_is_enough_to_train_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(lines(5, count=600))
    result, _, _ = run(small("book.txt", tmp_path / "runs", steps=4))
    assert result.val is not None
