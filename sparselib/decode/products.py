"""Kernels for matrices: a vector or several rows with a matrix, multiplicative layers, convolutions.

They are called by kernels.py, where the letters and arguments are explained. numba's disk cache looks at the age of
the file of a kernel only, so ``BUILT_ON`` changes this one whenever simd.py changes.
"""

from __future__ import annotations

import numpy as np

from .layout import GROUP, PANEL
from .operations import POSITION, SLOT
from .simd import (
    TILE,
    address_of,
    atomic_add,
    atomic_load,
    get,
    kernel,
    offer_core,
    prefetch_write,
    put,
    scaled,
    tile_1x1,
    tile_1x4,
    tile_4x1,
    tile_tx1,
)

BUILT_ON = "465114131c91"  # the first digits of the SHA-256 of simd.py: a test says when to change them

C_SIZE = TILE * PANEL  # floats of a thread's tile of sums
K_BLOCK = 512  # inputs of a multiplicative layer gated at a time, so that they stay in cache
SPINS = 2_000  # looks at a barrier before a thread offers its core to others, a few microseconds


@kernel
def barrier(sync, threads):
    """Wait for all threads. ``sync[0]`` only ever grows, so that a slow thread cannot miss the moment."""
    if threads == 1:
        return
    target = (atomic_add(sync, 0) // threads + 1) * threads
    spins = 0
    while atomic_load(sync, 0) < target:
        spins += 1
        if offer_core is not None and spins > SPINS:
            offer_core()


@kernel
def target(op, rows, r):
    """Where row r's output starts: its own line of a buffer, or the line of its slot and position in a cache."""
    line = r if op.y_slots == 0 else rows[r, SLOT] * op.y_slots + rows[r, POSITION]
    return op.y + line * op.y_row


@kernel
def clear(m, c, size):
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
def _rows_of_tile(m, a, ak, ar, w, at, k, c, n):
    """The sums of up to ``TILE`` rows with one panel; rows beyond n are computed from what lies there, and unused."""
    clear(m, c, C_SIZE)
    if n <= 4:
        tile_4x1(m, a, ak, ar, w, at, address_of(w, at), 0, k, m, c)
    else:
        tile_tx1(m, a, ak, ar, w, at, address_of(w, at), 0, k, m, c)


@kernel
def _linear_one(op, w, p, m, x, y, c, tid, threads):
    """y = x W^T (+ bias) for one row; sums that need nothing more go straight to y.

    A panel after the other, in the order of memory: a core reads that faster than several panels side by side.
    """
    panels, size, whole = (op.o + PANEL - 1) // PANEL, op.k * PANEL, op.k // 4 * 4
    is_plain = op.scale < 0 and op.bias < 0 and op.relu == 0
    for panel in range(panels * tid // threads, panels * (tid + 1) // threads):
        at = op.w + panel * size
        to = y + panel * PANEL if is_plain and (panel + 1) * PANEL <= op.o else c
        clear(m, to, PANEL)
        if whole:
            tile_1x4(m, x, 1, 0, w, at, 0, 0, whole, m, to)
        if whole < op.k:
            rest = at + whole * PANEL
            tile_1x1(m, x + whole, 1, 0, w, rest, address_of(w, rest), 0, op.k - whole, m, to)
        if to == c:
            _finish(op, p, m, c, panel, y, 0)


@kernel
def linear(op, w, p, m, rows, first, n, c, tid, threads):
    """The same for n rows, which share each panel."""
    panels, size = (op.o + PANEL - 1) // PANEL, op.k * PANEL
    if n == 1:
        _linear_one(op, w, p, m, op.x + first * op.x_row, target(op, rows, first), c, tid, threads)
        return
    for panel in range(panels * tid // threads, panels * (tid + 1) // threads):
        at = op.w + panel * size
        for r in range(first, first + n, TILE):
            several = min(TILE, first + n - r)
            _rows_of_tile(m, op.x + r * op.x_row, 1, op.x_row, w, at, op.k, c, several)
            for j in range(several):
                _finish(op, p, m, c + j * PANEL, panel, target(op, rows, r + j), 0)


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
def mult(op, w, p, m, rows, first, n, sync, tid, threads):
    """y[s, m] = sum_i x_i D[i, s] E[i, m], as a matrix product of S gated rows with E's panels.

    Each thread takes a share of the inputs i, so that it reads its part of D and E only and shares nothing but sums.
    """
    tiles_s, panels = (op.s + TILE - 1) // TILE, (op.o + PANEL - 1) // PANEL
    lo, hi, a = op.k * tid // threads, op.k * (tid + 1) // threads, op.a + tid * op.a_row
    for r in range(first, first + n):
        all_sums = op.sums + (r - first) % 2 * threads * op.sums_row  # two: others may still read the last row's
        mine = all_sums + tid * op.sums_row
        clear(m, mine, panels * tiles_s * C_SIZE)
        for t in range(panels * tiles_s * tid // threads, panels * tiles_s * (tid + 1) // threads):
            _expect(op, m, t // tiles_s, target(op, rows, r), t % tiles_s * TILE, TILE)
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
                tile_tx1(m, source, GROUP, 1, w, at, pf, ps, count, m, mine + t * C_SIZE)
        barrier(sync, threads)
        y = target(op, rows, r)
        for t in range(panels * tiles_s * tid // threads, panels * tiles_s * (tid + 1) // threads):
            total, s = all_sums + t * C_SIZE, t % tiles_s * TILE
            for part in range(1, threads):
                for i in range(C_SIZE):
                    put(m, total + i, get(m, total + i) + get(m, total + part * op.sums_row + i))
            for j in range(min(TILE, op.s - s)):
                _finish(op, p, m, total + j * PANEL, t // tiles_s, y, s + j)


@kernel
def mult_wide(op, w, p, m, rows, first, n, c, tid, threads):
    """The same for one group of modules: each thread gates all inputs, and takes a share of the outputs."""
    panels, a = (op.o + PANEL - 1) // PANEL, op.a + tid * op.a_row
    for r in range(first, first + n):
        _gate(op, w, m, op.x + r * op.x_row, a, 0, op.k, op.k)
        y = target(op, rows, r)
        for panel in range(panels * tid // threads, panels * (tid + 1) // threads):
            for s in range(0, op.s, TILE):
                several = min(TILE, op.s - s)
                at = op.w + panel * op.k * PANEL
                _rows_of_tile(m, a + s, GROUP, 1, w, at, op.k, c, several)
                for j in range(several):
                    _finish(op, p, m, c + j * PANEL, panel, y, s + j)


@kernel
def conv(op, w, p, m, rows, first, n, c, tid, threads):
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
        _expect(op, m, panel, target(op, rows, r), s, several)
        clear(m, c, C_SIZE)
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
                    tile_4x1(m, line + j, op.lanes, 1, w, at, pf, ps, op.k, m, c)
                else:
                    tile_tx1(m, line + j, op.lanes, 1, w, at, pf, ps, op.k, m, c)
        for j in range(several):
            _finish(op, p, m, c + j * PANEL, panel, target(op, rows, r), s + j)
