"""The operations that a model's program is made of (program.py writes them, kernels.py runs them): one record each.

An offset of w, p or m counts entries of the weights, of the fp32 parameters, of the working memory.
"""

from __future__ import annotations

import numpy as np

FIELDS = (
    "code part last join k o w scale bias relu"  # k, o: sizes; w: offset in w; scale, bias: in p, -1 for none
    " x x_row x2 y y_row y_slots y_module y_lane a a_row c parts"  # in m; y_slots: lines of a cache's slot
    " gate gate_scale s b_module sums sums_row"  # mult and conv
    " length width pad lanes cap"  # conv, attend
    " keys values heads scores visible"  # attend
    " w2 scale2 block kind"  # units
    " next next_step"  # where the next operation's weights begin, and a thread's share of them
    " z gamma beta other"  # norm; other: a second stream to take the mean with, -1 for none
    " relative"  # embed: whether positions are counted from the end of the source
    " buckets rounds order rotation columns below"  # hashing; rotation: in p; below: what a factor's arg-max counts
    " full window chunk before after"  # attend by hashing, as in LSHSizes; chunk: 0 where a position sees the past only
)
OP = np.dtype([(name, np.int64) for name in FIELDS.split()])
EMBED, NORM, LINEAR, MULT, CONV, SPREAD, ATTEND, UNITS, RECUR, MERGE, BUCKET, SORT = range(12)
SPARSE, BLOCK, SWITCH = range(3)  # ``kind`` of UNITS
TOKEN, SLOT, POSITION, VISIBLE, SOURCE = range(5)  # columns of ``rows``: VISIBLE, SOURCE count keys to attend to
