"""What numba has no words for: vectors that stay in registers, prefetches, atomic counters, loads of bf16 and int8.

Each function here becomes a few machine instructions inside the kernels that call it (kernels.py), on every processor
that LLVM knows: a vector of 16 floats is one AVX-512 register, two of AVX2, four of NEON.
Letters: K inner size; a panel is 16 outputs of a matrix, stored (K, 16); w weights, of any packed dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .layout import GROUP, PANEL

TILE = 8 if llvm.get_host_cpu_features().get("avx512f") else 4  # rows whose sums fit in the registers
MATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinity keep their meaning


def kernel(function: Callable) -> Any:
    """Compile without the GIL, cached on disk wherever a folder can be written to, else in every process."""
    try:
        return njit(nogil=True, fastmath=MATH, cache=True)(function)
    except RuntimeError:  # "no locator available": neither the package's folder nor the user's can be written to
        return njit(nogil=True, fastmath=MATH)(function)


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
def float_of_bits(typing: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of_float(typing: Any, x: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


def _emit_prefetch(builder: Any, pointer: Any, write: int) -> None:
    pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    i32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    level = 3 if write else 1  # into all caches, or all but the first, which has room for few requests at a time
    builder.call(function, [pointer, *(i32(v) for v in (write, level, 1))])  # 1: data


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
def scaled(typing: Any, m: Any, to: Any, w: Any, at: Any, x: Any) -> Any:
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
def address_of(typing: Any, array: Any, index: Any) -> Any:
    """Where ``array[index]`` stands in memory."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(_data(context, builder, array, *args), ir.IntType(64))

    return types.int64(array, types.int64), generate


@intrinsic
def cycles(typing: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@intrinsic
def atomic_add(typing: Any, array: Any, index: Any) -> Any:
    """Add 1 to ``array[index]`` for all threads at once; its value before."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _data(context, builder, array, args[0], args[1])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(array, types.int64), generate


@intrinsic
def atomic_load(typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_data(context, builder, array, args[0], args[1]), "seq_cst", 8)

    return types.int64(array, types.int64), generate


def _spread_scalar(builder: Any, x: Any, vector: Any) -> Any:
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _make_tile(rows: int, inputs: int) -> Any:
    """The innermost loop: sums of ``rows`` rows times a panel stay in registers for all of K, ``inputs`` at a time.

    Several inputs for one row, as each sum waits for the one before it; k is then a multiple of them.
    """

    @intrinsic
    def tile(
        typing: Any, a: Any, ai: Any, ak: Any, ar: Any, w: Any, wi: Any, pf: Any, ps: Any, k: Any, c: Any, ci: Any
    ) -> Any:
        """c[ci + r 16 + l] += sum_i a[ai + i ak + r ar] w[wi + 16 i + l], i < k; asks for what is at pf + i ps."""
        i64, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), PANEL)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            stored = ir.VectorType(context.get_data_type(w.dtype), PANEL)
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{PANEL}f32"
            )
            first_a = _data(context, builder, a, args[0], args[1])
            first_w = _data(context, builder, w, args[4], args[5])
            asked = builder.inttoptr(args[6], ir.IntType(8).as_pointer())
            first_c = builder.bitcast(_data(context, builder, c, args[9], args[10]), vector.as_pointer())
            places = [builder.gep(first_c, [i64(r)]) for r in range(rows)]
            starts = [builder.load(place, align=4) for place in places] + [vector(None)] * (rows * (inputs - 1))
            before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("end")
            builder.branch(loop)
            builder.position_at_end(loop)
            i = builder.phi(i64)
            i.add_incoming(i64(0), before)
            sums = [builder.phi(vector) for _ in starts]
            for phi, start in zip(sums, starts, strict=True):
                phi.add_incoming(start, before)
            new = []
            for u in range(inputs):
                input = builder.add(i, i64(u))
                pointer = builder.gep(first_w, [builder.mul(input, i64(PANEL))])
                loaded = builder.load(builder.bitcast(pointer, stored.as_pointer()), align=1)
                weights = _to_float(builder, loaded, w.dtype, lambda t: ir.VectorType(t, PANEL))
                at_a = builder.gep(first_a, [builder.mul(input, args[2])])
                for r in range(rows):
                    x = builder.load(builder.gep(at_a, [builder.mul(args[3], i64(r))]))
                    everywhere = _spread_scalar(builder, x, vector)
                    new.append(builder.call(fma, [everywhere, weights, sums[u * rows + r]]))
            if inputs == 1:  # else memory is read in order, and the processor asks ahead by itself
                _emit_prefetch(builder, builder.gep(asked, [builder.mul(i, args[7])]), 0)
            following = builder.add(i, i64(inputs))
            i.add_incoming(following, loop)
            for phi, value in zip(sums, new, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, args[8]), loop, after)
            builder.position_at_end(after)
            for r, place in enumerate(places):
                builder.store(reduce(builder.fadd, new[r::rows]), place, align=4)
            return context.get_dummy_value()

        ints = types.int64
        return types.void(a, ints, ints, ints, w, ints, ints, ints, ints, c, ints), generate

    return tile


tile_1x1, tile_1x4, tile_4x1, tile_tx1 = (_make_tile(*shape) for shape in ((1, 1), (1, 4), (4, 1), (TILE, 1)))
prefetch_read, prefetch_write = (_make_prefetch(write) for write in (0, 1))
# A thread offers its core to others; None where the system has no such call.
offer_core = types.ExternalFunction("sched_yield", types.int32()) if os.name == "posix" else None
