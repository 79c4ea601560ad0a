"""Where each weight of a model lies in the engine's two flat arrays: known from the config alone.

``w`` holds the matrices in the packed dtype, ``p`` what is always fp32: biases, norms, positions, rotations, and with
int8 one scale for each row of a matrix. A matrix is named as in the model's ``state_dict`` and stored with its rows
(outputs, hidden units, modules) 16, 8 or 1 side by side: (rows / side, columns, side), rows filled up to a multiple.
Letters: S modules of width M; F, k = a convolution's kernel over positions and modules; f = d_ff; r = d_lowrank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..config import ModelConfig

PANEL, GROUP, SINGLE = 16, 8, 1  # rows side by side: outputs, modules, hidden units
ALIGN = 64  # entries between starts: a cache line of every dtype
AS_IS, TRANSPOSED, TAPS = "as_is", "transposed", "taps"  # how the model's tensor becomes (rows, columns)


@dataclass(frozen=True)
class Matrix:
    """``rows`` x ``columns`` weights at ``offset`` in w; their scales at ``scale`` in p, -1 without scales."""

    name: str
    rows: int
    columns: int
    side: int
    source: str
    deviation: float  # standard deviation of random weights
    offset: int
    scale: int

    @property
    def size(self) -> int:
        """Entries of w that it takes, filled-up rows included."""
        return -(-self.rows // self.side) * self.side * self.columns


@dataclass(frozen=True)
class Vector:
    """``size`` numbers at ``offset`` in p; in random models ``initial``, None: the sinusoids of positions, and normal
    draws of this ``deviation`` around it."""

    name: str
    size: int
    offset: int
    initial: float | None
    deviation: float


@dataclass(frozen=True)
class Dense:
    """y = x W + b."""

    d_in: int
    d_out: int


@dataclass(frozen=True)
class Mult:
    """A multiplicative layer with ``s`` modules."""

    d_in: int
    d_out: int
    s: int


@dataclass(frozen=True)
class Conv:
    """A convolution over ``length`` positions and ``width`` modules, of ``s`` modules."""

    d: int
    s: int
    length: int
    width: int


Shape = Dense | Mult | Conv


def attention_shapes(config: ModelConfig, kind: str) -> dict[str, Shape]:
    """The layers of a self-attention by their names in the model; those of a chain come in order."""
    d, s, length = config.d_model, config.n_modules, config.kernel_size
    dense, mult = Dense(d, d), Mult(d, d, s)
    conv, conv_v = Conv(d, s, length, length), Conv(d, s, length, config.v_kernel)
    if kind == "dense":
        return {"q": dense, "k": dense, "v": dense, "output": dense}
    if kind == "mult":
        return {"q": mult, "k": mult, "v": mult, "output": mult}
    if kind == "conv":
        return {"q": conv, "k": conv, "v": conv_v, "output": conv}
    shapes: dict[str, Shape] = {"shared": mult, "q": conv, "k": conv, "v": conv_v}
    if kind == "mult_conv_output":
        shapes |= {"output.layers.0": mult, "output.layers.1": conv}
    return shapes


def cross_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The same for the attention to the encoder."""
    d, s, length = config.d_model, config.n_modules, config.kernel_size
    shapes: dict[str, Shape] = {"key": Dense(d, d), "value": Dense(d, d)}
    if config.cross_attention == "dense":
        return shapes | {"query": Dense(d, d), "output": Dense(d, d)}
    return shapes | {"query.layers.0": Mult(d, d, s), "query.layers.1": Conv(d, s, length, length)}


def recurrent_shapes(config: ModelConfig) -> dict[str, Dense]:
    """The same for the recurrent branch beside a feedforward: down, the gates of each unit, up."""
    d, u, n = config.d_model, config.sru_units, config.sru_layers
    gates = {f"layers.{i}.gates": Dense(u, 3 * u) for i in range(1, n + 1)}
    return {"layers.0": Dense(d, u), **gates, f"layers.{n + 1}": Dense(u, d)}


def halves(stack: str, n_blocks: int, n_attentions: int, kind: str) -> Iterator[tuple[str, str | None]]:
    """The halves of a reversible stack in order: name, and the attention's kind, None for a feedforward."""
    kinds = ([kind] * n_attentions + [None]) * n_blocks
    return ((f"{stack}.halves.{i}", of_half) for i, of_half in enumerate(kinds))


