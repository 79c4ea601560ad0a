"""Sizes of a model, in one frozen and validated object; what it weighs and what a decoded token costs.

Letters of the papers: d_model, d_ff; N = ff_sparsity (1 unit in N is active), r = d_lowrank (rank of the controller),
S = n_modules, M = d_model/S, F = kernel_size, S_loss = loss_sparsity. Light on purpose: nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .checks import require, require_choice, require_multiple, require_number, require_size

TRANSFORMERS = ("decoder", "encoder", "encoder_decoder", "prefix_lm")
ARCHITECTURES = (*TRANSFORMERS, "terraformer")
FEEDFORWARDS = ("dense", "sparse", "block", "switch")
CONTROLLERS = ("paper", "reference")
ATTENTIONS = ("dense", "mult", "conv", "mult_conv", "mult_conv_output")
HASHING = ("dense", "mult_conv")  # attentions that can hash
CROSS_ATTENTIONS = ("dense", "sparse")
POSITIONS = ("learned", "sinusoidal", "shifted")
PRESETS = ("paper_800m", "paper_17b", "laptop", "smoke")
VARIANTS = ("dense", "ff", "qkv", "ff_qkv", "ff_qkv_loss")


@dataclass(frozen=True, kw_only=True)
class LSHSizes:
    """How positions are hashed and cut in chunks.

    ``n_hashes`` rounds with ``n_buckets`` each: an even int, or a tuple of such whose product counts, each hashed on
    its own (so many buckets cost few rotations). Chunks of ``chunk_len`` positions also see ``n_chunks_before`` and
    ``n_chunks_after`` neighbours. The layers use full attention for lengths up to ``full_below`` (0: never).
    Errors: ValueError naming the field, its value, what is allowed.
    """

    n_hashes: int
    n_buckets: int | tuple[int, ...]
    chunk_len: int
    n_chunks_before: int = 1
    n_chunks_after: int = 0
    full_below: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.n_buckets, list):  # as it comes from a file
            object.__setattr__(self, "n_buckets", tuple(self.n_buckets))
        for field in ("n_hashes", "chunk_len"):
            require_size(field, getattr(self, field))
        for field in ("n_chunks_before", "n_chunks_after", "full_below"):
            require_size(field, getattr(self, field), minimum=0)
        even = bool(self.factors) and all(type(n) is int and n >= 2 and n % 2 == 0 for n in self.factors)
        require(even, "n_buckets", self.n_buckets, "an even int of at least 2, or a tuple of such")

    @property
    def factors(self) -> tuple[int, ...]:
        return self.n_buckets if isinstance(self.n_buckets, tuple) else (self.n_buckets,)

    @property
    def padding_bucket(self) -> int:
        """Number of the bucket behind all others, which holds the padding."""
        return math.prod(self.factors)

    @property
    def window(self) -> int:
        """W: as many positions as a chunk and those before it hold."""
        return self.chunk_len * (self.n_chunks_before + 1)


Attention = Literal["dense", "mult", "conv", "mult_conv", "mult_conv_output"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that fixes a :class:`~sparselib.models.Transformer` or :class:`~sparselib.models.Terraformer`.

    Sizes: ``n_layers`` blocks in the decoder (or in the encoder of an encoder-only model), ``n_encoder_layers`` in the
    encoder of an encoder-decoder, ``max_len`` positions in the position table. That is ``learned``, or fixed
    ``sinusoidal``, or the latter read from a random start while training, ``shifted``.

    Feedforward: ``sparse`` is the paper's section 3.1 (one unit in every ``ff_sparsity`` = N active, chosen by a
    controller of rank ``d_lowrank``); ``block`` and ``switch`` cut ``d_ff`` in ``ff_sparsity`` experts of which one is
    active. ``controller`` takes the paper's text or the reference code's reading of it (see
    :class:`~sparselib.layers.selector.Selector`); ``hidden_bias`` is b1, ``controller_bias`` a bias on the logits.

    Attention: ``mult``, ``conv`` and ``mult_conv`` are the variants of figure 5 (``mult_conv`` has no output layer;
    ``mult_conv_output`` adds one). ``encoder_attention`` is that of an encoder-decoder's encoder (None: as
    ``attention``), ``value_kernel_size`` the width over modules of the V kernel (None: ``kernel_size``; the reference
    code: 1). In the paper each module is a head; ``modules_are_heads=False`` lifts that (reference code).

    ``loss_sparsity`` = 1 is the dense output layer. ``sru_units`` > 0 puts a branch of ``sru_layers`` recurrent units
    of that width beside every feedforward. ``lsh`` makes the self-attentions, which must be ``dense`` or ``mult_conv``,
    attend by hashing (None: to all).

    Terraformer alone: ``n_attentions`` in a decoder block, ``reversible_encoder`` (else it is trained with its
    activations kept, and its streams are joined at its end), ``two_swaps`` of its streams in every encoder block (else
    one), ``ff_chunk`` > 0 works through the feedforward so many positions at a time. Errors: ValueError naming the
    field, its value, what is allowed.
    """

    vocab_size: int
    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    n_encoder_layers: int = 0
    architecture: Literal["decoder", "encoder", "encoder_decoder", "prefix_lm", "terraformer"] = "decoder"
    max_len: int = 512
    dropout: float = 0.0
    positions: Literal["learned", "sinusoidal", "shifted"] = "learned"
    feedforward: Literal["dense", "sparse", "block", "switch"] = "dense"
    ff_sparsity: int = 64
    d_lowrank: int = 64
    temperature: float = 0.1
    hard_share: float = 0.3
    controller: Literal["paper", "reference"] = "paper"
    hidden_bias: bool = True
    controller_bias: bool = False
    attention: Attention = "dense"
    encoder_attention: Attention | None = None
    cross_attention: Literal["dense", "sparse"] = "dense"
    n_modules: int = 16
    kernel_size: int = 3
    value_kernel_size: int | None = None
    modules_are_heads: bool = True
    loss_sparsity: int = 1
    lsh: LSHSizes | None = None
    sru_units: int = 0
    sru_layers: int = 1
    n_attentions: int = 2
    reversible_encoder: bool = True
    two_swaps: bool = True
    ff_chunk: int = 0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "d_ff", "n_heads", "n_layers", "max_len", "loss_sparsity"):
            require_size(field, getattr(self, field))
        require_choice("architecture", self.architecture, ARCHITECTURES)
        require_choice("positions", self.positions, POSITIONS)
        require_choice("feedforward", self.feedforward, FEEDFORWARDS)
        require_choice("attention", self.attention, ATTENTIONS)
        require_choice("cross_attention", self.cross_attention, CROSS_ATTENTIONS)
        if self.encoder_attention is not None:
            require_choice("encoder_attention", self.encoder_attention, ATTENTIONS)
        require_size("n_encoder_layers", self.n_encoder_layers, minimum=int(self.has_source))
        require(
            self.has_source or self.n_encoder_layers == 0,
            "n_encoder_layers",
            self.n_encoder_layers,
            f"0 when architecture is {self.architecture!r}",
        )
        for field in ("dropout", "temperature", "hard_share"):
            require_number(field, getattr(self, field))
        for field in ("sru_units", "ff_chunk"):
            require_size(field, getattr(self, field), minimum=0)
        for field in ("sru_layers", "n_attentions"):
            require_size(field, getattr(self, field))
        for field in ("hidden_bias", "controller_bias", "modules_are_heads", "reversible_encoder", "two_swaps"):
            require(isinstance(getattr(self, field), bool), field, getattr(self, field), "True or False")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        require_multiple("d_model", self.d_model, self.n_heads, "n_heads")
        require_multiple("vocab_size", self.vocab_size, self.loss_sparsity, "loss_sparsity")
        if isinstance(self.lsh, Mapping):  # as it comes from a file
            object.__setattr__(self, "lsh", LSHSizes(**self.lsh))
        for field in ("attention", "encoder_attention"):
            fits = self.lsh is None or getattr(self, field) in (None, *HASHING)
            require(fits, field, getattr(self, field), f"one of {', '.join(map(repr, HASHING))} with lsh")
        self._check_architecture()
        self._check_feedforward()
        self._check_modules()

    def _check_architecture(self) -> None:
        """What is the Terraformer's alone is not to be set for another, which would not heed it."""
        if self.architecture == "terraformer":
            return  # cross_attention may be "sparse": the presets set it whatever the architecture
        for field in ("n_attentions", "reversible_encoder", "two_swaps", "ff_chunk"):
            default = type(self).__dataclass_fields__[field].default
            allowed = f"{default!r} when architecture is {self.architecture!r}"
            require(getattr(self, field) == default, field, getattr(self, field), allowed)

    def _check_feedforward(self) -> None:
        require_choice("controller", self.controller, CONTROLLERS)
        require(self.temperature > 0, "temperature", self.temperature, "above 0")
        require(0 <= self.hard_share <= 1, "hard_share", self.hard_share, "in [0, 1]")
        if self.feedforward != "dense":
            require_size("ff_sparsity", self.ff_sparsity, minimum=2)
            require_multiple("d_ff", self.d_ff, self.ff_sparsity, "ff_sparsity")
            require_size("d_lowrank", self.d_lowrank)

    def _check_modules(self) -> None:
        if not self.has_modules:
            return
        require_size("n_modules", self.n_modules)
        require_multiple("d_model", self.d_model, self.n_modules, "n_modules")
        for field, size in (("kernel_size", self.kernel_size), ("value_kernel_size", self.v_kernel)):
            require_size(field, size)
            require(size % 2 == 1, field, size, "odd, so that a module has as many neighbours on both sides")
        require(
            not self.modules_are_heads or self.n_modules == self.n_heads,
            "n_modules",
            self.n_modules,
            f"n_heads = {self.n_heads} (each module is a head) unless modules_are_heads=False",
        )

    @property
    def is_encoder_decoder(self) -> bool:
        return self.architecture == "encoder_decoder"

    @property
    def has_source(self) -> bool:
        """Whether the model takes two sequences, a source and a target."""
        return self.is_encoder_decoder or self.architecture == "terraformer"

    @property
    def attentions_in_block(self) -> int:
        """Self-attentions of a decoder block."""
        return self.n_attentions if self.architecture == "terraformer" else 1

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder"

    @property
    def attention_of_encoder(self) -> Attention:
        return self.encoder_attention or self.attention

    @property
    def v_kernel(self) -> int:
        return self.kernel_size if self.value_kernel_size is None else self.value_kernel_size

    @property
    def has_modules(self) -> bool:
        """Whether some attention of the model is made of modules."""
        kinds = [self.attention]
        if self.has_source:
            kinds.append(self.attention_of_encoder)
        return any(kind != "dense" for kind in kinds) or (self.is_encoder_decoder and self.cross_attention == "sparse")


