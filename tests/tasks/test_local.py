import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.tasks.corpora import corpus_checksum, load_corpus
from sparselib.tasks.local import local_documents, parse_rows

TEXTS = [f"Document {number} has\nsome lines." for number in range(200)]


def write(path, texts):
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts), "utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
    else:
        lines = "".join(json.dumps({"text": text, "id": 1}, ensure_ascii=False) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


@pytest.mark.parametrize("suffix", [".txt", ".parquet", ".jsonl", ".jsonl.gz"])
def test_one_file_gives_both_splits(tmp_path, suffix):
    corpus = load_corpus(write(tmp_path / f"mine{suffix}", TEXTS))
    train, validation = list(corpus["train"]["text"]), list(corpus["validation"]["text"])
    assert sorted(train + validation) == sorted(TEXTS)
    assert 2 <= len(validation) <= 25
    assert [text for text in TEXTS if text in set(train)] == train  # in the file's order


@pytest.mark.parametrize("suffix", [".txt", ".parquet", ".jsonl", ".jsonl.gz"])
def test_two_files_are_the_splits(tmp_path, suffix):
    write(tmp_path / f"mine_train{suffix}", TEXTS[:5])
    write(tmp_path / f"mine_validation{suffix}", TEXTS[5:7])
    name = str(tmp_path / f"mine_{{split}}{suffix}")
    corpus = load_corpus(name)
    assert list(corpus["train"]["text"]) == TEXTS[:5] and list(corpus["validation"]["text"]) == TEXTS[5:7]
    assert corpus_checksum(name, "train") != corpus_checksum(name, "validation")


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)))
def test_jsonl_keeps_every_text(texts):
    """Among them texts with the line separators that JSON leaves as they are."""
    texts = [*texts, "a\u2028b\x85c"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    assert [row["text"] for row in parse_rows(lines, "mine.jsonl")] == texts


def test_the_same_text_is_never_in_both_splits(tmp_path):
    corpus = load_corpus(write(tmp_path / "mine.txt", TEXTS * 2))
    assert not set(corpus["train"]["text"]) & set(corpus["validation"]["text"])


def test_blank_lines_part_documents(tmp_path):
    path = tmp_path / "mine_train.txt"
    path.write_bytes("\ufeffone\r\nstill one\r\n \t\r\n\r\n\r\ntwo\r\n".encode())
    assert local_documents(str(tmp_path / "mine_{split}.txt"), "train") == ["one\nstill one", "two"]


def test_the_checksum_is_of_the_content(tmp_path):
    first = corpus_checksum(write(tmp_path / "mine.txt", TEXTS), "train")
    assert corpus_checksum(write(tmp_path / "other.txt", TEXTS), "train") == first
    assert corpus_checksum(write(tmp_path / "mine.txt", TEXTS[1:]), "train") != first


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.jsonl", b'{"text": "good"}\n{"text": " "}\n', r"mine.jsonl, row 2 = .*column 'text'"),
        ("mine.jsonl", b'{"words": "good"}\n', "mine.jsonl, row 1 = .*column 'text'"),
        ("mine.jsonl", b'{"text": 5}\n', "mine.jsonl, row 1 = .*column 'text'"),
        ("mine.jsonl", b"[1]\n", "mine.jsonl, row 1 = .*column 'text'"),
        ("mine.jsonl", b"not json\n", "mine.jsonl cannot be read as .jsonl"),
        ("mine.jsonl.gz", b"no gzip", "mine.jsonl.gz cannot be read as .jsonl.gz"),
        ("mine.jsonl.gz", gzip.compress(b'{"text": "good"}' * 99, mtime=0)[:-9], "mine.jsonl.gz cannot be read"),
        ("mine.parquet", b"no parquet", "mine.parquet cannot be read as .parquet"),
        ("mine.txt", b"\xff\xfe", "mine.txt cannot be read as .txt"),
        ("mine.txt", b"one document", r"mine.txt'.*documents for validation: .*\{split\}"),
        ("mine.txt", b" \n\n", "mine.txt'.*documents for train"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*mine.txt"):
        load_corpus(str(tmp_path / "mine.txt"))
    write(tmp_path / "mine_train.txt", TEXTS)
    with pytest.raises(FileNotFoundError, match="there is no file .*mine_validation.txt"):
        load_corpus(str(tmp_path / "mine_{split}.txt"))
