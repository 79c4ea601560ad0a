import gzip
import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparselib import paths
from sparselib.tasks import corpora
from sparselib.tasks.corpora import COLUMNS, END, load_corpus, pack


class ByteTokenizer:
    """Bytes shifted by one, END = 0: what ``pack`` needs of a tokenizer."""

    def token_to_id(self, token):
        return 0 if token == END else None

    def encode_batch(self, texts):
        return [type("Encoding", (), {"ids": [1 + byte for byte in text.encode()]}) for text in texts]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of data/corpora that a test may spoil."""
    folder = tmp_path / "corpora"
    shutil.copytree(paths.corpora_dir(), folder)
    monkeypatch.setattr(corpora, "corpora_dir", lambda: folder)
    return folder


def test_lm_ci_is_what_its_readme_says():
    corpus = load_corpus("lm_ci")
    readme = (paths.corpora_dir() / "README.md").read_text("utf-8")
    assert list(corpus) == ["train", "validation"]
    for split, dataset in corpus.items():
        assert dataset.column_names == list(COLUMNS)
        size = sum(len(text.encode()) for text in dataset["text"])
        assert f"| `lm_ci_{split}.jsonl.gz` | {len(dataset)} | {size:,} bytes |" in readme
        assert all(text.strip() for text in dataset["text"])
    assert not set(corpus["train"]["id"]) & set(corpus["validation"]["id"])


def test_every_source_has_a_licence_file_that_names_its_licence():
    rows = [row for dataset in load_corpus("lm_ci").values() for row in dataset]
    for source, licence in {(row["source"], row["license"]) for row in rows}:
        notice = (paths.corpora_dir() / "licenses" / f"{source}.md").read_text("utf-8")
        assert f"`{licence}`" in notice
        assert "https://" in notice
    for row in rows:
        if row["source"] == "plos":
            assert row["id"].removeprefix("plos/") in (paths.corpora_dir() / "licenses/plos.md").read_text("utf-8")


def test_unknown_corpus_is_refused():
    with pytest.raises(ValueError, match="'lm_c4'.*'lm_ci'"):
        load_corpus("lm_c4")


def test_missing_file_is_named(copy):
    (copy / "lm_ci_validation.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match="lm_ci_validation.jsonl.gz is missing: .*git checkout"):
        load_corpus("lm_ci")


def test_altered_file_is_refused(copy):
    path = copy / "lm_ci_train.jsonl.gz"
    rows = gzip.decompress(path.read_bytes()).replace(b"the", b"teh", 1)
    path.write_bytes(gzip.compress(rows))
    with pytest.raises(ValueError, match="lm_ci_train.jsonl.gz was altered.*git checkout"):
        load_corpus("lm_ci")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"lm_ci_validation.jsonl.gz": "0"}'])
def test_spoiled_checksums_are_refused(copy, content):
    (copy / "checksums.json").write_text(content)
    with pytest.raises(ValueError, match="checksums.json holds no checksum of lm_ci_train.jsonl.gz"):
        load_corpus("lm_ci")


def test_missing_checksums_are_named(copy):
    (copy / "checksums.json").unlink()
    with pytest.raises(FileNotFoundError, match="checksums.json is missing"):
        load_corpus("lm_ci")


def test_checksums_list_every_shipped_file():
    folder = paths.corpora_dir()
    assert set(json.loads((folder / "checksums.json").read_text())) == {p.name for p in folder.glob("*.gz")}


@given(
    st.lists(st.text(min_size=1, max_size=20).filter(str.strip), min_size=1, max_size=8),
    st.integers(min_value=1, max_value=9),
)
def test_windows_predict_every_token_once_and_in_order(texts, length):
    tokenizer = ByteTokenizer()
    stream = [token for encoding in tokenizer.encode_batch(texts) for token in (*encoding.ids, 0)]
    if len(stream) <= length:
        with pytest.raises(ValueError, match="length"):
            pack(texts, tokenizer, length)
        return
    windows = pack(texts, tokenizer, length)
    kept = (len(stream) - 1) // length * length
    assert windows.dtype == torch.int64 and windows.shape == (kept // length, length + 1)
    assert windows[:, 1:].flatten().tolist() == stream[1 : kept + 1]
    assert windows[:, :-1].flatten().tolist() == stream[:kept]


@pytest.mark.parametrize(
    ("documents", "length", "message"),
    [
        ([], 4, "documents = .*at least one"),
        (["good", " \n"], 4, r"documents\[1\]"),
        ("one string", 4, "a list of strings"),
        (["good text"], 0, "length = 0"),
        (["good text"], 2.5, "length = 2.5"),
        (["good"], 5, "length = 5: must be below the 5 tokens"),
    ],
)
def test_bad_input_to_pack_is_refused(documents, length, message):
    with pytest.raises(ValueError, match=message):
        pack(documents, ByteTokenizer(), length)


def test_a_tokenizer_without_end_is_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match="knows the token"):
        pack(["text"], Tokenizer(models.BPE()), 2)