# Sizes that no variant changes, then (d_ff with dense attention, d_ff with sparse attention). Raising d_ff keeps the
# number of weights when the attention becomes sparse. paper_17b is inferred: nothing was published (see the book).
_SIZES: dict[str, dict] = {
    "paper_800m": dict(
        vocab_size=32000,
        d_model=1024,
        n_heads=16,
        n_layers=24,
        n_encoder_layers=24,
        max_len=512,
        architecture="encoder_decoder",
        dropout=0.1,
        ff_sparsity=64,
        d_lowrank=64,
        n_modules=16,
    ),
    "paper_17b": dict(
        vocab_size=32000,
        d_model=9216,
        n_heads=96,
        n_layers=6,
        n_encoder_layers=6,
        max_len=512,
        architecture="encoder_decoder",
        dropout=0.1,
        ff_sparsity=256,
        d_lowrank=32,
        n_modules=64,
        modules_are_heads=False,
    ),
    "laptop": dict(
        vocab_size=4096,
        d_model=128,
        n_heads=4,
        n_layers=4,
        max_len=256,
        ff_sparsity=16,
        d_lowrank=16,
        n_modules=4,
    ),
    "smoke": dict(
        vocab_size=512, d_model=32, n_heads=4, n_layers=2, max_len=64, ff_sparsity=8, d_lowrank=8, n_modules=4
    ),
}
_D_FF = {"paper_800m": (4096, 6144), "paper_17b": (40960, 65536), "laptop": (512, 640), "smoke": (128, 160)}
_CONTROLLER = {"laptop": "reference"}  # of the sparse feedforward; why: the book's page on deviations
_LOSS_SPARSITY = 4
_SRU_UNITS = {"paper_800m": 32, "paper_17b": 32, "laptop": 16, "smoke": 8}  # of a Terraformer


