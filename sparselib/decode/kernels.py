"""The kernels of one decoded token: every thread runs the same list of operations and waits at barriers.

A model is a program, an array of ``OP`` records (program.py writes it); its weights are one flat array ``w`` of fp32,
bf16 (as uint16) or int8; ``p`` holds what is always fp32 (scales, biases, norms, positions); ``m`` is the memory that
operations read and write (caches, then buffers). Nothing is allocated here. All kernels stand in this file, because
numba's disk cache looks at the age of one file only.

Letters: K inner size, O outputs of a matrix; a panel is 16 outputs of a matrix, stored (K, 16), so that one vector
register holds one input's weights; S modules, in groups of 8; R rows at work (sequences, or positions of a prompt);
T threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 16  # outputs side by side: one AVX-512 register, two of AVX2, four of NEON
GROUP = 8  # modules side by side in the gates of a multiplicative layer
TILE = 8 if llvm.get_host_cpu_features().get("avx512f") else 4  # rows whose sums fit in the registers
C_SIZE = TILE * PANEL  # floats of a thread's tile of sums
AHEAD1, AHEADR, AHEADC = (int(v) for v in os.environ.get("AH", "256,64,512").split(","))
K_BLOCK = 512  # inputs of a multiplicative layer gated at a time, so that they stay in the second-level cache
SPINS = 2_000  # looks at a barrier before a thread offers its core to others, a few microseconds
IDLE_SPINS = 200_000  # looks for the next token before a thread goes to sleep, well under a millisecond

FIELDS = (
    "code part last join k o w scale bias relu"  # k, o: sizes; w: offset in w; scale, bias: in p, -1 for none
    " x x_row x2 y y_row y_slots y_module y_lane a a_row c parts"  # in m; y_slots: lines of a cache's slot
    " gate gate_scale s b_module sums sums_row"  # mult and conv
    " length width pad lanes cap"  # conv, attend
    " keys values heads scores visible"  # attend
    " w2 scale2 block kind"  # units
    " z gamma beta"  # norm
)
OP = np.dtype([(name, np.int64) for name in FIELDS.split()])
EMBED, NORM, LINEAR, MULT, CONV, SPREAD, ATTEND, UNITS = range(8)
SPARSE, BLOCK, SWITCH = range(3)  # ``kind`` of UNITS
TOKEN, SLOT, POSITION, VISIBLE, SOURCE = range(5)  # columns of ``rows``: VISIBLE, SOURCE count keys to attend to
MATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinity keep their meaning


def kernel(function: Callable) -> Any:
    """Compile without the GIL, cached on disk wherever a folder can be written to, else in every process."""
    try:
        return njit(nogil=True, fastmath=MATH, cache=True)(function)
    except RuntimeError:  # "no locator available": neither the package's folder nor the user's can be written to
        return njit(nogil=True, fastmath=MATH)(function)


# --- single instructions ----------------------------------------------------------------------------------------------


def _data(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to ``array[index]``."""
    return builder.gep(cgutils.create_struct_proxy(array_type)(context, builder, array).data, [index])


def _to_float(builder: Any, x: Any, kind: Any, shape: Callable) -> Any:
    """A weight (or a vector of them, as ``shape`` makes types) as float32: bf16 are the upper half of its bits."""
    if kind == types.float32:
        return x
    if kind == types.int8:
        return builder.sitofp(builder.sext(x, shape(ir.IntType(32))), shape(ir.FloatType()))
    wide = shape(ir.IntType(32))
    sixteen = wide(16) if wide == ir.IntType(32) else wide([16] * wide.count)
    return builder.bitcast(builder.shl(builder.zext(x, wide), sixteen), shape(ir.FloatType()))


