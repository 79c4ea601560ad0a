"""The kernels of one decoded token: every thread runs the same list of operations and waits at barriers.

A model is a program, an array of ``OP`` records (program.py writes it); its weights are one flat array ``w`` of fp32,
bf16 (as uint16) or int8; ``p`` holds what is always fp32 (scales, biases, norms, positions); ``m`` is the memory that
operations read and write (caches, then buffers). Nothing is allocated here. Products of matrices are in products.py,
what hashing adds to attention in hashing.py.
numba's disk cache looks at the age of the file of a kernel only, so ``BUILT_ON`` changes this one whenever those it is
built on change.

Letters: K inner size, O outputs of a matrix; a panel is 16 outputs of a matrix, stored (K, 16), so that one vector
register holds one input's weights; S modules, in groups of 8; R rows at work (sequences, or positions of a prompt);
T threads.
"""

from __future__ import annotations

import numpy as np

from .hashing import bucket, latest, merge, nearby, put_whole, sort, whole
from .layout import GROUP
from .operations import (
    ATTEND,
    BUCKET,
    CONV,
    LINEAR,
    MERGE,
    MULT,
    NORM,
    POSITION,
    RECUR,
    SLOT,
    SORT,
    SOURCE,
    SPARSE,
    SPREAD,
    SWITCH,
    TOKEN,
    UNITS,
)
from .products import C_SIZE, barrier, clear, conv, linear, mult, mult_wide, target
from .simd import atomic_add, atomic_load, cycles, float_of_bits, get, kernel, prefetch_read, put

BUILT_ON = "00f7681abc80"  # the first digits of the SHA-256 of what it is built on: a test says when to change them
LOWEST = np.float32(-3e38)  # score of a position with itself in attention by hashing, which leaves it out beside others
POSITIONS = 4  # keys or values worked on at a time
IDLE_SPINS = 200_000  # looks for the next token before a thread goes to sleep, well under a millisecond


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
def _embed(op, w, p, m, rows, r, lo, hi):
    line, place = rows[r, TOKEN] * op.k, rows[r, POSITION] - (rows[r, SOURCE] if op.relative else 0)
    scale = get(p, op.scale + rows[r, TOKEN]) if op.scale >= 0 else np.float32(1)
    for i in range(lo, hi):
        put(m, op.y + r * op.k + i, get(w, op.w + line + i) * scale + get(p, op.bias + place * op.k + i))