def preset(name: str, variant: str = "dense", **changes) -> ModelConfig:
    """One of the ``PRESETS`` in one of the ``VARIANTS``; ``changes`` are fields to set otherwise.

    The variants add the sparse feedforward (``ff``), sparse attention everywhere (``qkv``), both (``ff_qkv``), and
    the sparse loss with 4 modules (``ff_qkv_loss``). The paper's presets are encoder-decoders, the others decoders. The
    sparse feedforward of ``laptop`` is trained by the reference code's reading, that of the others by the paper's text.
    With ``architecture="terraformer"`` any of them is a Terraformer with a recurrence beside its feedforwards, and with
    as many blocks in the encoder as in the decoder.
    """
    require_choice("preset", name, PRESETS)
    require_choice("variant", variant, VARIANTS)
    fields = dict(_SIZES[name])
    sparse_qkv = "qkv" in variant
    fields["d_ff"] = _D_FF[name][sparse_qkv]
    if "ff" in variant.split("_"):
        fields |= dict(feedforward="sparse", controller=_CONTROLLER.get(name, "paper"))
    if sparse_qkv:
        fields |= dict(attention="mult_conv", cross_attention="sparse")
    if changes.get("architecture") == "terraformer":
        fields |= dict(sru_units=_SRU_UNITS[name], n_encoder_layers=fields["n_layers"], cross_attention="dense")
    if variant.endswith("loss"):
        fields["loss_sparsity"] = _LOSS_SPARSITY
    unknown = sorted(set(changes) - set(ModelConfig.__dataclass_fields__))
    require(not unknown, "preset field", ", ".join(unknown), "a field of ModelConfig")
    return ModelConfig(**fields | changes)


