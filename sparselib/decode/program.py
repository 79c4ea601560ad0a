"""What a model does for a token, as a list of operations; where in memory they read and write: program_memory.py.

A layer's result is not added to the residual stream x by the layer, but by the next norm, which reads it anyway. Of two
such streams (Terraformer) a half reads one, and its result belongs to the other, which the next half reads.
Letters: B = batch; R = rows that can be at work at once; T = threads; S modules, d = d_model, f = d_ff.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ModelConfig
from . import operations as ops
from .layout import (
    GROUP,
    PANEL,
    Conv,
    Dense,
    Layout,
    Mult,
    Shape,
    attention_shapes,
    cross_shapes,
    recurrent_shapes,
    unembedding_shape,
)
from .program_memory import Cache, Memory

PARTS = (
    "embedding",
    "norms",
    "self_attention",
    "cross_attention",
    "kv_cache",
    "controller",
    "feedforward",
    "recurrence",
    "unembedding",
)
EMBEDDING, NORMS, SELF, CROSS, CACHE, CONTROLLER, FEEDFORWARD, RECURRENCE, UNEMBEDDING = range(len(PARTS))
KINDS = {"sparse": ops.SPARSE, "block": ops.BLOCK, "switch": ops.SWITCH}


@dataclass(frozen=True)
class Delta:
    """What the next norm adds to x: the sum of ``parts`` buffers (-1: one a thread, -2: and one more), and a bias."""

    offset: int = 0
    parts: int = 0
    stride: int = 0
    bias: int = -1


@dataclass
class Stream:
    """A residual stream: the rows at ``x``, to which ``delta`` is still to be added."""

    x: int
    delta: Delta = Delta()


class Program(Memory):
    """Operations of the encoder, of what the decoder keeps of its output, of the decoder's body and of its head.

    ``encode``, ``remember``, ``body`` and ``head`` are (start, end) in ``operations``; head follows body. The encoder's
    output is handed on in the buffers ``given``.
    """

    def __init__(self, layout: Layout, batch: int, max_len: int, source_len: int, rows: int, threads: int):
        super().__init__(layout, batch, max_len, source_len, rows, threads)
        self._ops: list[dict[str, int]] = []
        has_source = self.config.has_source
        self.encode = self._section(self._encode) if has_source and layout.encoder else None
        self.remember = self._section(self._remember) if has_source else None
        self.body, self.head = self._section(self._body), self._section(self._head)
        self._look_ahead()
        self.operations = np.zeros(len(self._ops), ops.OP)
        for place, op in enumerate(self._ops):
            for name, value in op.items():
                self.operations[place][name] = value

    def _section(self, write: Any) -> tuple[int, int]:
        start = len(self._ops)
        write()
        return start, len(self._ops)

    def _op(self, code: int, part: int, **fields: int) -> None:
        defaults = dict(scale=-1, bias=-1, gate_scale=-1, scale2=-1, other=-1, join=1, last=self._last)
        self._ops.append(defaults | dict(code=code, part=part, c=self._tile) | fields)

    def _look_ahead(self) -> None:
        """Every operation is told where the next one's weights begin, so that it can ask for them in time."""
        following: dict[str, int] = dict(next=0, next_step=0)
        for op in reversed(self._ops):
            op |= following
            if op["code"] in (ops.LINEAR, ops.CONV):
                panel = op["k"] * PANEL * op.get("length", 1) * op.get("width", 1)
                panels = -(-op["o"] // PANEL)
                following = dict(next=op["w"], next_step=panels // self.threads * panel)
            elif op["code"] == ops.MULT:
                following = dict(next=op["w"], next_step=op["k"] // self.threads * PANEL)

    _last = 0

    def _weights(self, name: str, w: str = "w", scale: str = "scale") -> dict[str, int]:
        matrix = self.layout.matrices[name]
        return {w: matrix.offset, scale: matrix.scale}

    def _bias(self, name: str) -> int:
        vector = self.layout.vectors.get(name)
        return -1 if vector is None else vector.offset

    def _begin(self, positions: str, streams: int = 1, relative: int = 0) -> None:
        """x = embedding + position, ``relative`` to the end of the source, in all streams."""
        fields = self._weights("embedding.weight") | {"bias": self._bias(f"{positions}.table")}
        self._op(ops.EMBED, EMBEDDING, k=self.config.d_model, y=self._buffers[0], relative=relative, **fields)
        self._streams = [Stream(self._buffers[0]) for _ in range(streams)]

    def _add(self, *delta: int) -> None:
        """What a layer gave belongs to the first stream; the last one is the one being read."""
        self._streams[0].delta = Delta(*delta)

    def _norm(self, name: str, *, y: int | None = None, z: int | None = None, other: int = -1) -> None:
        """The stream being read, brought up to date in ``y``, and its norm in ``z``."""
        stream = self._streams[-1]
        free = next(buffer for buffer in self._buffers if all(buffer != s.x for s in self._streams))
        free = free if y is None else y
        delta, vectors = stream.delta, {"gamma": self._bias(f"{name}.weight"), "beta": self._bias(f"{name}.bias")}
        fields = dict(x2=delta.offset, parts=delta.parts, x_row=delta.stride, bias=delta.bias, other=other)
        buffers = dict(x=stream.x, y=free, z=self.z if z is None else z, a=self._line)
        self._op(ops.NORM, NORMS, k=self.config.d_model, **buffers, **fields, **vectors)
        stream.x, stream.delta = free, Delta()

    def _layer(
        self, name: str, shape: Shape, part: int, x: int, y: int | Cache, join: int = 1, history: Cache | None = None
    ) -> None:
        """One layer from the rows at ``x`` (a convolution: from its ``history``) to rows at y or a cache's lines."""
        if isinstance(shape, Dense):
            self._linear(name, shape.d_out, shape.d_in, part, x, y, join)
        elif isinstance(shape, Mult):
            self._mult(name, shape, part, x, y)
        else:
            assert history is not None
            self._conv(name, shape, part, history, y, join)

    def _to(self, y: int | Cache, line: int) -> dict[str, int]:
        if isinstance(y, Cache):
            return dict(y=y.offset, y_row=y.line, y_slots=y.length)
        return dict(y=y, y_row=line)

    def _linear(
        self, name: str, o: int, k: int, part: int, x: int, y: int | Cache, join: int = 1, relu: int = 0, **more: Any
    ) -> None:
        weight, bias = more.get("weight", f"{name}.weight"), more.get("bias", f"{name}.bias")
        fields = self._weights(weight) | self._to(y, o) | {"bias": self._bias(bias)}
        self._op(ops.LINEAR, part, x=x, x_row=k, k=k, o=o, y_lane=1, relu=relu, join=join, **fields)

    def _mult(self, name: str, shape: Shape, part: int, x: int, y: int | Cache | None, spread: bool = False) -> None:
        """``spread``: into a history, where the modules of one feature stand side by side."""
        assert isinstance(shape, Mult) and y is not None
        o = shape.d_out // shape.s
        fields = self._weights(f"{name}.D", "gate", "gate_scale") | self._weights(f"{name}.E")
        fields |= self._to(y, shape.d_out) | {"bias": self._bias(f"{name}.bias"), "b_module": o}
        steps = dict(y_module=1, y_lane=self._lanes) if spread else dict(y_module=o, y_lane=1)
        fields["y"] += self._pad if spread else 0
        sizes = dict(k=shape.d_in, o=o, s=shape.s, x=x, x_row=shape.d_in, a=self._gated, a_row=self._gated_line)
        sizes |= dict(sums=self._sums, sums_row=self._sums_line)
        self._op(ops.MULT, part, **sizes, **steps, **fields)

    def _spread(self, x: int, history: Cache, s: int, part: int) -> None:
        sizes = dict(k=self.config.d_model, s=s, x=x, pad=self._pad, lanes=self._lanes)
        self._op(ops.SPREAD, part, **sizes, **self._to(history, 0))

    def _conv(self, name: str, shape: Conv, part: int, history: Cache, y: int | Cache, join: int) -> None:
        module = shape.d // shape.s
        fields = self._weights(f"{name}.weight") | self._to(y, shape.d) | {"bias": self._bias(f"{name}.bias")}
        source = dict(x=history.offset, x_row=history.line, cap=history.length, pad=self._pad, lanes=self._lanes)
        sizes = dict(k=module, o=module, s=shape.s, length=shape.length, width=shape.width, y_module=module, y_lane=1)
        self._op(ops.CONV, part, join=join, **source, **sizes, **fields)

    def _attend(
        self, keys: Cache, values: Cache, visible: int, part: int, hashing: dict[str, int] | None = None
    ) -> None:
        config = self.config
        sizes = dict(k=config.d_model, heads=config.n_heads, cap=keys.length, scores=self._scores, visible=visible)
        places = dict(x=self._q, y=self._attended, keys=keys.offset, values=values.offset)
        self._op(ops.ATTEND, part, **(hashing or {}) | sizes | places)

    def _hash(self, name: str, caches: dict[str, Cache], causal: bool) -> dict[str, int]:
        """Query and key become one vector, of which all buckets are found; what an attention by them has to know.

        A thread keeps to its heads from here to the end of the attention, so none waits for another in between.
        """
        config, lsh, keys = self.config, self.config.lsh, caches["keys"]
        assert lsh is not None
        fields = dict(k=config.d_model, heads=config.n_heads, rounds=lsh.n_hashes, cap=keys.length, full=lsh.full_below)
        fields |= dict(x=self._q, keys=keys.offset, buckets=caches["buckets"].offset, order=self._order)
        fields |= dict(a=self._found, a_row=self._found_line)
        self._op(ops.MERGE, CACHE, join=0, **fields)
        below, rotation, columns = 1, self._bias(f"{name}.rotations"), sum(lsh.factors) // 2
        for n in lsh.factors:
            factor = dict(o=n // 2, below=below, rotation=rotation, columns=columns)
            self._op(ops.BUCKET, CACHE, join=0, **fields, **factor)
            below, rotation = below * n, rotation + n // 2
        if causal:
            return fields | dict(window=lsh.window)
        self._op(ops.SORT, CACHE, join=0, **fields)
        return fields | dict(chunk=lsh.chunk_len, before=lsh.n_chunks_before, after=lsh.n_chunks_after)

    def _self_attention(self, block: str, kind: str, caches: dict[str, Cache], causal: bool = True) -> None:
        shapes, name, x = attention_shapes(self.config, kind), f"{block}.attention", self.z
        history = caches.get("input")
        if "shared" in shapes:
            self._mult(f"{name}.shared", shapes["shared"], SELF, x, history, spread=True)
        elif history is not None:
            self._spread(x, history, self.config.n_modules, SELF)
        for part, y in (("q", self._q), ("k", caches["keys"]), ("v", caches["values"])):
            self._layer(f"{name}.{part}", shapes[part], SELF, x, y, int(part == "v"), history)
        hashing = None if self.config.lsh is None else self._hash(name, caches, causal)
        self._attend(caches["keys"], caches["values"], ops.VISIBLE, CACHE, hashing)
        if kind == "mult_conv_output":
            self._mult(
                f"{name}.output.layers.0", shapes["output.layers.0"], SELF, self._attended, caches["output"], True
            )
            self._layer(f"{name}.output.layers.1", shapes["output.layers.1"], SELF, 0, self._out, 1, caches["output"])
        elif kind != "mult_conv":
            if kind == "conv":
                self._spread(self._attended, caches["output"], self.config.n_modules, SELF)
            self._layer(f"{name}.output", shapes["output"], SELF, self._attended, self._out, 1, caches.get("output"))
        self._add(self._attended if kind == "mult_conv" else self._out, 1)

    def _cross_attention(self, block: str, caches: dict[str, Cache]) -> None:
        shapes, name = cross_shapes(self.config), f"{block}.cross"
        if "query" in shapes:
            self._layer(f"{name}.query", shapes["query"], CROSS, self.z, self._q)
        else:
            history = caches["query"]
            self._mult(f"{name}.query.layers.0", shapes["query.layers.0"], CROSS, self.z, history, True)
            self._layer(f"{name}.query.layers.1", shapes["query.layers.1"], CROSS, 0, self._q, 1, history)
        self._attend(caches["source_keys"], caches["source_values"], ops.SOURCE, CACHE)
        if "output" in shapes:
            self._layer(f"{name}.output", shapes["output"], CROSS, self._attended, self._out)
        self._add(self._out if "output" in shapes else self._attended, 1)

    def _feedforward(self, block: str, caches: dict[str, Cache]) -> None:
        """The feedforward of z, and beside it the recurrent branch of the same stream, with a norm of its own."""
        d, dense, branch = self.config.d_model, self.config.feedforward == "dense", self.config.sru_units > 0
        self._hidden_units(f"{block}.feedforward")
        if dense:
            result = self._out, 1 + branch, (self.rows + GROUP) * d, -1
        else:
            result = self._summed, -1 - branch, self.rows * d, self._bias(f"{block}.feedforward.b2")
        if branch:
            self._recurrence(block, caches, result[0] + (1 if dense else self.threads) * result[2])
        self._add(*result)

    def _recurrence(self, block: str, caches: dict[str, Cache], y: int) -> None:
        name, u = f"{block}.recurrence", self.config.sru_units
        (down, first), *units, (up, last) = recurrent_shapes(self.config).items()
        x, h = self._narrow, self._narrow + (self.rows + GROUP) * u
        self._norm(f"{block}.recurrence_norm")
        self._layer(f"{name}.{down}", first, RECURRENCE, self.z, x)
        for i, (gates, shape) in enumerate(units, start=1):
            self._layer(f"{name}.{gates}", shape, RECURRENCE, x, self._gates)
            cell = dict(keys=caches[f"cell{i}"].offset, cap=caches[f"cell{i}"].length)
            self._op(ops.RECUR, RECURRENCE, k=u, x=self._gates, x_row=3 * u, x2=x, y=h, **cell)
            x, h = h, x
        self._layer(f"{name}.{up}", last, RECURRENCE, x, y)

    def _hidden_units(self, name: str) -> None:
        config = self.config
        d, f, n = config.d_model, config.d_ff, config.ff_sparsity
        w1, w2, b1, b2 = (f"{name}.{part}" for part in ("w1", "w2", "b1", "b2"))
        if config.feedforward == "dense":
            self._linear(name, f, d, FEEDFORWARD, self.z, self._hidden, relu=1, weight=w1, bias=b1)
            self._linear(name, d, f, FEEDFORWARD, self._hidden, self._out, weight=w2, bias=b2)
            return
        if config.feedforward == "sparse":
            r = config.d_lowrank
            self._linear(name, r, d, CONTROLLER, self.z, self._low, weight=f"{name}.c1", bias="")
            self._linear(name, f, r, CONTROLLER, self._low, self._hidden, weight=f"{name}.c2", bias=f"{name}.bc")
            sizes = dict(s=f // n, block=n, x_row=f)
        else:
            self._linear(name, n, d, CONTROLLER, self.z, self._hidden, weight=f"{name}.c", bias="")
            sizes = dict(s=n, block=f // n, x_row=n)
        fields = self._weights(w1) | self._weights(w2, "w2", "scale2") | {"bias": self._bias(b1)} | sizes
        buffers = dict(x=self.z, x2=self._hidden, y=self._summed, y_row=self.rows * d)
        self._op(ops.UNITS, FEEDFORWARD, k=d, kind=KINDS[config.feedforward], **buffers, **fields)

    def _encode(self) -> None:
        """One source at a time, all of its positions at once, in slot 0."""
        kind = self.config.attention_of_encoder
        caches = self._attention_caches(kind, 1, self.source_len) | self._cells(1, self.source_len)
        self._begin("encoder.positions")
        for block in (f"encoder.blocks.{i}" for i in range(self.config.n_encoder_layers)):
            self._norm(f"{block}.attention_norm")
            self._self_attention(block, kind, caches, causal=False)
            self._norm(f"{block}.feedforward_norm")
            self._feedforward(block, caches)
        self._norm("encoder.norm")

    def _remember(self) -> None:
        """Keys and values of the encoder's output, which stands in z."""
        d = self.config.d_model
        for i, caches in enumerate(self._decoder):
            for part in ("key", "value"):
                self._layer(f"stack.blocks.{i}.cross.{part}", Dense(d, d), CROSS, self.z, caches[f"source_{part}s"], 0)
        self._ops[-1]["join"] = 1

    def _body(self) -> None:
        self._begin("stack.positions")
        for i, caches in enumerate(self._decoder):
            block = f"stack.blocks.{i}"
            self._norm(f"{block}.attention_norm")
            self._self_attention(block, self.config.attention, caches)
            if self.config.is_encoder_decoder:
                self._norm(f"{block}.cross_norm")
                self._cross_attention(block, caches)
            self._norm(f"{block}.feedforward_norm")
            self._feedforward(block, caches)

    def _head(self) -> None:
        self._last = 1
        self._norm("stack.norm")
        self._layer("unembedding", unembedding_shape(self.config), UNEMBEDDING, self.z, self.logits)


def units_of_a_thread(config: ModelConfig, threads: int) -> int:
    """The most hidden units that a thread has to remember."""
    n = config.ff_sparsity
    return 1 + (config.d_ff // n if config.feedforward != "dense" else 0) // threads
