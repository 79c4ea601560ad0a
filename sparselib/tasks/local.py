"""The reader's own text: a file, or one file a split.

``notes.txt``: documents with a blank line between them. ``.parquet``, ``.jsonl``, ``.jsonl.gz``: rows with a column
``text``. ``notes_{split}.txt`` stands for notes_train.txt and notes_validation.txt. Where there is one file, a document
goes to validation by a hash of its text (one in ``SHARE``), so that the same text is never in both splits.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from pathlib import Path
from typing import Any

from ..checks import require

SUFFIXES = (".txt", ".parquet", ".jsonl", ".jsonl.gz")
SHARE = 20  # one document in so many is for validation


def is_local(corpus: str) -> bool:
    """Does ``corpus`` name a file that can be read as text?"""
    return corpus.endswith(SUFFIXES)


def local_documents(corpus: str, split: str) -> list[str]:
    """The documents of ``split``, in the file's order.

    Errors: FileNotFoundError; ValueError naming file and row for what cannot be read, for a row without text and for a
    split without documents.
    """
    path = _path(corpus, split)
    texts = [_text(row, f"{path}, row {number}") for number, row in enumerate(_rows(path), start=1)]
    if "{split}" not in corpus:
        texts = [text for text in texts if (zlib.crc32(text.encode()) % SHARE == 0) == (split == "validation")]
    require(len(texts) > 0, "corpus", corpus, f"a file with documents for {split}: write it as name_{{split}} and two")
    return texts


def local_checksum(corpus: str, split: str) -> str:
    """SHA-256 (hex) of the split's file. Errors: FileNotFoundError."""
    with _path(corpus, split).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_rows(content: bytes, name: str) -> list[dict[str, Any]]:
    """The rows of a file called ``name``. Errors: ValueError, or what its format raises, for what cannot be read."""
    if name.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    if name.endswith(".gz"):
        content = gzip.decompress(content)
    if name.endswith(".txt"):
        parts = re.split(r"\n[^\S\n]*\n", content.decode("utf-8-sig").replace("\r\n", "\n"))
        return [{"text": part.strip()} for part in parts if part.strip()]
    return [json.loads(line) for line in content.split(b"\n") if line.strip()]


def _path(corpus: str, split: str) -> Path:
    path = Path(corpus.replace("{split}", split))
    if not path.is_file():
        raise FileNotFoundError(f"corpus = {corpus!r}: there is no file {path.absolute()}")
    return path


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return parse_rows(path.read_bytes(), path.name)
    except (ValueError, EOFError, OSError, zlib.error) as error:  # what gzip, json, UTF-8 and parquet raise
        raise ValueError(f"{path} cannot be read as {''.join(path.suffixes)}: {error}") from None


def _text(row: Any, place: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    text = text if isinstance(text, str) else ""
    require(bool(text.strip()), place, row, "a row whose column 'text' has something in it")
    return text