# --- weights and costs in closed form ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of a model: ``weights`` it holds, how many of them one decoded token ``reads``, and the ``flops`` of its
    matrix products for that token (2 per multiply-add; sums, softmax, norms and gates are not counted)."""

    weights: int = 0
    reads: int = 0
    flops: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(self.weights + other.weights, self.reads + other.reads, self.flops + other.flops)

    def __mul__(self, times: int) -> Part:
        return Part(self.weights * times, self.reads * times, self.flops * times)

    def without_reading(self) -> Part:
        """The same weights when a decoded token does not touch them."""
        return Part(self.weights)


def _dense(d_in: int, d_out: int, bias: bool = True) -> Part:
    size = d_in * d_out + d_out * bias
    return Part(size, size, 2 * d_in * d_out)


def _mult(d_in: int, d_out: int, n_modules: int) -> Part:
    size = d_in * n_modules + d_in * (d_out // n_modules) + d_out
    return Part(size, size, 2 * d_in * d_out)  # S saves weights, not multiply-adds: S products of d_in x (d_out / S)


def _conv(n_modules: int, d_module: int, length_kernel: int, module_kernel: int) -> Part:
    kernel = length_kernel * module_kernel * d_module**2
    return Part(kernel + d_module, kernel + d_module, 2 * n_modules * kernel)


def _attention(config: ModelConfig, kind: str) -> Part:
    d, s, f = config.d_model, config.n_modules, config.kernel_size
    if kind == "dense":
        return _dense(d, d) * 4
    mult, conv = _mult(d, d, s), _conv(s, d // s, f, f)
    conv_v = _conv(s, d // s, f, config.v_kernel)
    return {
        "mult": mult * 4,
        "conv": conv * 3 + conv_v,
        "mult_conv": mult + conv * 2 + conv_v,
        "mult_conv_output": mult * 2 + conv * 3 + conv_v,
    }[kind]


def _cross_attention(config: ModelConfig) -> Part:
    d, s, f = config.d_model, config.n_modules, config.kernel_size
    key_value = (_dense(d, d) * 2).without_reading()  # computed once from the encoder's output, then cached
    if config.cross_attention == "dense":
        return key_value + _dense(d, d) * 2
    return key_value + _mult(d, d, s) + _conv(s, d // s, f, f)


def _controller(config: ModelConfig) -> Part:
    d, r, f = config.d_model, config.d_lowrank, config.d_ff
    if config.feedforward == "sparse":
        return _dense(d, r, bias=False) + _dense(r, f, bias=config.controller_bias)
    return Part() if config.feedforward == "dense" else _dense(d, config.ff_sparsity, bias=False)


def _feedforward(config: ModelConfig) -> Part:
    """Both matrices and biases; all but the dense layer read one unit in N."""
    d, f = config.d_model, config.d_ff
    active = f if config.feedforward == "dense" else f // config.ff_sparsity
    per_unit = 2 * d + config.hidden_bias
    return Part(f * per_unit + d, active * per_unit + d, active * 4 * d)


def _recurrence(config: ModelConfig) -> Part:
    """The recurrent branch of a feedforward with its layer norm."""
    d, u = config.d_model, config.sru_units
    return (_dense(d, u) + _dense(u, 3 * u) * config.sru_layers + _dense(u, d) + _norm(config)) * (u > 0)


def _unembedding(config: ModelConfig) -> Part:
    if config.loss_sparsity == 1:
        return _dense(config.d_model, config.vocab_size)
    return _mult(config.d_model, config.vocab_size, config.loss_sparsity)


def _norm(config: ModelConfig) -> Part:
    return Part(2 * config.d_model, 2 * config.d_model)


def model_parts(config: ModelConfig) -> dict[str, Part]:
    """Every part of the model by name; encoder parts are never read by a decoded token."""
    d = config.d_model
    n, attentions, cross = config.n_layers, config.attentions_in_block, config.is_encoder_decoder
    table = d * config.max_len if config.positions == "learned" else 0
    parts = {
        "embedding": Part(config.vocab_size * d, d),
        "positions": Part(table, d),
        "self_attention": _attention(config, config.attention) * (n * attentions),
        "cross_attention": _cross_attention(config) * (n * cross),
        "controller": _controller(config) * n,
        "feedforward": _feedforward(config) * n,
        "recurrence": _recurrence(config) * n,
        "norms": _norm(config) * (n * (attentions + 1 + cross) + 1),
        "unembedding": _unembedding(config),
    }
    if config.has_source:
        layer = _attention(config, config.attention_of_encoder) + _controller(config) + _feedforward(config)
        layer = layer + _recurrence(config) + _norm(config) * 2
        end = _norm(config) if cross else (_dense(d, d) + _norm(config)) * (not config.reversible_encoder)
        parts["encoder"] = (layer * config.n_encoder_layers + end + Part(table)).without_reading()
    return parts


def count_parameters(config: ModelConfig) -> int:
    """Number of trainable weights of the built model."""
    return sum(part.weights for part in model_parts(config).values())


@dataclass(frozen=True)
class PartCost:
    """Cost of one part for one decoded token: ``bytes`` touched, ``flops`` (2 per multiply-add)."""

    bytes: float
    flops: int


@dataclass(frozen=True)
class DecodeCost:
    """Cost of one decoded token at batch 1, by part; ``bytes`` and ``flops`` are the sums."""

    parts: Mapping[str, PartCost]

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts.values())

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts.values())


def decode_cost(
    config: ModelConfig,
    *,
    context: int = 1,
    source_length: int = 16,
    bytes_per_weight: float = 4,
    bytes_per_cached: float | None = None,
) -> DecodeCost:
    """Bytes of weights and cache that decoding one token touches, and the FLOPs of its matrix products.

    ``context`` counts the positions attended to, the new one included; ``source_length`` those of a source, whose keys
    and values are cached. ``bytes_per_cached`` is for these (None: as the weights; the engine keeps them in fp32). With
    ``lsh`` they are the most that hashing may find, and its rotations and buckets come on top. Activations and the few
    remembered conv inputs are not counted: they stay in cache.
    Source: section 1 of the paper, with 4 d_model^2 + 2 d_model^2 + 2 d_model d_ff for the dense block.
    """
    require_size("context", context)
    require_size("source_length", source_length)
    require(config.has_decoder, "architecture", config.architecture, "one with a decoder")
    parts = {
        name: PartCost(part.reads * bytes_per_weight, part.flops)
        for name, part in model_parts(config).items()
        if part.reads
    }
    per_number = bytes_per_weight if bytes_per_cached is None else bytes_per_cached
    parts["kv_cache"] = _attending(config, context, source_length, per_number)
    return DecodeCost(parts)


def _attending(config: ModelConfig, context: int, source_length: int, per_number: float) -> PartCost:
    """Keys, values and what hashing reads, of all layers; rotations and buckets have 4 bytes each."""
    d, lsh, past = config.d_model, config.lsh, context + source_length * (config.architecture == "terraformer")
    hashed, buckets, seen = 0, 0, past
    if lsh is not None:
        hashed = d * lsh.n_hashes * sum(lsh.factors) // 2
        if past > max(lsh.full_below, 1):
            buckets, seen = config.n_heads * lsh.n_hashes * past, lsh.n_hashes * min(lsh.window, past - 1)
    n, crossed = config.n_layers * config.attentions_in_block, source_length * config.is_encoder_decoder
    read = min(seen, past)  # what several rounds find comes from memory once
    bytes = n * (2 * d * (read + crossed) * per_number + 4 * (hashed + buckets))
    return PartCost(bytes, n * (4 * d * (seen + crossed) + 2 * hashed))


def with_equal_weights(config: ModelConfig, target: int) -> ModelConfig:
    """The config with ``d_ff`` moved to the value whose model comes closest to ``target`` weights.

    ``d_ff`` stays a multiple of N where the feedforward needs it. Source: section 3.2, "combined sparsity".
    """
    step = 1 if config.feedforward == "dense" else config.ff_sparsity
    slope = count_parameters(replace(config, d_ff=2 * step)) - count_parameters(replace(config, d_ff=step))
    units = round((target - count_parameters(replace(config, d_ff=step))) / slope) + 1
    require(units >= 1, "target", target, "reachable with a positive d_ff")
    return replace(config, d_ff=units * step)
