"""The kernels of one decoded token: every thread runs the same list of operations and waits at barriers.

A model is a program, an array of ``OP`` records (program.py writes it); its weights are one flat array ``w`` of fp32,
bf16 (as uint16) or int8; ``p`` holds what is always fp32 (scales, biases, norms, positions); ``m`` is the memory that
operations read and write (caches, then buffers). Nothing is allocated here. All kernels stand in this file, because
numba's disk cache looks at the age of one file only; ``SIMD`` changes this one whenever simd.py changes.

Letters: K inner size, O outputs of a matrix; a panel is 16 outputs of a matrix, stored (K, 16), so that one vector
register holds one input's weights; S modules, in groups of 8; R rows at work (sequences, or positions of a prompt);
T threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .layout import GROUP, PANEL
from .simd import (
    TILE,
    address_of,
    atomic_add,
    atomic_load,
    cycles,
    float_of_bits,
    get,
    offer_core,
    prefetch_read,
    prefetch_write,
    put,
    scaled,
    tile_1x1,
    tile_1x4,
    tile_4x1,
    tile_tx1,
)

SIMD = "4b60830dd074"  # the first digits of simd.py's SHA-256: a test says when to change them

C_SIZE = TILE * PANEL  # floats of a thread's tile of sums
AHEAD = 128  # cache lines that a stream of weights is asked for ahead of its use
K_BLOCK = 512  # inputs of a multiplicative layer gated at a time, so that they stay in cache
SPINS = 2_000  # looks at a barrier before a thread offers its core to others, a few microseconds
IDLE_SPINS = 200_000  # looks for the next token before a thread goes to sleep, well under a millisecond

FIELDS = (
    "code part last join k o w scale bias relu"  # k, o: sizes; w: offset in w; scale, bias: in p, -1 for none
    " x x_row x2 y y_row y_slots y_module y_lane a a_row c parts"  # in m; y_slots: lines of a cache's slot
    " gate gate_scale s b_module sums sums_row"  # mult and conv
    " length width pad lanes cap"  # conv, attend
    " keys values heads scores visible"  # attend
    " w2 scale2 block kind"  # units
    " next next_step"  # where the next operation's weights begin, and a thread's share of them
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


@kernel
def _exp(x):
    """exp of a float32 <= 0 in operations that vectorize: 2^t with t cut in whole + f, a polynomial for 2^f."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-126))
    whole = np.floor(t + np.float32(0.5))
    f = t - whole
    y = np.float32(1.5469732e-4)
    for c in (1.34004322e-3, 9.6180256e-3, 5.55032721e-2, 2.40226512e-1, 6.93147207e-1, 1.0):  # Chebyshev fit
        y = y * f + np.float32(c)
    return y * float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@kernel
