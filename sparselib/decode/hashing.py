"""Kernels of attention by hashing: the vector that is hashed, its buckets, and whom a position finds by them.

They are called by kernels.py, where the arguments are explained; what they compute is the rule of layers/lsh.py. The
memory m holds floats; positions and buckets, which are whole numbers, stand there as their bits. numba's disk cache
looks at the age of the file of a kernel only, so ``BUILT_ON`` changes this one whenever those it is built on change.

Letters: H heads of width dh; R = n_hashes rounds; C = chunk_len; T positions. Buckets of a slot: (H, R, T), so that a
search reads them in order.
"""

from __future__ import annotations

import numpy as np

from .operations import POSITION, SLOT, VISIBLE
from .products import clear
from .simd import bits_of_float, float_of_bits, get, kernel, put

BUILT_ON = "8831880c7524"  # the first digits of the SHA-256 of simd.py and products.py: a test says when to change them
AT_ONCE = 32  # buckets compared in vector registers before they are looked at one by one


@kernel
def whole(m, at):
    return bits_of_float(get(m, at))


@kernel
def put_whole(m, at, number):
    put(m, at, float_of_bits(np.int32(number)))


@kernel
def _round(op, first, rows, r, h, i):
    """Where head h's round i of row r's slot begins, of all that begin at ``first``."""
    return first + ((rows[r, SLOT] * op.heads + h) * op.rounds + i) * op.cap


@kernel
def merge(op, m, rows, r, tid, threads):
    """Query and key become one: qk = (q + k) / 2 in the query's place, the same normalised in the key's."""
    width, q = op.k // op.heads, op.x + r * op.k
    key = op.keys + (rows[r, SLOT] * op.cap + rows[r, POSITION]) * op.k
    for h in range(op.heads * tid // threads, op.heads * (tid + 1) // threads):
        square = np.float32(0)
        for i in range(h * width, (h + 1) * width):
            x = np.float32(0.5) * (get(m, q + i) + get(m, key + i))
            put(m, q + i, x)
            square += x * x
        rate = np.float32(1) / np.sqrt(square / np.float32(width) + np.float32(1e-6))
        for i in range(h * width, (h + 1) * width):
            put(m, key + i, get(m, q + i) * rate)


@kernel
def _turn(op, p, m, x, rotation, u):
    """m[u ..] = x . rotation, of its ``o`` columns that belong to this factor."""
    clear(m, u, op.o)
    for i in range(op.k // op.heads):
        value, line = get(m, x + i), rotation + i * op.columns
        for j in range(op.o):
            put(m, u + j, get(m, u + j) + value * get(p, line + j))


@kernel
def bucket(op, p, m, rows, r, tid, threads):
    """One factor's share in the bucket of every round: ``below`` times the arg-max of [u, -u], u = qk . rotation."""
    width, u = op.k // op.heads, op.a + tid * op.a_row
    for h in range(op.heads * tid // threads, op.heads * (tid + 1) // threads):
        for i in range(op.rounds):
            _turn(op, p, m, op.x + r * op.k + h * width, op.rotation + (h * op.rounds + i) * width * op.columns, u)
            best = 0
            for j in range(1, op.o):
                if abs(get(m, u + j)) > abs(get(m, u + best)):
                    best = j
            if get(m, u + best) < 0:
                best += op.o
            at = _round(op, op.buckets, rows, r, h, i) + rows[r, POSITION]
            put_whole(m, at, best if op.below == 1 else whole(m, at) + op.below * best)


@kernel
def _place(m, buckets, t, count):
    """Where position t stands among ``count`` sorted by their buckets, those of one bucket in their own order."""
    mine, before = whole(m, buckets + t), 0
    for s in range(t):
        before += whole(m, buckets + s) <= mine
    for s in range(t + 1, count):
        before += whole(m, buckets + s) < mine
    return before


@kernel
def sort(op, m, rows, r, tid, threads):
    """The row's position, put in its place in the sorted list of every round."""
    t = rows[r, POSITION]
    for h in range(op.heads * tid // threads, op.heads * (tid + 1) // threads):
        for i in range(op.rounds):
            place = _place(m, _round(op, op.buckets, rows, r, h, i), t, rows[r, VISIBLE])
            put_whole(m, _round(op, op.order, rows, r, h, i) + place, t)


@kernel
def latest(op, m, rows, r, h, found):
    """Into m[found ..], for every round the latest ``window`` positions before the row's in its bucket; how many."""
    t, n = rows[r, POSITION], 0
    for i in range(op.rounds):
        buckets = _round(op, op.buckets, rows, r, h, i)
        mine, most, end = whole(m, buckets + t), n + op.window, t
        while end > 0 and n < most:
            start, same = max(end - AT_ONCE, 0), 0
            for s in range(start, end):
                same += whole(m, buckets + s) == mine
            if same:
                for s in range(end - 1, start - 1, -1):
                    if n < most and whole(m, buckets + s) == mine:
                        put_whole(m, found + n, s)
                        n += 1
            end = start
    return n


@kernel
def nearby(op, m, rows, r, h, found):
    """Into m[found ..], whoever stands in the row's chunk of the sorted list, or in those beside it; how many.

    All rounds make one list, in which the chunk before the first is the last. No chunk comes twice.
    """
    t, count, n = rows[r, POSITION], rows[r, VISIBLE], 0
    chunks = (count + op.chunk - 1) // op.chunk  # of one round
    most = min(op.before + 1 + op.after, op.rounds * chunks)
    for i in range(op.rounds):
        left = i * chunks + _place(m, _round(op, op.buckets, rows, r, h, i), t, count) // op.chunk - op.before
        for other in range(left, left + most):
            of_all = other % (op.rounds * chunks)
            order, first = _round(op, op.order, rows, r, h, of_all // chunks), of_all % chunks * op.chunk
            for j in range(first, min(first + op.chunk, count)):
                s = whole(m, order + j)
                if s != t:
                    put_whole(m, found + n, s)
                    n += 1
    return n