@kernel
def _norm(op, p, m, r, tid, threads):
    """x' = x + what the last layer gave (``parts`` sums, and a bias), or the mean of that and ``other``; z = LN(x').

    Every thread adds up and measures all of the row in a line of its own, and writes its own columns of x' and z: two
    barriers fewer. x' is not written over x, which others may still be reading.
    """
    x, mine, parts = op.x + r * op.k, op.a + tid * op.k, threads - 1 - op.parts if op.parts < 0 else op.parts
    for i in range(op.k):
        put(m, mine + i, get(m, x + i) + get(p, op.bias + i) if op.bias >= 0 else get(m, x + i))
    for part in range(parts):
        delta = op.x2 + part * op.x_row + r * op.k
        for i in range(op.k):
            put(m, mine + i, get(m, mine + i) + get(m, delta + i))
    if op.other >= 0:
        for i in range(op.k):
            put(m, mine + i, np.float32(0.5) * (get(m, mine + i) + get(m, op.other + r * op.k + i)))
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
def _spread(op, m, rows, r, tid, threads):
    """A row (S, M) into its line of a convolution's history, (M, lanes) with zeros on both sides of the modules."""
    y, width = target(op, rows, r) + op.pad, op.k // op.s
    for s in range(op.s * tid // threads, op.s * (tid + 1) // threads):
        for i in range(width):
            put(m, y + i * op.lanes + s, get(m, op.x + r * op.k + s * width + i))


@kernel
def _fetch(m, at, count):
    """Ask for ``count`` floats from m[at]."""
    for i in range(0, count, 16):
        prefetch_read(m, at + i)


@kernel
def _dots(m, q, keys, apart, n, width, scale, scores):
    """Scores of n keys ``apart`` floats apart: four at a time, as four sums wait less than one."""
    for t in range(0, n - n % 4, 4):
        ka, kb, kc, kd = keys + t * apart, keys + (t + 1) * apart, keys + (t + 2) * apart, keys + (t + 3) * apart
        a = b = c = d = np.float32(0)
        for i in range(width):
            x = get(m, q + i)
            a += x * get(m, ka + i)
            b += x * get(m, kb + i)
            c += x * get(m, kc + i)
            d += x * get(m, kd + i)
        put(m, scores + t, a * scale)
        put(m, scores + t + 1, b * scale)
        put(m, scores + t + 2, c * scale)
        put(m, scores + t + 3, d * scale)
    for t in range(n - n % 4, n):
        total = np.float32(0)
        for i in range(width):
            total += get(m, q + i) * get(m, keys + t * apart + i)
        put(m, scores + t, total * scale)


@kernel
def _softmax(m, scores, n):
    highest, total = get(m, scores), np.float32(0)
    for t in range(n):
        highest = max(highest, get(m, scores + t))
    for t in range(n):
        put(m, scores + t, _exp(get(m, scores + t) - highest))
    for t in range(n):
        total += get(m, scores + t)
    for t in range(n):
        put(m, scores + t, get(m, scores + t) / total)


@kernel
def _mix(m, values, apart, n, width, scores, y):
    """y += the n values, each times its score, four at a time."""
    for t in range(0, n - n % 4, 4):
        va, vb, vc, vd = (
            values + t * apart,
            values + (t + 1) * apart,
            values + (t + 2) * apart,
            values + (t + 3) * apart,
        )
        a, b, c, d = get(m, scores + t), get(m, scores + t + 1), get(m, scores + t + 2), get(m, scores + t + 3)
        for i in range(width):
            more = a * get(m, va + i) + b * get(m, vb + i) + c * get(m, vc + i) + d * get(m, vd + i)
            put(m, y + i, get(m, y + i) + more)
    for t in range(n - n % 4, n):
        share = get(m, scores + t)
        for i in range(width):
            put(m, y + i, get(m, y + i) + share * get(m, values + t * apart + i))


@kernel
def _attend(op, m, rows, r, tid, threads):
    """y = softmax(q k^T / sqrt(dh)) v for this thread's heads, over the first keys of the row's slot.

    A few positions at a time, all heads, so that memory is read in order; values that fit in the cache are asked for
    while the keys are read.
    """
    heads, width = op.heads, op.k // op.heads
    lo, hi, count = heads * tid // threads, heads * (tid + 1) // threads, rows[r, op.visible]
    start = rows[r, SLOT] * op.cap * op.k + lo * width
    q, y, root, share = op.x + r * op.k, op.y + r * op.k, np.float32(1 / np.sqrt(width)), (hi - lo) * width
    early, keys, values = count * share <= 2**16, op.keys + start, op.values + start
    for t in range(0, count, POSITIONS):
        n = min(POSITIONS, count - t)
        for j in range(n):
            _fetch(m, keys + (t + POSITIONS + j) * op.k, share)
            if early:
                _fetch(m, values + (t + j) * op.k, share)
        for h in range(lo, hi):
            at = (h - lo) * width
            _dots(m, q + h * width, keys + t * op.k + at, op.k, n, width, root, op.scores + h * op.cap + t)
    for h in range(lo, hi):
        if op.rounds:
            put(m, op.scores + h * op.cap + rows[r, POSITION], LOWEST)
        _softmax(m, op.scores + h * op.cap, count)
    clear(m, y + lo * width, share)
    for t in range(0, count, POSITIONS):
        n = min(POSITIONS, count - t)
        if not early:
            for j in range(n):
                _fetch(m, values + (t + POSITIONS + j) * op.k, share)
        for h in range(lo, hi):
            at = (h - lo) * width
            _mix(m, values + t * op.k + at, op.k, n, width, op.scores + h * op.cap + t, y + h * width)


@kernel
def _attend_found(op, m, rows, r, tid, threads):
    """The same over the keys that hashing finds, and the row itself.

    One softmax over the keys of all rounds, where what is found twice counts twice, is what the rounds' results give
    when they are combined by their sums of exp(z).
    """
    width, found = op.k // op.heads, op.a + tid * op.a_row
    scores, start = found + op.a_row // 2, rows[r, SLOT] * op.cap * op.k
    for h in range(op.heads * tid // threads, op.heads * (tid + 1) // threads):
        q, y = op.x + r * op.k + h * width, op.y + r * op.k + h * width
        keys, values = op.keys + start + h * width, op.values + start + h * width
        n = nearby(op, m, rows, r, h, found) if op.chunk else latest(op, m, rows, r, h, found)
        put_whole(m, found + n, rows[r, POSITION])
        for j in range(n):
            _fetch(m, keys + whole(m, found + min(j + POSITIONS, n)) * op.k, width)
            _fetch(m, values + whole(m, found + j) * op.k, width)
            _dots(m, q, keys + whole(m, found + j) * op.k, 0, 1, width, np.float32(1 / np.sqrt(width)), scores + j)
        put(m, scores + n, LOWEST)
        _softmax(m, scores, n + 1)
        clear(m, y, width)
        for j in range(n + 1):
            _mix(m, values + whole(m, found + j) * op.k, 0, 1, width, scores + j, y)


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
    clear(m, y, k)
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
def _sigmoid(x):
    e = _exp(-abs(x))
    return (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@kernel
def _recur(op, m, rows, r, tid, threads):
    """c = f c' + (1 - f) y with the cell c' of the position before, h = g c + (1 - g) x sqrt(3); this thread's units.

    The line of gates is g, f, y before their sigmoids. A slot's rows come in the order of their positions.
    """
    k, gates, at = op.k, op.x + r * op.x_row, rows[r, POSITION]
    cell, first = op.keys + (rows[r, SLOT] * op.cap + at) * op.k, at == 0
    for i in range(k * tid // threads, k * (tid + 1) // threads):
        g, f = _sigmoid(get(m, gates + i)), _sigmoid(get(m, gates + k + i))
        before = np.float32(0) if first else get(m, cell - k + i)
        c = f * before + (np.float32(1) - f) * get(m, gates + 2 * k + i)
        put(m, cell + i, c)
        put(m, op.y + r * k + i, g * c + (np.float32(1) - g) * get(m, op.x2 + r * k + i) * np.float32(3**0.5))


@kernel
def run(tid, threads, program, start, end, w, p, m, rows, n, last, units, sync, clock):
    """Operations start .. end for rows 0 .. n-1 (``last`` operations: for the last ``last`` of them), as thread tid."""
    then = cycles()
    for step in range(start, end):
        op = program[step]
        first, count = (n - last, last) if op.last else (0, n)
        c = op.c + tid * 2 * C_SIZE  # a tile of its own, cache lines away from the next thread's
        if op.code == LINEAR:
            linear(op, w, p, m, rows, first, count, c, tid, threads)
        elif op.code == MULT:
            if op.s <= GROUP:
                mult_wide(op, w, p, m, rows, first, count, c, tid, threads)
            else:
                mult(op, w, p, m, rows, first, count, sync, tid, threads)
        elif op.code == CONV:
            conv(op, w, p, m, rows, first, count, c, tid, threads)
        else:
            for r in range(first, first + count):
                if op.code == NORM:
                    _norm(op, p, m, r, tid, threads)
                elif op.code == ATTEND:
                    if op.rounds and rows[r, op.visible] > op.full:
                        _attend_found(op, m, rows, r, tid, threads)
                    else:
                        _attend(op, m, rows, r, tid, threads)
                elif op.code == UNITS:
                    _units(op, w, p, m, units, r, tid, threads)
                elif op.code == SPREAD:
                    _spread(op, m, rows, r, tid, threads)
                elif op.code == RECUR:
                    _recur(op, m, rows, r, tid, threads)
                elif op.code == MERGE:
                    merge(op, m, rows, r, tid, threads)
                elif op.code == BUCKET:
                    bucket(op, p, m, rows, r, tid, threads)
                elif op.code == SORT:
                    sort(op, m, rows, r, tid, threads)
                else:
                    _embed(op, w, p, m, rows, r, op.k * tid // threads, op.k * (tid + 1) // threads)
        if op.join:
            barrier(sync, threads)
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
