"""Byte-level BPE vocabularies, learned from a corpus's train split and kept in a cache on disk.

Every byte has a token, so every text can be written and read back exactly; ``END`` is token 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import require, require_size
from ..files import write_atomically
from ..paths import repository
from .corpora import END, corpus_checksum, load_corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALLEST = 256 + 1  # the bytes and END


def cache_dir() -> Path:
    """$SPARSELIB_CACHE, else _build/cache in the repository: what is there can be thrown away at any time."""
    return Path(os.environ.get("SPARSELIB_CACHE") or repository() / "_build" / "cache")


def bpe_tokenizer(corpus: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` tokens, learned from ``corpus`` (a second) or from the cache.

    A cached file that is damaged is learned again; a cache folder that cannot be written to only costs a
    warning. Errors: ValueError for a size below 257 or above what the corpus can give, and those of
    ``load_corpus``.
    """
    require_size("vocab_size", vocab_size, SMALLEST)
    path = _cache_file(corpus, vocab_size)
    tokenizer = _read(path)
    if tokenizer is None:
        tokenizer = _learn(corpus, vocab_size)
        _write(path, tokenizer)
    tokenizer.encode_special_tokens = True  # "<|end|>" inside a text is text, not the end
    return tokenizer


def _learn(corpus: str, vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(load_corpus(corpus)["train"]["text"], trainer)
    reached = tokenizer.get_vocab_size()
    require(reached == vocab_size, "vocab_size", vocab_size, f"at most {reached}, all that {corpus} can give")
    return tokenizer


def _cache_file(corpus: str, vocab_size: int) -> Path:
    import tokenizers

    recipe = f"{corpus_checksum(corpus, 'train')} {vocab_size} {tokenizers.__version__}"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    return cache_dir() / "tokenizers" / f"{corpus}-{vocab_size}-{key}.json"


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
