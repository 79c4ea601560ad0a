"""The program of a Terraformer: halves on two residual streams, over a sequence that begins with the source.

Positions of a slot are counted from the source's first token, so that the target's lines in the caches follow the
source's. Only the target's embedded positions begin anew.
"""

from __future__ import annotations

from .layout import GROUP, Dense, Layout, halves, unembedding_shape
from .program import SELF, UNEMBEDDING, Program, Stream
from .program_memory import Cache


def make_program(layout: Layout, *sizes: int) -> Program:
    """The program of the layout's model; ``sizes`` as :class:`Program` takes them."""
    kind = TerraformerProgram if layout.config.architecture == "terraformer" else Program
    return kind(layout, *sizes)


class TerraformerProgram(Program):
    """As in :class:`Program`; ``remember`` runs the decoder over the source's vectors, both streams of ``given``."""

    @property
    def _most_keys(self) -> int:
        return self.max_len + self.source_len

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self.given = [self._take((self.rows + GROUP) * self.config.d_model) for _ in range(2)]

    def _decoder_halves(self) -> list[tuple[str, str | None]]:
        config = self.config
        return list(halves("decoder", config.n_layers, config.n_attentions, config.attention))

    def _decoder_caches(self) -> list[dict[str, Cache]]:
        made = [self._half_caches(kind, self.batch, self._most_keys) for _, kind in self._decoder_halves()]
        self.caches += [cache for caches in made for cache in caches.values()]
        return made

    def _half_caches(self, kind: str | None, slots: int, length: int) -> dict[str, Cache]:
        return self._cells(slots, length) if kind is None else self._attention_caches(kind, slots, length)

    def _half(self, name: str, kind: str | None, caches: dict[str, Cache], causal: bool = True) -> None:
        """The last stream is read, the first one gets the result, then they change places."""
        self._norm(f"{name}.norm")
        if kind is None:
            self._feedforward(name, caches)
        else:
            self._self_attention(name, kind, caches, causal)
        self._streams.reverse()

    def _encode(self) -> None:
        """One source at a time, all of its positions at once, in slot 0."""
        config = self.config
        self._begin("source_positions", streams=2)
        for name, kind in halves("encoder", config.n_encoder_layers, 1, config.attention_of_encoder):
            self._half(name, kind, self._half_caches(kind, 1, self.source_len), causal=False)
        if config.reversible_encoder:
            for y in reversed(self.given):
                self._norm("norm", y=y, z=self.z)  # for the stream alone
                self._streams.reverse()
            return
        self._norm("encoder_norm", y=self._q, z=self.z, other=self._streams[0].x)  # for the mean alone
        self._layer("encoder_output", Dense(config.d_model, config.d_model), SELF, self._q, self._attended)
        for z in self.given:
            self._streams = [Stream(self._attended)]
            self._norm("encoder_norm", z=z)

    def _remember(self) -> None:
        self._streams = [Stream(x) for x in self.given]
        self._decode()

    def _body(self) -> None:
        self._begin("positions", streams=2, relative=1)
        self._decode()

    def _decode(self) -> None:
        for (name, kind), caches in zip(self._decoder_halves(), self._decoder, strict=True):
            self._half(name, kind, caches)

    def _head(self) -> None:
        self._last = 1
        self._norm("norm", other=self._streams[0].x)
        self._layer("unembedding", unembedding_shape(self.config), UNEMBEDDING, self.z, self.logits)
