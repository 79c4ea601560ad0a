"""C4 from files of its own format in a folder, and from a hub that is not there."""

import gzip
import json

import huggingface_hub.constants
import pytest
import torch

from sparselib.tasks import c4
from sparselib.tasks.corpora import corpus_checksum, load_corpus, texts
from sparselib.tasks.sources import load_splits
from sparselib.training.config import DataConfig

DATA = DataConfig(corpus="c4", vocab_size=300, length=16)


def page(number):
    return f"Page {number} says that {number * 7} is a number, and so is {number * 11}."


def write(folder, split, shard, pages):
    row = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org/page"}
    lines = "".join(json.dumps({"text": text, **row}) + "\n" for text in pages)
    path = folder / f"c4-{split}.{shard:05d}-of-00002.json.gz"
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two small files for training, one for validation; no other cache, no network."""
    folder = tmp_path / "c4"
    folder.mkdir()
    write(folder, "train", 0, [page(number) for number in range(60)])
    write(folder, "train", 1, [page(number) for number in range(60, 120)] + ["  "])
    write(folder, "validation", 0, [page(number) for number in range(200, 230)])
    monkeypatch.setattr(c4, "c4_folder", lambda: folder)
    monkeypatch.setenv("SPARSELIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def no_folder(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(c4, "c4_folder", lambda: tmp_path / "local" / "c4")
    return tmp_path / "local" / "c4"


def test_files_in_the_folder_are_read_in_order(folder):
    assert list(texts("c4", "train")) == [page(number) for number in range(120)]
    assert list(texts("c4", "validation")) == [page(number) for number in range(200, 230)]
    assert list(load_corpus("c4")["train"].take(1)) == [{"text": page(0)}]


def test_validation_is_the_first_documents(folder, monkeypatch):
    monkeypatch.setattr(c4, "VALIDATION_DOCUMENTS", 4)
    assert list(texts("c4", "validation")) == [page(number) for number in range(200, 204)]


def taken(source, count, **settings):
    stream = source.batches(4, **settings)
    return torch.stack([next(stream)["tokens"] for _ in range(count)])


def test_a_stream_goes_on_where_it_stopped(folder):
    train = load_splits(DATA).train
    assert train.windows is None
    whole = taken(train, 60, seed=3)
    assert torch.equal(taken(train, 60, seed=3), whole)
    assert torch.equal(taken(train, 15, seed=3, skip=45), whole[45:])
    assert not torch.equal(taken(train, 60, seed=4), whole)


def test_every_pass_has_every_document_once_in_another_order(folder):
    splits = load_splits(DATA)
    stream = splits.train._documents(seed=0)
    passes = [[next(stream) for _ in range(120)] for _ in range(2)]
    assert passes[0] != passes[1]
    assert all(sorted(documents) == sorted(page(number) for number in range(120)) for documents in passes)


def test_spans_of_a_stream_are_lost_alike_after_a_stop(folder):
    data = DataConfig(corpus="c4", vocab_size=400, length=32, objective="span", target_length=16)
    train = load_splits(data).train
    first, again = train.batches(2, seed=1), train.batches(2, seed=1, skip=5)
    for _ in range(5):
        next(first)
    one, other = next(first), next(again)
    assert all(torch.equal(one[name], other[name]) for name in ("source", "mask", "target", "target_mask"))


def test_a_stream_without_text_is_refused(folder):
    splits = load_splits(DATA)
    for path in folder.glob("c4-train*"):
        path.write_bytes(gzip.compress(b'{"text": " ", "url": ""}\n'))
    with pytest.raises(ValueError, match="corpus = 'c4'"):
        next(splits.train.batches(1, seed=0))


def test_without_hub_and_folder_the_error_says_what_to_put_where(no_folder):
    with pytest.raises(ConnectionError, match="allenai/c4 could not be read") as error:
        load_splits(DATA)
    for part in ("c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz", str(no_folder)):
        assert part in str(error.value)


def test_a_hub_that_is_lost_on_the_way_says_so(no_folder):
    def rows():
        yield {"text": "good"}
        raise TimeoutError("read timed out")

    read = c4.documents(rows())
    assert next(read) == "good"
    with pytest.raises(ConnectionError, match="TimeoutError: read timed out.*put c4-train"):
        next(read)


def test_a_split_without_files_is_named(folder):
    (folder / "c4-validation.00000-of-00002.json.gz").unlink()
    with pytest.raises(FileNotFoundError, match="no file like c4-validation"):
        load_splits(DATA)


def test_a_damaged_file_is_not_called_a_missing_hub(folder):
    path = folder / "c4-train.00001-of-00002.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="a file in .* cannot be read"):
        list(texts("c4", "train"))


def test_the_checksum_follows_files_and_revision(folder, monkeypatch):
    first = {split: corpus_checksum("c4", split) for split in ("train", "validation")}
    write(folder, "train", 1, [page(number) for number in range(60, 121)])
    assert corpus_checksum("c4", "train") != first["train"]
    assert corpus_checksum("c4", "validation") == first["validation"] != first["train"]
    for path in folder.iterdir():
        path.unlink()
    hub = corpus_checksum("c4", "train")
    monkeypatch.setattr(c4, "REVISION", "another")
    assert corpus_checksum("c4", "train") != hub
