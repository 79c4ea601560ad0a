import gzip
import json
import shutil

import pytest

from sparselib import paths
from sparselib.tasks import shipped
from sparselib.tasks.corpora import COLUMNS, CORPORA, corpus_checksum, load_corpus, texts

SOURCES = ("wikipedia-vital", "sotu", "plos", "house-of-commons")


@pytest.fixture(scope="module")
def shipped_corpora():
    return {name: load_corpus(name) for name in CORPORA}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of data/corpora that a test may spoil."""
    folder = tmp_path / "corpora"
    shutil.copytree(paths.corpora_dir(), folder, ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(shipped, "corpora_dir", lambda: folder)
    return folder


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_what_its_readme_says(name, shipped_corpora):
    corpus = shipped_corpora[name]
    readme = (paths.corpora_dir() / "README.md").read_text("utf-8")
    assert list(corpus) == ["train", "validation"]
    counts = {}
    for split, dataset in corpus.items():
        assert dataset.column_names == list(COLUMNS)
        file = CORPORA[name].format(split=split)
        size = sum(len(text.encode()) for text in dataset["text"])
        on_disk = (paths.corpora_dir() / file).stat().st_size
        assert f"| `{file}` | {len(dataset):,} | {size:,} bytes | {on_disk:,} bytes |" in readme
        assert all(text.strip() for text in dataset["text"])
        for source in SOURCES:
            found = [len(row["text"].encode()) for row in dataset if row["source"] == source]
            counts.setdefault(source, []).append(f"{len(found):,}: {sum(found):,}")
    for source, columns in counts.items():
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{source}` |") and ": " in line)
        assert " | ".join(columns) in line
    assert not set(corpus["train"]["id"]) & set(corpus["validation"]["id"])


def test_every_source_has_a_licence_file_that_names_its_licence(shipped_corpora):
    rows = [row for corpus in shipped_corpora.values() for dataset in corpus.values() for row in dataset]
    notices = {source: (paths.corpora_dir() / "licenses" / f"{source}.md").read_text("utf-8") for source in SOURCES}
    assert {row["source"] for row in rows} == set(SOURCES)
    for source, licence in {(row["source"], row["license"]) for row in rows}:
        assert f"`{licence}`" in notices[source]
        assert "https://" in notices[source]
    entries = {entry.split(">")[0]: " ".join(entry.split()) for entry in notices["plos"].split("<https://doi.org/")}
    for row in rows:
        if row["source"] == "plos":
            entry = entries[row["id"].removeprefix("plos/")]
            assert ("(CC0 1.0)" in entry) == (row["license"] == "CC0-1.0")
            assert " ".join(row["title"].split()) in entry


def test_the_vocabulary_has_a_licence_file():
    notice = (paths.corpora_dir() / "licenses" / "t5-vocabulary.md").read_text("utf-8")
    assert "`t5_spiece.model`" in notice and "`Apache-2.0`" in notice


def test_texts_are_the_documents_in_order(shipped_corpora):
    documents = list(shipped_corpora["lm_ci"]["validation"]["text"])
    assert list(texts("lm_ci", "validation")) == documents
    assert list(texts("lm_ci", "validation", 3)) == documents[:3]


def test_unknown_corpus_is_refused():
    with pytest.raises(ValueError, match="'lm_c4'.*'lm_ci'"):
        load_corpus("lm_c4")
    with pytest.raises(ValueError, match=r"'novel.pdf'.*\.txt, \.parquet"):
        load_corpus("novel.pdf")


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
    shipped_files = {path.name for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
    assert set(json.loads((folder / "checksums.json").read_text())) == shipped_files - {"README.md", "checksums.json"}


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split = 'test'.*'train'"):
        corpus_checksum("lm_ci", "test")