@intrinsic
def get(typing: Any, array: Any, index: Any) -> Any:
    """``array[index]`` as float32, whatever its dtype.

    Unlike brackets it takes no negative index to count from the end: that test keeps loops from becoming vector code.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _to_float(builder, builder.load(_data(context, builder, array, *args)), array.dtype, lambda t: t)

    return types.float32(array, types.int64), generate


@intrinsic
def put(typing: Any, w: Any, index: Any, value: Any) -> Any:
    """``w[index] = value``, cut to bf16 or, from a value already in -127 .. 127, to int8."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        stored, x = context.get_data_type(w.dtype), args[2]
        if w.dtype == types.int8:
            x = builder.fptosi(x, stored)
        elif w.dtype == types.uint16:
            bits = builder.bitcast(x, ir.IntType(32))
            x = builder.trunc(builder.lshr(bits, ir.IntType(32)(16)), stored)
        builder.store(x, _data(context, builder, w, args[0], args[1]))
        return context.get_dummy_value()

    return types.void(w, types.int64, types.float32), generate


@intrinsic
def _float_of_bits(typing: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


def _emit_prefetch(builder: Any, pointer: Any, write: int) -> None:
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(i32(v) for v in (write, 3, 1))])  # 3: keep in all caches, 1: data


def _make_prefetch(write: int) -> Any:
    @intrinsic
    def prefetch(typing: Any, array: Any, index: Any) -> Any:
        """Ask for the cache line of ``array[index]``, to read from it or to write to it."""

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _emit_prefetch(builder, _data(context, builder, array, *args), write)
            return context.get_dummy_value()

        return types.void(array, types.int64), generate

    return prefetch


@intrinsic
def _scaled(typing: Any, m: Any, to: Any, w: Any, at: Any, x: Any) -> Any:
    """m[to + l] = x w[at + l] for the lanes l of a group."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        stored, vector = (ir.VectorType(t, GROUP) for t in (context.get_data_type(w.dtype), ir.FloatType()))
        source = builder.bitcast(_data(context, builder, w, args[2], args[3]), stored.as_pointer())
        lanes = _to_float(builder, builder.load(source, align=1), w.dtype, lambda t: ir.VectorType(t, GROUP))
        product = builder.fmul(_spread_scalar(builder, args[4], vector), lanes)
        builder.store(product, builder.bitcast(_data(context, builder, m, args[0], args[1]), vector.as_pointer()), 4)
        return context.get_dummy_value()

    return types.void(m, types.int64, w, types.int64, types.float32), generate


@intrinsic
def _cycles(typing: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@intrinsic
def _atomic_add(typing: Any, array: Any, index: Any) -> Any:
    """Add 1 to ``array[index]`` for all threads at once; its value before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _data(context, builder, array, args[0], args[1])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(array, types.int64), generate


@intrinsic
def _atomic_load(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_data(context, builder, array, args[0], args[1]), "seq_cst", 8)

    return types.int64(array, types.int64), generate


def _spread_scalar(builder: Any, x: Any, vector: Any) -> Any:
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _make_tile(rows: int, panels: int) -> Any:
    """The innermost loop: sums of ``rows`` inputs times ``panels`` panels stay in registers for all of K."""

    @intrinsic
    def tile(
        typing: Any,
        a: Any,
        ai: Any,
        ak: Any,
        ar: Any,
        w: Any,
        wi: Any,
        w_panel: Any,
        ahead: Any,
        k: Any,
        c: Any,
        ci: Any,
    ):
        """c[ci + (r panels + j) 16 + l] += sum_i a[ai + i ak + r ar] w[wi + j w_panel + 16 i + l], i < k."""
        i64, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), PANEL)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            stored = ir.VectorType(context.get_data_type(w.dtype), PANEL)
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{PANEL}f32"
            )
            first_a = _data(context, builder, a, args[0], args[1])
            first_w = _data(context, builder, w, args[4], args[5])
            first_c = builder.bitcast(_data(context, builder, c, args[9], args[10]), vector.as_pointer())
            places = [builder.gep(first_c, [i64(n)]) for n in range(rows * panels)]
            starts = [builder.load(place, align=4) for place in places]
            before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            i = builder.phi(i64)
            i.add_incoming(i64(0), before)
            sums = [builder.phi(vector) for _ in starts]
            for phi, start in zip(sums, starts, strict=True):
                phi.add_incoming(start, before)
            at_w = builder.gep(first_w, [builder.mul(i, i64(PANEL))])
            weights = []
            for j in range(panels):
                pointer = builder.gep(at_w, [builder.mul(args[6], i64(j))])
                loaded = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=1)
                weights.append(_to_float(builder, loaded, w.dtype, lambda t: ir.VectorType(t, PANEL)))
                _emit_prefetch(builder, builder.gep(pointer, [args[7]]), 0)
            at_a = builder.gep(first_a, [builder.mul(i, args[2])])
            new = []
            for r in range(rows):
                x = builder.load(builder.gep(at_a, [builder.mul(args[3], i64(r))]))
                everywhere = _spread_scalar(builder, x, vector)
                new += [builder.call(fma, [everywhere, weights[j], sums[r * panels + j]]) for j in range(panels)]
            following = builder.add(i, i64(1))
            i.add_incoming(following, loop)
            for phi, value in zip(sums, new, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, args[8]), loop, after)
            builder.position_at_end(after)
            for place, value in zip(places, new, strict=True):
                builder.store(value, place, align=4)
            return context.get_dummy_value()

        ints = types.int64
        return types.void(a, ints, ints, ints, w, ints, ints, ints, ints, c, ints), generate

    return tile


