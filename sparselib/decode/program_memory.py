"""Where in the engine's memory a program reads and writes: what decoding remembers, then buffers.

What is remembered (keys, values, buckets, inputs of convolutions, cells) is one line a position for each of ``batch``
slots.
Letters: R = rows that can be at work at once; T = threads; S modules, d = d_model, f = d_ff.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LSHSizes
from .layout import ALIGN, GROUP, PANEL, Layout, Mult, Shape, attention_shapes, cross_shapes, unembedding_shape
from .products import C_SIZE, K_BLOCK
from .simd import TILE

SOURCE = ("source_keys", "source_values")


@dataclass(frozen=True)
class Cache:
    """Lines of ``line`` floats for each position of each slot: ``slots`` x ``length`` lines at ``offset`` in m.

    ``across``: a slot is stored as (line, length), so that one number of all positions is read in order.
    """

    offset: int
    slots: int
    length: int
    line: int
    across: bool = False


class Memory:
    """The memory ``m`` of a model's program: ``size`` floats."""

    def __init__(self, layout: Layout, batch: int, max_len: int, source_len: int, rows: int, threads: int):
        self.layout, self.config = layout, layout.config
        self.batch, self.max_len, self.source_len, self.rows, self.threads = batch, max_len, source_len, rows, threads
        self.size = 0
        self.caches: list[Cache] = []  # what decoding remembers of the tokens so far
        self.source_caches: list[Cache] = []  # keys and values of the encoder's output
        self._decoder = self._decoder_caches()
        self._make_buffers()

    def _take(self, size: int) -> int:
        """``size`` floats of m, from a cache line's start."""
        offset = self.size
        self.size += -(-size // ALIGN) * ALIGN
        return offset

    def _cache(self, slots: int, length: int, line: int, across: bool = False) -> Cache:
        return Cache(self._take(slots * length * line + ALIGN), slots, length, line, across)

    def _decoder_caches(self) -> list[dict[str, Cache]]:
        """What each decoder block remembers of the tokens so far, and of the source."""
        config, cross = self.config, self.config.is_encoder_decoder
        blocks = []
        for _ in range(config.n_layers):
            caches = self._attention_caches(config.attention, self.batch, self.max_len, cross)
            caches |= self._cells(self.batch, self.max_len)
            self.caches += caches.values()
            source = {name: self._cache(self.batch, self.source_len, config.d_model) for name in SOURCE if cross}
            self.source_caches += source.values()
            blocks.append(caches | source)
        return blocks

    def _attention_caches(self, kind: str, slots: int, length: int, cross: bool = False) -> dict[str, Cache]:
        """Keys, values, buckets and histories of convolutions of one attention, or with ``cross`` of a block's both."""
        caches = {name: self._cache(slots, length, self.config.d_model) for name in ("keys", "values")}
        if self.config.lsh is not None:
            caches["buckets"] = self._cache(slots, length, self.config.n_heads * self.config.lsh.n_hashes, across=True)
        return caches | {n: self._cache(slots, length, self._history_line()) for n in self._histories(kind, cross)}

    def _cells(self, slots: int, length: int) -> dict[str, Cache]:
        """Cells of the recurrent units beside one feedforward."""
        config = self.config
        units = range(1, config.sru_layers + 1) if config.sru_units else ()
        return {f"cell{i}": self._cache(slots, length, config.sru_units) for i in units}

    def _histories(self, kind: str, cross: bool) -> list[str]:
        names = ["input"] if "conv" in kind else []
        names += ["output"] if kind in ("conv", "mult_conv_output") else []
        return names + (["query"] if cross and self.config.cross_attention == "sparse" else [])

    @property
    def _pad(self) -> int:
        return max(self.config.kernel_size, self.config.v_kernel) // 2

    @property
    def _lanes(self) -> int:
        """Floats between one feature of all modules and the next: zeros on both sides, a whole number of tiles."""
        return -(-self.config.n_modules // GROUP) * GROUP + 2 * self._pad

    @property
    def _most_keys(self) -> int:
        """Positions that an attention may see."""
        return max(self.max_len, self.source_len)

    def _history_line(self) -> int:
        return self.config.d_model // self.config.n_modules * self._lanes

    def _make_buffers(self) -> None:
        config, rows, threads = self.config, self.rows, self.threads
        d, f, lines = config.d_model, config.d_ff, rows + GROUP  # a tile may read beyond the last row
        self._buffers = [self._take(lines * d) for _ in range(3)]  # of streams: two, and one to write to
        self.z, self._q, self._attended = (self._take(lines * d) for _ in range(3))
        self._out = self._take(2 * lines * d)  # of the dense feedforward, and of the recurrence beside it
        self._narrow, self._gates = self._take(2 * lines * config.sru_units), self._take(3 * lines * config.sru_units)
        self._low = self._take(lines * config.d_lowrank)
        self._hidden = self._take(lines * f)  # hidden units, or the controller's logits
        self._summed = self._take((threads * rows + lines) * d)  # of each thread's units, and of the recurrence
        self._line = self._take(threads * d)
        self._tile = self._take(threads * 2 * C_SIZE)
        self._scores = self._take(config.n_heads * self._most_keys)
        self._found_line = 0 if config.lsh is None else found_size(config.lsh, self._most_keys)
        self._found = self._take(threads * self._found_line)
        rounds = 0 if config.lsh is None else config.lsh.n_hashes
        self._order = self._take(config.n_heads * rounds * self.source_len)  # an encoder's positions by bucket
        mults = [s for s in self._shapes() if isinstance(s, Mult)]
        self._gated_line = max((gated_size(s) for s in mults), default=0)
        self._gated = self._take(threads * self._gated_line)
        self._sums_line = max((sums_size(s) for s in mults), default=0)
        self._sums = self._take(2 * threads * self._sums_line)
        self.logits = self._take(lines * config.vocab_size)
        self.given = [self.z]

    def _shapes(self) -> list[Shape]:
        config = self.config
        kinds = {config.attention, config.attention_of_encoder}
        shapes = [shape for kind in kinds for shape in attention_shapes(config, kind).values()]
        return [*shapes, *cross_shapes(config).values(), unembedding_shape(config)]


def found_size(sizes: LSHSizes, most_keys: int) -> int:
    """Numbers that a thread holds: the turned vector that is hashed, later positions found and their scores."""
    chunks = sizes.n_chunks_before + 1 + sizes.n_chunks_after
    found = sizes.n_hashes * chunks * min(sizes.chunk_len, most_keys) + 1
    return 2 * -(-max(found, max(sizes.factors) // 2) // ALIGN) * ALIGN


def gated_size(shape: Mult) -> int:
    """Floats of gated inputs that a thread holds at a time."""
    inputs = shape.d_in if shape.s <= GROUP else K_BLOCK
    return -(-shape.s // GROUP) * GROUP * inputs + ALIGN


def sums_size(shape: Mult) -> int:
    """Floats of a thread's sums over its share of the inputs, all outputs in whole tiles."""
    if shape.s <= GROUP:
        return 0
    return -(-shape.s // TILE) * -(-shape.d_out // shape.s // PANEL) * C_SIZE
