"""Vocabularies: byte-level BPE learned from a corpus's train split, and T5's 32,000 pieces. One interface for both.

``SENTINELS`` ids at the top may mark the spans that span corruption takes out: sentinel k is ``vocab_size - 1 - k``
and is written ``<extra_id_k>``. Id 0 never stands inside a document, so it also fills and starts sequences.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import require, require_size
from ..files import write_atomically
from ..paths import repository
from .corpora import STREAMED, corpus_checksum, texts
from .shipped import shipped_bytes, shipped_checksum

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

    from ..training.config import DataConfig

END = "<|end|>"  # BPE's name for what stands after every document
PAD = 0
SENTINELS = 100
SMALLEST = 256 + 1  # the bytes and END
LEARNED_FROM = 20_000  # documents of a stream that BPE is learned from
T5_FILE = "t5_spiece.model"


class Vocabulary(ABC):
    """Text to ids and back. ``pieces`` ids stand for text, ``sentinels`` above them for spans taken out.

    ``end``: the id after every document. ``checksum``: SHA-256 (hex) of what the pieces are.
    """

    def __init__(self, pieces: int, sentinels: int, end: int, checksum: str) -> None:
        self.pieces, self.sentinels, self.end, self.checksum = pieces, sentinels, end, checksum

    @property
    def vocab_size(self) -> int:
        """Pieces and sentinels."""
        return self.pieces + self.sentinels

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, no ``end`` added; names of special tokens inside a text are text."""

    @abstractmethod
    def _decode_pieces(self, ids: list[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; end and padding are left out. Errors: ValueError for an id that is none."""
        for token in ids:
            require(0 <= token < self.vocab_size, "ids", token, f"in 0 .. vocab_size - 1 = {self.vocab_size - 1}")
        parts = []
        for special, group in groupby(ids, key=lambda token: token >= self.pieces):
            found = list(group)
            names = (f"<extra_id_{self.vocab_size - 1 - token}>" for token in found)
            parts.append("".join(names) if special else self._decode_pieces(found))
        return "".join(parts)


class BPE(Vocabulary):
    """Byte-level pairs: every byte has a token, so every text comes back exactly. ``END`` is token 0 = ``PAD``."""

    def __init__(self, tokenizer: Tokenizer, sentinels: int) -> None:
        super().__init__(tokenizer.get_vocab_size(), sentinels, PAD, _digest(tokenizer.to_str()))
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # "<|end|>" inside a text is text, not the end

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def _decode_pieces(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class T5(Vocabulary):
    """T5's unigram pieces: 0 padding, 1 end, 2 unknown, then text, then the sentinels: 32,100 ids.

    Runs of white space become one blank, and letters that C4's English does not know become id 2: only text that has
    neither comes back exactly.
    """

    def __init__(self, processor: SentencePieceProcessor, checksum: str) -> None:
        super().__init__(processor.get_piece_size(), SENTINELS, processor.eos_id(), checksum)
        self._processor = processor

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def _decode_pieces(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


def vocabulary_of(data: DataConfig) -> Vocabulary:
    """The vocabulary that ``data`` asks for; BPE gets sentinels, as its topmost ids, for the objective "span" only.

    Errors: as :func:`bpe_tokenizer` and :func:`t5_tokenizer`.
    """
    if data.tokenizer == "t5":
        return t5_tokenizer()
    return bpe_tokenizer(data.corpus, data.vocab_size, SENTINELS if data.objective == "span" else 0)


def t5_tokenizer() -> T5:
    """T5's vocabulary, from the shipped file. Errors: FileNotFoundError, ValueError for a missing or altered file."""
    from sentencepiece import SentencePieceProcessor

    content = shipped_bytes(T5_FILE)
    return T5(SentencePieceProcessor(model_proto=content), shipped_checksum(T5_FILE))


def bpe_tokenizer(corpus: str, vocab_size: int, sentinels: int = 0) -> BPE:
    """A vocabulary of exactly ``vocab_size`` ids, ``sentinels`` of them on top, learned from ``corpus`` or cached.

    A cached file that is damaged is learned again; a cache folder that cannot be written to only costs a
    warning. Errors: ValueError for a size below 257 + sentinels or above what the corpus can give, and those of
    ``load_corpus``.
    """
    require_size("vocab_size", vocab_size, SMALLEST + sentinels)
    pieces = vocab_size - sentinels
    path = _cache_file(corpus, pieces)
    tokenizer = _read(path)
    if tokenizer is None:
        tokenizer = _learn(corpus, pieces)
        _write(path, tokenizer)
    return BPE(tokenizer, sentinels)


def cache_dir() -> Path:
    """$SPARSELIB_CACHE, else _build/cache in the repository: what is there can be thrown away at any time."""
    return Path(os.environ.get("SPARSELIB_CACHE") or repository() / "_build" / "cache")


def cache_name(corpus: str) -> str:
    """``corpus`` as part of a file's name: a path loses its folder and its brackets."""
    return Path(corpus).name.replace("{", "").replace("}", "")


def _learn(corpus: str, pieces: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus, "train", LEARNED_FROM if corpus == STREAMED else None), trainer)
    reached = tokenizer.get_vocab_size()
    require(reached == pieces, "vocab_size", pieces, f"at most {reached}, all that {corpus} can give")
    return tokenizer


def _cache_file(corpus: str, pieces: int) -> Path:
    import tokenizers

    recipe = f"{corpus_checksum(corpus, 'train')} {pieces} {tokenizers.__version__}"
    return cache_dir() / "tokenizers" / f"{cache_name(corpus)}-{pieces}-{_digest(recipe)[:16]}.json"


def _write(path: Path, tokenizer: Tokenizer) -> None:
    text = tokenizer.to_str()
    try:
        write_atomically(path, json.dumps({"sha256": _digest(text), "tokenizer": text}))
    except OSError as error:
        warnings.warn(f"tokenizer not kept ({error}): set $SPARSELIB_CACHE to a writable folder", stacklevel=3)


def _read(path: Path) -> Tokenizer | None:
    """The tokenizer in ``path``, or None where there is none that is whole."""
    from tokenizers import Tokenizer

    try:
        kept = json.loads(path.read_text("utf-8"))
        whole = kept["sha256"] == _digest(kept["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Tokenizer.from_str(kept["tokenizer"]) if whole else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