@dataclass
class Layout:
    """All matrices and vectors of a model; ``encoder`` False leaves an encoder's out."""

    config: ModelConfig
    dtype: str
    encoder: bool = True
    matrices: dict[str, Matrix] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    w_size: int = 0
    p_size: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self._matrix("embedding.weight", config.vocab_size, config.d_model, SINGLE, deviation=1.0)
        if config.architecture == "terraformer":
            self._terraformer()
        else:
            if config.is_encoder_decoder and self.encoder:
                self._stack("encoder", config.n_encoder_layers, config.attention_of_encoder, cross=False)
            self._stack("stack", config.n_layers, config.attention, cross=config.is_encoder_decoder)
        self.layer("unembedding", unembedding_shape(config))

    def _terraformer(self) -> None:
        config = self.config
        if self.encoder:
            self._positions("source_positions")
            for name, kind in halves("encoder", config.n_encoder_layers, 1, config.attention_of_encoder):
                self._half(name, kind)
            if not config.reversible_encoder:
                self.layer("encoder_output", Dense(config.d_model, config.d_model))
                self._norm("encoder_norm")
        self._positions("positions")
        for name, kind in halves("decoder", config.n_layers, config.n_attentions, config.attention):
            self._half(name, kind)
        self._norm("norm")

    def _half(self, name: str, kind: str | None) -> None:
        self._norm(f"{name}.norm")
        if kind is None:
            self._feedforward(name)
        else:
            self._attention(f"{name}.attention", kind)

    def _positions(self, name: str) -> None:
        self._vector(f"{name}.table", self.config.max_len * self.config.d_model, None)

    def _attention(self, name: str, kind: str) -> None:
        for part, shape in attention_shapes(self.config, kind).items():
            self.layer(f"{name}.{part}", shape)
        if self.config.lsh is not None:
            n_hashes, turns = self.config.lsh.n_hashes, sum(self.config.lsh.factors) // 2
            self._vector(f"{name}.rotations", self.config.d_model * n_hashes * turns, deviation=1.0)

    def _stack(self, name: str, n_layers: int, kind: str, cross: bool) -> None:
        config = self.config
        self._positions(f"{name}.positions")
        for block in (f"{name}.blocks.{i}" for i in range(n_layers)):
            self._norm(f"{block}.attention_norm")
            self._attention(f"{block}.attention", kind)
            if cross:
                self._norm(f"{block}.cross_norm")
                for part, shape in cross_shapes(config).items():
                    self.layer(f"{block}.cross.{part}", shape)
            self._norm(f"{block}.feedforward_norm")
            self._feedforward(block)
        self._norm(f"{name}.norm")

    def _norm(self, name: str) -> None:
        self._vector(f"{name}.weight", self.config.d_model, 1.0)
        self._vector(f"{name}.bias", self.config.d_model)

    def layer(self, name: str, shape: Shape) -> None:
        if isinstance(shape, Dense):
            self._matrix(f"{name}.weight", shape.d_out, shape.d_in, PANEL)
            self._vector(f"{name}.bias", shape.d_out)
        elif isinstance(shape, Mult):
            self._matrix(f"{name}.D", shape.s, shape.d_in, GROUP, TRANSPOSED, deviation=0.5)
            self._matrix(f"{name}.E", shape.d_out // shape.s, shape.d_in, PANEL, TRANSPOSED)
            self._vector(f"{name}.bias", shape.d_out)
        else:
            module, taps = shape.d // shape.s, shape.length * shape.width
            deviation = math.sqrt(2 / (2 * taps * module))
            self._matrix(f"{name}.weight", module, taps * module, PANEL, TAPS, deviation)
            self._vector(f"{name}.bias", module)

    def _feedforward(self, block: str) -> None:
        config, name = self.config, f"{block}.feedforward"
        if config.sru_units:
            self._norm(f"{block}.recurrence_norm")
            for layer, shape in recurrent_shapes(config).items():
                self.layer(f"{block}.recurrence.{layer}", shape)
        d, f, dense = config.d_model, config.d_ff, config.feedforward == "dense"
        self._matrix(f"{name}.w1", f, d, PANEL if dense else SINGLE)
        if dense:
            self._matrix(f"{name}.w2", d, f, PANEL, TRANSPOSED)
        else:
            self._matrix(f"{name}.w2", f, d, SINGLE)
        if config.hidden_bias:
            self._vector(f"{name}.b1", f)
        self._vector(f"{name}.b2", d)
        if config.feedforward == "sparse":
            self._matrix(f"{name}.c1", config.d_lowrank, d, PANEL, TRANSPOSED)
            self._matrix(f"{name}.c2", f, config.d_lowrank, PANEL, TRANSPOSED)
            if config.controller_bias:
                self._vector(f"{name}.bc", f)
        elif not dense:
            self._matrix(f"{name}.c", config.ff_sparsity, d, PANEL, TRANSPOSED)

    def _matrix(
        self, name: str, rows: int, columns: int, side: int, source: str = AS_IS, deviation: float | None = None
    ) -> None:
        deviation = math.sqrt(2 / (rows + columns)) if deviation is None else deviation  # Glorot's
        scale = self._vector(f"{name}.scale", rows).offset if self.dtype == "int8" else -1
        matrix = Matrix(name, rows, columns, side, source, deviation, self.w_size, scale)
        self.matrices[name] = matrix
        self.w_size += _aligned(matrix.size)

    def _vector(self, name: str, size: int, initial: float | None = 0.0, deviation: float = 0.0) -> Vector:
        vector = self.vectors[name] = Vector(name, size, self.p_size, initial, deviation)
        self.p_size += _aligned(size)
        return vector

    def named(self) -> Iterator[Vector]:
        """The vectors that the model has, which are all but the scales."""
        return (vector for vector in self.vectors.values() if not vector.name.endswith(".scale"))


def unembedding_shape(config: ModelConfig) -> Shape:
    d, v = config.d_model, config.vocab_size
    return Dense(d, v) if config.loss_sparsity == 1 else Mult(d, v, config.loss_sparsity)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