_tile_1x4, _tile_1x1, _tile_4x1, _tile_tx1 = (_make_tile(*shape) for shape in ((1, 4), (1, 1), (4, 1), (TILE, 1)))
_prefetch_read, _prefetch_write = (_make_prefetch(write) for write in (0, 1))
_yield = types.ExternalFunction("sched_yield", types.int32()) if os.name == "posix" else None


@kernel
def _exp(x):  # exp of float32 <= 0, to 2e-7, in operations that vectorize
    t = max(x * np.float32(1.4426950408889634), np.float32(-126))
    whole = np.floor(t)
    f = t - whole
    y = np.float32(1.5403530e-4)
    for c in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        y = y * f + np.float32(c)
    return y * _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@kernel
def _barrier(sync, threads):
    """Wait for all threads. ``sync[0]`` only ever grows, so that a slow thread cannot miss the moment."""
    if threads == 1:
        return
    target = (_atomic_add(sync, 0) // threads + 1) * threads
    spins = 0
    while _atomic_load(sync, 0) < target:
        spins += 1
        if _yield is not None and spins > SPINS:
            _yield()


# --- operations -------------------------------------------------------------------------------------------------------


@kernel
def _target(op, rows, r):
    """Where row r's output starts: its own line of a buffer, or the line of its slot and position in a cache."""
    line = r if op.y_slots == 0 else rows[r, SLOT] * op.y_slots + rows[r, POSITION]
    return op.y + line * op.y_row


@kernel
def _embed(op, w, p, m, rows, r, lo, hi):
    line = rows[r, TOKEN] * op.k
    scale = get(p, op.scale + rows[r, TOKEN]) if op.scale >= 0 else np.float32(1)
    for i in range(lo, hi):
        put(m, op.y + r * op.k + i, get(w, op.w + line + i) * scale + get(p, op.bias + rows[r, POSITION] * op.k + i))


@kernel
def _norm(op, p, m, r, tid, threads):
    """x' = x + what the last layer gave (``parts`` sums, and a bias), z = LN(x').

    Every thread adds up and measures all of the row in a line of its own, and writes its own columns of x' and z: two
    barriers fewer. x' is not written over x, which others may still be reading.
    """
    x, mine, parts = op.x + r * op.k, op.a + tid * op.k, threads if op.parts < 0 else op.parts
    for i in range(op.k):
        put(m, mine + i, get(m, x + i) + get(p, op.bias + i) if op.bias >= 0 else get(m, x + i))
    for part in range(parts):
        delta = op.x2 + part * op.x_row + r * op.k
        for i in range(op.k):
            put(m, mine + i, get(m, mine + i) + get(m, delta + i))
    total = square = np.float32(0)
    for i in range(op.k):
        total += get(m, mine + i)
    mean = total / np.float32(op.k)
    for i in range(op.k):
        square += (get(m, mine + i) - mean) * (get(m, mine + i) - mean)
    rate = np.float32(1) / np.sqrt(square / np.float32(op.k) + np.float32(1e-6))
    y, z = op.y + r * op.k, op.z + r * op.k
    for i in range(op.k * tid // threads, op.k * (tid + 1) // threads):
        put(m, y + i, get(m, mine + i))
        put(m, z + i, (get(m, mine + i) - mean) * rate * get(p, op.gamma + i) + get(p, op.beta + i))


@kernel
def _clear(m, c, size):
    for i in range(size):
        put(m, c + i, np.float32(0))


@kernel
def _finish(op, p, m, c, panel, y, module):
    """Scale, bias and ReLU of 16 sums, and where they go; ``module`` is 0 for a plain matrix."""
    first = panel * PANEL
    y += module * op.y_module + first * op.y_lane
    bias = op.bias + module * op.b_module + first
    factor = get(p, op.gate_scale + module) if op.gate_scale >= 0 else np.float32(1)
    for lane in range(min(PANEL, op.o - first)):
        value = get(m, c + lane) * factor
        if op.scale >= 0:
            value *= get(p, op.scale + first + lane)
        if op.bias >= 0:
            value += get(p, bias + lane)
        put(m, y + lane * op.y_lane, max(value, np.float32(0)) if op.relu else value)


@kernel
def _expect(op, m, panel, y, module, several):
    """Ask for the lines that a tile will be written to: in a cache they were last used a token ago, or never."""
    y += module * op.y_module + panel * PANEL * op.y_lane
    if op.y_lane == 1:
        for j in range(several):
            _prefetch_write(m, y + j * op.y_module)
    else:
        for lane in range(PANEL):
            _prefetch_write(m, y + lane * op.y_lane)


@kernel
def _linear(op, w, p, m, rows, first, n, c, tid, threads):
    """y = x W^T (+ bias) for n rows: one row reads four panels side by side, several rows share each panel."""
    panels = (op.o + PANEL - 1) // PANEL
    size = op.k * PANEL
    panel, end = panels * tid // threads, panels * (tid + 1) // threads
    while panel < end:
        at = op.w + panel * size
        if n == 1:
            many = 4 if panel + 4 <= end else 1
            _clear(m, c, many * PANEL)
            if many == 4:
                _tile_1x4(m, op.x + first * op.x_row, 1, 0, w, at, size, AHEAD1 * PANEL, op.k, m, c)
            else:
                _tile_1x1(m, op.x + first * op.x_row, 1, 0, w, at, size, AHEAD1 * PANEL, op.k, m, c)
            for j in range(many):
                _finish(op, p, m, c + j * PANEL, panel + j, _target(op, rows, first), 0)
            panel += many
            continue
        for r in range(first, first + n, TILE):
            several = min(TILE, first + n - r)
            _rows_of_tile(m, op.x + r * op.x_row, 1, op.x_row, w, at, op.k, c, several)
            for j in range(several):
                _finish(op, p, m, c + j * PANEL, panel, _target(op, rows, r + j), 0)
        panel += 1


@kernel
def _rows_of_tile(m, a, ak, ar, w, at, k, c, n):
    """The sums of up to ``TILE`` rows with one panel; rows beyond n are computed from what lies there, and unused."""
    _clear(m, c, C_SIZE)
    if n <= 4:
        _tile_4x1(m, a, ak, ar, w, at, 0, AHEADR * PANEL, k, m, c)
    else:
        _tile_tx1(m, a, ak, ar, w, at, 0, AHEADR * PANEL, k, m, c)


@kernel
def _gate(op, w, m, x, a, first, count, stride):
    """Inputs first .. first + count - 1 gated for every module: a[g, i, lane] = x_i D[g, i, lane]."""
    for g in range((op.s + GROUP - 1) // GROUP):
        for i in range(count):
            source = op.gate + (g * op.k + first + i) * GROUP
            _scaled(m, a + (g * stride + i) * GROUP, w, source, get(m, x + first + i))


@kernel
def _mult(op, w, p, m, rows, first, n, sync, tid, threads):
    """y[s, m] = sum_i x_i D[i, s] E[i, m], as a matrix product of S gated rows with E's panels.

    Each thread takes a share of the inputs i, so that it reads its part of D and E only and shares nothing but sums.
    """
    tiles_s, panels = (op.s + TILE - 1) // TILE, (op.o + PANEL - 1) // PANEL
    lo, hi, a = op.k * tid // threads, op.k * (tid + 1) // threads, op.a + tid * op.a_row
    for r in range(first, first + n):
        all_sums = op.sums + (r - first) % 2 * threads * op.sums_row  # two: others may still read the last row's
        mine = all_sums + tid * op.sums_row
        _clear(m, mine, panels * tiles_s * C_SIZE)
        for t in range(panels * tiles_s * tid // threads, panels * tiles_s * (tid + 1) // threads):
            _expect(op, m, t // tiles_s, _target(op, rows, r), t % tiles_s * TILE, TILE)
        for start in range(lo, hi, K_BLOCK):
            count = min(K_BLOCK, hi - start)
            _gate(op, w, m, op.x + r * op.x_row, a, start, count, K_BLOCK)
            for t in range(panels * tiles_s):
                panel, s = t // tiles_s, t % tiles_s * TILE
                source, at = a + s // GROUP * K_BLOCK * GROUP + s % GROUP, op.w + (panel * op.k + start) * PANEL
                _tile_tx1(m, source, GROUP, 1, w, at, 0, op.k * PANEL, count, m, mine + t * C_SIZE)
        _barrier(sync, threads)
        y = _target(op, rows, r)
        for t in range(panels * tiles_s * tid // threads, panels * tiles_s * (tid + 1) // threads):
            total, s = all_sums + t * C_SIZE, t % tiles_s * TILE
            for part in range(1, threads):
                for i in range(C_SIZE):
                    put(m, total + i, get(m, total + i) + get(m, total + part * op.sums_row + i))
            for j in range(min(TILE, op.s - s)):
                _finish(op, p, m, total + j * PANEL, t // tiles_s, y, s + j)


@kernel
def _mult_wide(op, w, p, m, rows, first, n, c, tid, threads):
    """The same for one group of modules: each thread gates all inputs, and takes a share of the outputs."""
    panels, a = (op.o + PANEL - 1) // PANEL, op.a + tid * op.a_row
    for r in range(first, first + n):
        _gate(op, w, m, op.x + r * op.x_row, a, 0, op.k, op.k)
        y = _target(op, rows, r)
        for panel in range(panels * tid // threads, panels * (tid + 1) // threads):
            for s in range(0, op.s, TILE):
                several = min(TILE, op.s - s)
                _rows_of_tile(m, a + s, GROUP, 1, w, op.w + panel * op.k * PANEL, op.k, c, several)
                for j in range(several):
                    _finish(op, p, m, c + j * PANEL, panel, y, s + j)


@kernel
def _spread(op, m, rows, r, tid, threads):
    """A row (S, M) into its line of a convolution's history, (M, lanes) with zeros on both sides of the modules."""
    y, width = _target(op, rows, r) + op.pad, op.k // op.s
    for s in range(op.s * tid // threads, op.s * (tid + 1) // threads):
        for i in range(width):
            put(m, y + i * op.lanes + s, get(m, op.x + r * op.k + s * width + i))


@kernel
def _conv(op, w, p, m, rows, first, n, c, tid, threads):
    """y[t, s] = b + sum over F positions and neighbours j of W[f, j]^T h[t - (F-1) + f, s + j].

    Module s + j of a line stands j floats further than module s, so that every tap is the same product from another
    start, and no window is copied.
    """
    tiles, panels = (op.s + TILE - 1) // TILE, (op.o + PANEL - 1) // PANEL
    for t in range(n * panels * tiles * tid // threads, n * panels * tiles * (tid + 1) // threads):
        panel, s, r = t // (tiles * n), t % tiles * TILE, first + t // tiles % n
        several = min(TILE, op.s - s)
        _expect(op, m, panel, _target(op, rows, r), s, several)
        _clear(m, c, C_SIZE)
        for f in range(op.length):
            position = rows[r, POSITION] - op.length + 1 + f
            if position < 0:
                continue
            line = op.x + (rows[r, SLOT] * op.cap + position) * op.x_row + op.pad - op.width // 2 + s
            for j in range(op.width):
                at = op.w + ((panel * op.length + f) * op.width + j) * op.k * PANEL
                if several <= 4:
                    _tile_4x1(m, line + j, op.lanes, 1, w, at, 0, AHEADC * PANEL, op.k, m, c)
                else:
                    _tile_tx1(m, line + j, op.lanes, 1, w, at, 0, AHEADC * PANEL, op.k, m, c)
        for j in range(several):
            _finish(op, p, m, c + j * PANEL, panel, _target(op, rows, r), s + j)


@kernel
def _attend(op, m, rows, r, tid, threads):
    """y = softmax(q k^T / sqrt(dh)) v for this thread's heads, over the first keys of the row's slot."""
    heads, width = op.heads, op.k // op.heads
    lo, hi, count = heads * tid // threads, heads * (tid + 1) // threads, rows[r, op.visible]
    start = rows[r, SLOT] * op.cap * op.k
    q, y, root = op.x + r * op.k, op.y + r * op.k, np.float32(1 / np.sqrt(width))
    for t in range(count):
        for i in range(lo * width, hi * width, 16):
            _prefetch_read(m, op.keys + start + (t + 2) * op.k + i)
            _prefetch_read(m, op.values + start + t * op.k + i)
        for h in range(lo, hi):
            key, total = op.keys + start + t * op.k + h * width, np.float32(0)
            for i in range(width):
                total += get(m, q + h * width + i) * get(m, key + i)
            put(m, op.scores + h * op.cap + t, total * root)
    for h in range(lo, hi):
        line, highest, total = op.scores + h * op.cap, get(m, op.scores + h * op.cap), np.float32(0)
        for t in range(count):
            highest = max(highest, get(m, line + t))
        for t in range(count):
            put(m, line + t, _exp(get(m, line + t) - highest))
        for t in range(count):
            total += get(m, line + t)
        for t in range(count):
            put(m, line + t, get(m, line + t) / total)
    _clear(m, y + lo * width, (hi - lo) * width)
    for t in range(count):
        for h in range(lo, hi):
            value, share = op.values + start + t * op.k + h * width, get(m, op.scores + h * op.cap + t)
            for i in range(width):
                put(m, y + h * width + i, get(m, y + h * width + i) + share * get(m, value + i))


@kernel
def _best(m, first, count):
    best, at = get(m, first), 0
    for i in range(1, count):
        if get(m, first + i) > best:
            best, at = get(m, first + i), i
    return at


@kernel
def _choose(op, m, units, r, tid, threads):
    """This thread's active hidden units and what they are scaled by, out of the controller's logits of row r."""
    z = op.x2 + r * op.x_row
    if op.kind == SPARSE:
        lo, hi = op.s * tid // threads, op.s * (tid + 1) // threads
        for block in range(lo, hi):
            units[tid, block - lo] = block * op.block + _best(m, z + block * op.block, op.block)
        return hi - lo, np.float32(1)
    expert, total = _best(m, z, op.s), np.float32(0)
    for e in range(op.s):
        total += _exp(get(m, z + e) - get(m, z + expert))
    lo, hi = op.block * tid // threads, op.block * (tid + 1) // threads
    for i in range(lo, hi):
        units[tid, i - lo] = expert * op.block + i
    return hi - lo, np.float32(1) / total if op.kind == SWITCH else np.float32(1)


@kernel
def _activation(op, p, total, gate, unit):
    """What unit's row of w2 is added with: relu(gate (x w1 + b1)), times the row's scale."""
    if op.scale >= 0:
        total *= get(p, op.scale + unit)
    if op.bias >= 0:
        total += get(p, op.bias + unit)
    total = max(total * gate, np.float32(0))
    return total * get(p, op.scale2 + unit) if op.scale2 >= 0 else total


@kernel
def _units(op, w, p, m, units, r, tid, threads):
    """Adds up relu(gate (x w1_u + b1_u)) w2_u over this thread's units u; four at a time, to wait less for memory."""
    k, x, y = op.k, op.x + r * op.k, op.y + tid * op.y_row + r * op.k
    _clear(m, y, k)
    count, gate = _choose(op, m, units, r, tid, threads)
    for n in range(0, count - count % 4, 4):
        a, b, c, d = units[tid, n], units[tid, n + 1], units[tid, n + 2], units[tid, n + 3]
        wa, wb, wc, wd = op.w + a * k, op.w + b * k, op.w + c * k, op.w + d * k
        ha = hb = hc = hd = np.float32(0)
        for i in range(k):
            value = get(m, x + i)
            ha += value * get(w, wa + i)
            hb += value * get(w, wb + i)
            hc += value * get(w, wc + i)
            hd += value * get(w, wd + i)
        ha, hb = _activation(op, p, ha, gate, a), _activation(op, p, hb, gate, b)
        hc, hd = _activation(op, p, hc, gate, c), _activation(op, p, hd, gate, d)
        wa, wb, wc, wd = op.w2 + a * k, op.w2 + b * k, op.w2 + c * k, op.w2 + d * k
        for i in range(k):
            more = ha * get(w, wa + i) + hb * get(w, wb + i) + hc * get(w, wc + i) + hd * get(w, wd + i)
            put(m, y + i, get(m, y + i) + more)
    for n in range(count - count % 4, count):
        unit, h = units[tid, n], np.float32(0)
        row = op.w + unit * k
        for i in range(k):
            h += get(m, x + i) * get(w, row + i)
        h, row = _activation(op, p, h, gate, unit), op.w2 + unit * k
        for i in range(k):
            put(m, y + i, get(m, y + i) + h * get(w, row + i))


@kernel
def run(tid, threads, program, start, end, w, p, m, rows, n, last, units, sync, clock):
    """Operations start .. end for rows 0 .. n-1 (``last`` operations: for the last ``last`` of them), as thread tid."""
    then = _cycles()
    for step in range(start, end):
        op = program[step]
        first, count = (n - last, last) if op.last else (0, n)
        c = op.c + tid * 2 * C_SIZE  # a tile of its own, cache lines away from the next thread's
        if op.code == LINEAR:
            _linear(op, w, p, m, rows, first, count, c, tid, threads)
        elif op.code == MULT:
            if op.s <= GROUP:
                _mult_wide(op, w, p, m, rows, first, count, c, tid, threads)
            else:
                _mult(op, w, p, m, rows, first, count, sync, tid, threads)
        elif op.code == CONV:
            _conv(op, w, p, m, rows, first, count, c, tid, threads)
        else:
            for r in range(first, first + count):
                if op.code == NORM:
                    _norm(op, p, m, r, tid, threads)
                elif op.code == ATTEND:
                    _attend(op, m, rows, r, tid, threads)
                elif op.code == UNITS:
                    _units(op, w, p, m, units, r, tid, threads)
                elif op.code == SPREAD:
                    _spread(op, m, rows, r, tid, threads)
                else:
                    _embed(op, w, p, m, rows, r, op.k * tid // threads, op.k * (tid + 1) // threads)
        if op.join:
            _barrier(sync, threads)
        if tid == 0:
            now = _cycles()
            clock[step] += now - then
            then = now


@kernel
def fill(w, first, count, bound, seed):
    """Random weights: uniform in +-bound, in int8 all of -127 .. 127, by the generator SplitMix64."""
    for i in range(first, first + count):
        bits = (np.uint64(i) + seed) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        unit = np.float32(np.int32(bits >> np.uint64(40))) * np.float32(2**-23) - np.float32(1)
        put(w, i, unit * bound)


@kernel
def announce(job, start, end, n, last):
    """Publish a job to the threads in :func:`serve`; start < 0 sends them home."""
    job[1], job[2], job[3], job[4] = start, end, n, last
    _atomic_add(job, 0)


@kernel
def serve(tid, threads, program, job, w, p, m, rows, units, sync, clock, seen):
    """What a helper thread does: run each job that ``job`` announces, until none has come for a while."""
    idle = 0
    while idle < IDLE_SPINS:
        number = _atomic_load(job, 0)
        if number == seen:
            idle += 1
            continue
        if job[1] < 0:
            return number
        run(tid, threads, program, job[1], job[2], w, p, m, rows, job[3], job[4], units, sync, clock)
        seen, idle = number, 0
    return seen