def _barrier(sync, threads):
    """Wait for all threads. ``sync[0]`` only ever grows, so that a slow thread cannot miss the moment."""
    if threads == 1:
        return
    target = (atomic_add(sync, 0) // threads + 1) * threads
    spins = 0
    while atomic_load(sync, 0) < target:
        spins += 1
        if offer_core is not None and spins > SPINS:
            offer_core()


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
    if op.gate_scale >= 0:
        factor = get(p, op.gate_scale + module)
        for lane in range(PANEL):
            put(m, c + lane, get(m, c + lane) * factor)
    if op.scale >= 0:
        for lane in range(PANEL):
            put(m, c + lane, get(m, c + lane) * get(p, op.scale + first + lane))
    if op.bias >= 0:
        for lane in range(PANEL):
            put(m, c + lane, get(m, c + lane) + get(p, bias + lane))
    if op.relu:
        for lane in range(PANEL):
            put(m, c + lane, max(get(m, c + lane), np.float32(0)))
    if op.y_lane == 1 and first + PANEL <= op.o:
        for lane in range(PANEL):
            put(m, y + lane, get(m, c + lane))
    else:
        for lane in range(min(PANEL, op.o - first)):
            put(m, y + lane * op.y_lane, get(m, c + lane))


@kernel
def _expect(op, m, panel, y, module, several):
    """Ask for the lines that a tile will be written to: in a cache they were last used a token ago, or never."""
    y += module * op.y_module + panel * PANEL * op.y_lane
    if op.y_lane == 1:
        for j in range(several):
            prefetch_write(m, y + j * op.y_module)
    else:
        for lane in range(PANEL):
            prefetch_write(m, y + lane * op.y_lane)


@kernel
def _linear_one(op, w, p, m, x, y, c, tid, threads):
    """y = x W^T (+ bias) for one row, four panels side by side; sums that need nothing more go straight to y."""
    panels, size, line = (op.o + PANEL - 1) // PANEL, op.k * PANEL, PANEL * w.itemsize
    is_plain = op.scale < 0 and op.bias < 0 and op.relu == 0
    panel, end = panels * tid // threads, panels * (tid + 1) // threads
    while panel < end:
        many, at = 4 if panel + 4 <= end else 1, op.w + panel * size
        to = y + panel * PANEL if is_plain and (panel + many) * PANEL <= op.o else c
        ahead = address_of(w, at + AHEAD * PANEL)
        _clear(m, to, many * PANEL)
        if many == 4:
            tile_1x4(m, x, 1, 0, w, at, size, ahead, line, op.k, m, to)
        else:
            tile_1x1(m, x, 1, 0, w, at, size, ahead, line, op.k, m, to)
        if to == c:
            for j in range(many):
                _finish(op, p, m, c + j * PANEL, panel + j, y, 0)
        panel += many


@kernel
def _linear(op, w, p, m, rows, first, n, c, tid, threads):
    """The same for n rows, which share each panel."""
    panels, size, line = (op.o + PANEL - 1) // PANEL, op.k * PANEL, PANEL * w.itemsize
    if n == 1:
        _linear_one(op, w, p, m, op.x + first * op.x_row, _target(op, rows, first), c, tid, threads)
        return
    for panel in range(panels * tid // threads, panels * (tid + 1) // threads):
        at = op.w + panel * size
        ahead = address_of(w, at + AHEAD * PANEL)
        for r in range(first, first + n, TILE):
            several = min(TILE, first + n - r)
            _rows_of_tile(m, op.x + r * op.x_row, 1, op.x_row, w, at, ahead, line, op.k, c, several)
            for j in range(several):
                _finish(op, p, m, c + j * PANEL, panel, _target(op, rows, r + j), 0)


@kernel
def _rows_of_tile(m, a, ak, ar, w, at, pf, ps, k, c, n):
    """The sums of up to ``TILE`` rows with one panel; rows beyond n are computed from what lies there, and unused."""
    _clear(m, c, C_SIZE)
    if n <= 4:
        tile_4x1(m, a, ak, ar, w, at, 0, pf, ps, k, m, c)
    else:
        tile_tx1(m, a, ak, ar, w, at, 0, pf, ps, k, m, c)


@kernel
def _gate(op, w, m, x, a, first, count, stride):
    """Inputs first .. first + count - 1 gated for every module: a[g, i, lane] = x_i D[g, i, lane]."""
    for g in range((op.s + GROUP - 1) // GROUP):
        for i in range(count):
            source = op.gate + (g * op.k + first + i) * GROUP
            scaled(m, a + (g * stride + i) * GROUP, w, source, get(m, x + first + i))


@kernel
def _ahead_of_mult(op, w, panel, start, count, hi, tile, tiles, tid):
    """What a tile asks for ahead, and in what steps: (address, bytes an input).

    The tiles of a panel share out the next panel; those of the last one, the gates of the inputs that come next; those
    of the last inputs, the next operation's weights.
    """
    if panel * PANEL + PANEL < op.o:
        address, line = address_of(w, op.w + ((panel + 1) * op.k + start) * PANEL), PANEL * w.itemsize
    elif start + count < hi:
        group = tile * TILE // GROUP
        return address_of(w, op.gate + (group * op.k + start + count) * GROUP), GROUP * w.itemsize
    else:
        address, line = address_of(w, op.next + tid * op.next_step), PANEL * w.itemsize
    return address + tile * (count // tiles) * line, max(line // tiles, 1)


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
                panel, tile = t // tiles_s, t % tiles_s
                source, at = (
                    a + tile * TILE // GROUP * K_BLOCK * GROUP + tile * TILE % GROUP,
                    op.w + (panel * op.k + start) * PANEL,
                )
                pf, ps = _ahead_of_mult(op, w, panel, start, count, hi, tile, tiles_s, tid)
                tile_tx1(m, source, GROUP, 1, w, at, 0, pf, ps, count, m, mine + t * C_SIZE)
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
                at = op.w + panel * op.k * PANEL
                pf = address_of(w, at + AHEAD * PANEL)
                _rows_of_tile(m, a + s, GROUP, 1, w, at, pf, PANEL * w.itemsize, op.k, c, several)
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
    size, ps = op.length * op.width * op.k * PANEL, max(PANEL // tiles, 1) * w.itemsize
    lo, hi = n * panels * tiles * tid // threads, n * panels * tiles * (tid + 1) // threads
    last = (hi - 1) // (tiles * n)
    for t in range(lo, hi):
        panel, s, r = t // (tiles * n), t % tiles * TILE, first + t // tiles % n
        several = min(TILE, op.s - s)
        following = address_of(w, op.w + (panel + 1) * size if panel < last else op.next + tid * op.next_step)
        _expect(op, m, panel, _target(op, rows, r), s, several)
        _clear(m, c, C_SIZE)
        for f in range(op.length):
            position = rows[r, POSITION] - op.length + 1 + f
            if position < 0:
                continue
            line = op.x + (rows[r, SLOT] * op.cap + position) * op.x_row + op.pad - op.width // 2 + s
            for j in range(op.width):
                tap = (f * op.width + j) * op.k * PANEL
                at = op.w + panel * size + tap
                pf = following + (s // TILE * size + tap) // tiles * w.itemsize
                if several <= 4:
                    tile_4x1(m, line + j, op.lanes, 1, w, at, 0, pf, ps, op.k, m, c)
                else:
                    tile_tx1(m, line + j, op.lanes, 1, w, at, 0, pf, ps, op.k, m, c)
        for j in range(several):
            _finish(op, p, m, c + j * PANEL, panel, _target(op, rows, r), s + j)


@kernel
def _attend(op, m, rows, r, tid, threads):
    """y = softmax(q k^T / sqrt(dh)) v for this thread's heads, over the first keys of the row's slot."""
    heads, width = op.heads, op.k // op.heads
    lo, hi, count = heads * tid // threads, heads * (tid + 1) // threads, rows[r, op.visible]
    start = rows[r, SLOT] * op.cap * op.k
    ahead = 1 + 2048 // ((hi - lo) * width + 1)  # positions: 8 KiB of keys
    q, y, root = op.x + r * op.k, op.y + r * op.k, np.float32(1 / np.sqrt(width))
    for t in range(count):
        for h in range(lo, hi):
            key, total = op.keys + start + t * op.k + h * width, np.float32(0)
            for i in range(0, width, 16):
                prefetch_read(m, key + ahead * op.k + i)
                prefetch_read(m, op.values + start + t * op.k + h * width + i)
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
    then = cycles()
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
            now = cycles()
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
    atomic_add(job, 0)


@kernel
def serve(tid, threads, program, job, w, p, m, rows, units, sync, clock, seen):
    """What a helper thread does: run each job that ``job`` announces, until none has come for a while."""
    idle = 0
    while idle < IDLE_SPINS:
        number = atomic_load(job, 0)
        if number == seen:
            idle += 1
            continue
        if job[1] < 0:
            return number
        run(tid, threads, program, job[1], job[2], w, p, m, rows, job[3], job[4], units, sync, clock)
        seen, idle = number, 0
    return seen
