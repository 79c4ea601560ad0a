"""Decoding with packed weights, a token a call: the fast face of a Transformer or a Terraformer.

The threads of an engine run the program's kernels side by side (kernels.py); the caller's thread is the first of them.
Letters: B sequences (slots), L positions of a chunk, V = vocab_size.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..checks import require, require_size
from . import kernels, operations
from .memory import allocate, require_memory
from .pack import Packed
from .program import PARTS, units_of_a_thread
from .program_memory import Cache
from .program_terraformer import make_program

CHUNK = 32  # positions of a prompt worked on at a time


def usable_threads() -> int:
    """Hardware threads that this process may use: the engine's default."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class State:
    """A copy of what an engine remembered: positions (B,), source lengths (B,) and the lines of its caches."""

    position: np.ndarray
    source: np.ndarray
    lines: tuple[np.ndarray, ...]


class Engine:
    """Decodes ``batch`` independent sequences of up to ``max_len`` tokens.

    ``max_len`` is at most the config's (default: that), ``source_len`` the longest source of a model that reads one
    (default: ``max_len``), ``threads`` the threads that work (default: as many as the process may use).
    Kernels are compiled on the first engine of a dtype and cached on disk. One engine serves one caller at a time.

    Errors: ValueError naming the field, its value and what is allowed, the state as before the call; MemoryError, with
    the numbers, for caches that do not fit.
    """

    def __init__(
        self,
        packed: Packed,
        batch: int = 1,
        max_len: int | None = None,
        source_len: int | None = None,
        threads: int | None = None,
    ):
        self.packed, self.config = packed, packed.config
        longest = self.config.max_len
        self.max_len = longest if max_len is None else max_len
        self.source_len = self.max_len if source_len is None else source_len
        self.threads = usable_threads() if threads is None else threads
        for name, value in (("batch", batch), ("threads", self.threads)):
            require_size(name, value)
        for name, value in (("max_len", self.max_len), ("source_len", self.source_len)):
            require_size(name, value)
            require(value <= longest, name, value, f"at most the model's max_len = {longest}")
        self.batch, has_source = batch, self.config.has_source
        self._reads_on = self.config.architecture == "terraformer"  # the target stands behind the source
        at_once = self.max_len if self.config.architecture == "prefix_lm" else CHUNK
        rows = max(batch, at_once, self.source_len * has_source)
        sizes = (batch, self.max_len, self.source_len * has_source, rows, self.threads)
        self.program = make_program(packed.layout, *sizes)
        require_memory(4 * self.program.size, f"an engine with batch {batch} and max_len {self.max_len}")
        self._m = allocate(self.program.size, np.float32)
        self._m.fill(0)  # now, so that no token waits for the system to make a page
        self._rows = np.zeros((rows, 5), np.int64)
        self._everyone = np.arange(batch)
        self._position = np.zeros(batch, np.int64)
        self._source = np.zeros(batch, np.int64)  # lengths; 0: none yet
        self._clock = np.zeros(len(self.program.operations), np.int64)
        self._logits = self._buffer(self.program.logits, rows, self.config.vocab_size)
        self._team = _Team(self)

    # --- sequences ---

    @property
    def position(self) -> np.ndarray:
        """Tokens so far in each sequence: (B,), a copy."""
        return self._position.copy()

    def start(
        self,
        source: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        memory: np.ndarray | None = None,
        sequences: Sequence[int] | None = None,
    ) -> None:
        """Begin all sequences, or ``sequences``, anew; a model with a source reads ``source`` (B, T) here.

        ``mask`` (B, T): 1 = real, 0 = padding, which stands at the end. It is not read: of encoders that attend by
        hashing, which sort the padding too, a row's result is the model's for its source alone. ``memory`` (B, T,
        d_model), the encoder's output (of a Terraformer: in both streams), in place of a source: the only way where
        the encoder was left out of the packed model.
        """
        slots, has_source = self._slots(sequences), self.config.has_source
        require(has_source or mask is None, "mask", "given", "given with a source only")
        given = [name for name, value in (("source", source), ("memory", memory)) if value is not None]
        require(
            len(given) == has_source,
            "source",
            given,
            f"one of source and memory for a model with an encoder, {'' if has_source else 'not '}given here",
        )
        require(
            source is None or self.program.encode is not None,
            "source",
            "given",
            "memory: this model was packed without its encoder",
        )
        if has_source:
            shown = self._check_source(source, memory, len(slots))
            lengths = self._check_mask(mask, shown.shape[:2])
            for row, slot in enumerate(slots):
                self._read_source(shown[row, : lengths[row]], int(slot))
            self._source[slots] = lengths
        self._position[slots] = 0

    def step(self, tokens: ArrayLike, sequences: Sequence[int] | None = None) -> np.ndarray:
        """The next token of every sequence, or of ``sequences``: (B,) or one int -> logits (B, V).

        The array returned is the engine's own: the next call writes over it.
        """
        tokens = np.asarray(tokens)
        require(tokens.ndim < 2, "tokens.shape", tokens.shape, "(batch,)")
        return self._advance(tokens.reshape(-1, 1), sequences)

    def prefill(
        self, tokens: ArrayLike, sequences: Sequence[int] | None = None, prefix_length: int | None = None
    ) -> np.ndarray:
        """The next L tokens at once: (B, L), or (L,) for one sequence -> logits (B, V) after the last.

        ``prefix_length``, for a prefix-LM's first tokens: so many of them are seen from everywhere.
        """
        tokens = np.asarray(tokens)
        require(0 < tokens.ndim < 3, "tokens.shape", tokens.shape, "(batch, length)")
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        if prefix_length is None:
            return self._advance(tokens, sequences)
        slots = self._slots(sequences)
        architecture = self.config.architecture
        require(
            architecture == "prefix_lm", "prefix_length", prefix_length, f"given to a prefix_lm, not a {architecture}"
        )
        require(self.config.lsh is None, "prefix_length", prefix_length, "None: attention by hashing has no prefix")
        require_size("prefix_length", prefix_length, 0)
        require(prefix_length <= tokens.shape[1], "prefix_length", prefix_length, f"at most {tokens.shape[1]}")
        started = int(self._position[slots].max())
        require(started == 0, "prefix_length", prefix_length, "given with the first tokens only")
        self._check_next(tokens, slots)
        # One by one, since all of a prefix has to be at work at once.
        return np.concatenate(
            [self._advance(row[None], [slot], prefix_length).copy() for row, slot in zip(tokens, slots, strict=True)]
        )

    def rewind(self, position: int, sequences: Sequence[int] | None = None) -> None:
        """Forget all tokens from ``position`` on. Costs nothing: every position has its own lines in the caches."""
        slots = self._slots(sequences)
        require_size("position", position, 0)
        least = int(self._position[slots].min())
        require(position <= least, "position", position, f"at most {least}, the tokens so far")
        self._position[slots] = position

    def state(self) -> State:
        """A copy of all that is remembered; :meth:`restore` takes it back."""
        lines = [self._lines(c)[slot, :n].copy() for c in self.program.caches for slot, n in enumerate(self._held())]
        lines += [
            self._lines(c)[slot, :n].copy() for c in self.program.source_caches for slot, n in enumerate(self._source)
        ]
        return State(self._position.copy(), self._source.copy(), tuple(lines))

    def restore(self, state: State) -> None:
        """Go on from a copy made by an engine of the same model and batch."""
        held = state.position + state.source if self._reads_on else state.position
        caches = [(cache, held) for cache in self.program.caches]
        caches += [(cache, state.source) for cache in self.program.source_caches]
        fits = len(state.position) == self.batch and len(state.lines) == len(caches) * self.batch
        fits = fits and all(
            line.shape[1] == cache.line for line, (cache, _) in zip(state.lines[:: self.batch], caches, strict=True)
        )
        require(
            fits, "state", f"{len(state.lines)} caches of {len(state.position)} sequences", "of this model and batch"
        )
        longest = int(state.position.max()), int(state.source.max())
        require(longest[0] <= self.max_len, "state.position", longest[0], f"at most max_len = {self.max_len}")
        require(longest[1] <= self.source_len, "state.source", longest[1], f"at most source_len = {self.source_len}")
        lines = iter(state.lines)
        for cache, lengths in caches:
            for slot, n in enumerate(lengths):
                self._lines(cache)[slot, :n] = next(lines)
        self._position[:], self._source[:] = state.position, state.source

    def close(self) -> None:
        """End the engine's threads; the last reference to it does so as well."""
        self._team.close()

    # --- times ---

    def clear_clock(self) -> None:
        self._clock[:] = 0

    def shares(self) -> dict[str, float]:
        """What share of the time since :meth:`clear_clock` each part of the model took, barriers included."""
        parts = self.program.operations["part"]
        return {name: float(self._clock[parts == i].sum() / self._clock.sum()) for i, name in enumerate(PARTS)}

    def share_of_a_block(self) -> float:
        """The same for one decoder block, the mean of all."""
        start, end = self.program.body
        return float(self._clock[start + 1 : end].sum() / self._clock.sum() / self.config.n_layers)

    # --- inside ---

    def _advance(self, tokens: np.ndarray, sequences: Sequence[int] | None, prefix_length: int = 0) -> np.ndarray:
        slots = self._slots(sequences)
        self._check_next(tokens, slots)
        (start, middle), (_, end), n = self.program.body, self.program.head, len(slots)
        chunk = len(self._rows) // n
        for first in range(0, tokens.shape[1], chunk):
            part = tokens[:, first : first + chunk]
            is_last = first + chunk >= tokens.shape[1]
            self._set_rows(part, slots, self._held()[slots], prefix_length)
            self._team.run((start, end if is_last else middle), part.size, n)
            self._position[slots] += part.shape[1]
        return self._logits[part.size - n : part.size]

    def _held(self) -> np.ndarray:
        """Lines that each sequence has in the decoder's caches."""
        return self._position + self._source if self._reads_on else self._position

    def _set_rows(self, tokens: np.ndarray, slots: np.ndarray, position: np.ndarray, visible: int = 0) -> None:
        """Rows of a chunk (n, L), position by position, so that the last n are the last position's.

        Each sees the keys up to its own, and at least the first ``visible``.
        """
        rows = self._rows[: tokens.size].reshape(tokens.shape[1], len(slots), 5)
        rows[:, :, operations.TOKEN] = tokens.T
        rows[:, :, operations.SLOT] = slots
        rows[:, :, operations.POSITION] = position + np.arange(tokens.shape[1])[:, None]
        rows[:, :, operations.VISIBLE] = np.maximum(rows[:, :, operations.POSITION] + 1, visible)
        rows[:, :, operations.SOURCE] = self._source[slots]

    def _read_source(self, source: np.ndarray, slot: int) -> None:
        """Keys and values of one sequence's tokens (T,), or of its encoder's output (T, d_model)."""
        n = len(source)
        zero = np.zeros(1, np.int64)
        if source.ndim == 1:
            self._set_rows(source[None], zero, zero, visible=n)
            self._team.run(self.program.encode, n, n)
        else:
            self._set_rows(np.zeros((1, n), np.int64), zero, zero)
            for given in self.program.given:
                self._buffer(given, n, self.config.d_model)[:] = source
        self._rows[:n, operations.SLOT] = slot
        if self._reads_on:  # from now on a position sees what came before it
            self._rows[:n, operations.VISIBLE] = self._rows[:n, operations.POSITION] + 1
        self._team.run(self.program.remember, n, n)

    def _buffer(self, offset: int, lines: int, line: int) -> np.ndarray:
        return self._m[offset : offset + lines * line].reshape(lines, line)

    def _lines(self, cache: Cache) -> np.ndarray:  # (slots, length, line)
        lines = self._buffer(cache.offset, cache.slots * cache.length, cache.line)
        if cache.across:
            return lines.reshape(cache.slots, cache.line, -1).swapaxes(1, 2)
        return lines.reshape(cache.slots, cache.length, -1)

    def _slots(self, sequences: Sequence[int] | None) -> np.ndarray:
        if sequences is None:
            return self._everyone
        slots = np.asarray(sequences)
        good = slots.ndim == 1 and len(slots) and slots.dtype.kind in "iu" and len(np.unique(slots)) == len(slots)
        good = good and slots.min() >= 0 and slots.max() < self.batch
        require(bool(good), "sequences", sequences, f"different numbers in 0 .. {self.batch - 1}")
        return slots.astype(np.int64)

    def _check_next(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        self.check_tokens(tokens, "tokens", len(slots))
        end = int(self._position[slots].max()) + tokens.shape[1]
        require(end <= self.max_len, "position", end - 1, f"below max_len = {self.max_len}")
        ready = not self.config.has_source or bool((self._source[slots] > 0).all())
        require(ready, "source", None, "given with start() first")

    def check_tokens(self, tokens: np.ndarray, name: str, n: int) -> None:
        """Errors: ValueError unless ``tokens`` (n, L) are ids of the vocabulary and L is at least 1."""
        vocab = self.config.vocab_size
        require(tokens.dtype.kind in "iu", f"{name}.dtype", str(tokens.dtype), "a whole number")
        require(len(tokens) == n, f"{name}.shape", tokens.shape, f"of {n} sequences")
        require(tokens.size > 0, f"{name}.shape", tokens.shape, "a sequence of at least one token")
        low, high = int(tokens.min()), int(tokens.max())
        require(low >= 0 and high < vocab, name, low if low < 0 else high, f"ids in 0 .. vocab_size - 1 = {vocab - 1}")

    def _check_source(self, source: ArrayLike | None, memory: np.ndarray | None, n: int) -> np.ndarray:
        d = self.config.d_model
        if source is not None:
            shown = np.asarray(source)
            require(shown.ndim == 2, "source.shape", shown.shape, "(batch, length)")
            self.check_tokens(shown, "source", n)
        else:
            shown = np.asarray(memory, np.float32)
            good = shown.ndim == 3 and len(shown) == n and shown.shape[1] > 0 and shown.shape[2] == d
            require(bool(good), "memory.shape", shown.shape, f"({n}, length, {d})")
            require(bool(np.isfinite(shown).all()), "memory", "NaN or infinite", "finite")
        require(
            shown.shape[1] <= self.source_len, "source.shape", shown.shape, f"at most source_len = {self.source_len}"
        )
        return shown

    def _check_mask(self, mask: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
        """Real positions of every row."""
        if mask is None:
            return np.full(shape[0], shape[1])
        real = np.asarray(mask)
        require(real.shape == shape, "mask.shape", real.shape, str(shape))
        require(bool(np.isin(real, (0, 1)).all()), "mask", "another number", "made of bool or 0 and 1")
        lengths = (real != 0).sum(1)
        good = ((real != 0) == (np.arange(shape[1]) < lengths[:, None])).all(1) & (lengths > 0)
        bad = np.flatnonzero(~good)[:1].tolist()
        require(not bad, "mask", f"otherwise in row {bad}", "1 for at least one token, then 0")
        return lengths


class _Team:
    """The threads of an engine. Between two tokens they look out for the next one for a while, then sleep."""

    def __init__(self, engine: Engine):
        threads, program, packed = engine.threads, engine.program, engine.packed
        units = np.zeros((threads, units_of_a_thread(engine.config, threads)), np.int64)
        self._sync, self._job = np.zeros(16, np.int64), np.zeros(16, np.int64)
        self._arrays = (packed.w, packed.p, engine._m, engine._rows)
        self._after = (units, self._sync, engine._clock)
        self._operations, self._threads = program.operations, threads
        self._wake = [threading.Event() for _ in range(threads - 1)]
        self._closed = False
        kernels.run(0, 1, self._operations, 0, 0, *self._arrays, 0, 0, *self._after)  # compiles
        arguments = (threads, self._operations, self._job, *self._arrays, *self._after)
        for tid, wake in enumerate(self._wake, 1):
            threading.Thread(target=_work, args=(tid, wake, arguments), daemon=True).start()
        weakref.finalize(engine, _close, self._job, self._wake)

    def run(self, section: tuple[int, int] | None, n: int, last: int) -> None:
        """Operations start .. end for n rows, on all threads; returns when all are done."""
        assert section is not None
        start, end = section
        require(not self._closed, "engine", "closed", "open")
        before = int(self._job[0])
        try:
            kernels.announce(self._job, start, end, n, last)
        finally:  # once announced, the others wait at barriers for this thread, whatever a Ctrl-C says
            if self._job[0] != before:
                for wake in self._wake:
                    wake.set()
                kernels.run(0, self._threads, self._operations, start, end, *self._arrays, n, last, *self._after)

    def close(self) -> None:
        self._closed = True
        _close(self._job, self._wake)


def _close(job: np.ndarray, wake: list[threading.Event]) -> None:
    kernels.announce(job, -1, 0, 0, 0)
    for event in wake:
        event.set()


def _work(tid: int, wake: threading.Event, arguments: tuple) -> None:
    job, seen = arguments[2], 0
    while True:
        wake.wait()
        wake.clear()
        seen = kernels.serve(tid, *arguments, seen)
        if job[1] < 0:
            return
