"""Notebook 13: how costs are counted and told; never a time."""

import pytest
import torch
from pandas import DataFrame

from sparselib.config import LSHSizes
from sparselib.experiments import lsh_cost
from sparselib.experiments.lsh import draw_rotations
from sparselib.experiments.lsh_cost import FULL, hashing_in
from sparselib.layers.attention import attend_slowly
from sparselib.layers.lsh import bucket_attend, hash_buckets, normalized

from ..helpers import vectors

SIZES = LSHSizes(n_hashes=2, n_buckets=4, chunk_len=16)
LENGTHS = (64, 128, 256)
TWO = hashing_in(2)


@pytest.fixture(scope="module")
def cost():
    return lsh_cost.measure_cost(LENGTHS, 8, (1, 2), SIZES, repeat=1, most_bytes=1e9)


def told(**took):
    """A frame with what each took at 100, 200, ... positions, as time and memory."""
    names = dict(zip(("written", "fused", "hashing"), (*FULL, TWO), strict=True))
    rows = [
        {"attention": names[name], "positions": 100 * 2**i, "ms": value, "MB": value}
        for name, values in took.items()
        for i, value in enumerate(values)
    ]
    return DataFrame(rows)


def test_every_contender_gives_the_gradients_of_both_inputs():
    for name, step in lsh_cost.contenders(48, 8, (1, 2), SIZES, seed=0).items():
        assert [g.shape for g in step()] == [(1, 1, 48, 8)] * 2, name
        assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True)), name


def test_contenders_are_the_attentions_they_are_called():
    sizes = LSHSizes(n_hashes=1, n_buckets=2, chunk_len=48)  # a chunk over the whole length: hashing sees all
    steps = lsh_cost.contenders(48, 8, (2,), sizes, seed=0)
    written, fused, hashed = (steps[name]() for name in (*FULL, TWO))
    torch.testing.assert_close(hashed, written)
    qk, v, cotangent = (vectors(1, 1, 48, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    with_itself = torch.ones(48, 48, dtype=torch.bool).tril()
    y = attend_slowly(qk.requires_grad_(), normalized(qk), v.requires_grad_(), with_itself)
    torch.testing.assert_close(fused, torch.autograd.grad(y, (qk, v), cotangent[:, 0]))
    assert not torch.allclose(fused[0], written[0], rtol=0.01)


def test_memory_grows_as_it_must(cost):
    table = lsh_cost.cost_table(cost).set_index("attention")
    assert list(table.index) == [*FULL, hashing_in(1), TWO]
    assert table["exponent of MB"][FULL[0]] > 1.7
    assert table["exponent of MB"][[hashing_in(1), TWO]].tolist() == pytest.approx([1, 1], abs=0.1)
    scores = 4 * 256**2 / 1e6
    assert table["MB"][FULL[0]] > 4 * scores  # scores, masked scores, weights, and a gradient
    assert table["MB"][TWO] > 1.5 * table["MB"][hashing_in(1)]
    assert table["KB a position"][TWO] == pytest.approx(1e3 * table["MB"][TWO] / 256)
    assert len(cost) == 4 * len(LENGTHS) and (cost["ms"] > 0).all()


def test_what_would_not_fit_is_left_out(monkeypatch):
    sizes = iter([1, 2, 3, 4, 2, 3, 16, 2, 3, 2, 3])  # of three contenders in turn; the first would come to 64
    monkeypatch.setattr(lsh_cost, "peak_bytes", lambda step: next(sizes))
    frame = lsh_cost.measure_cost((16, 32, 64, 128), 8, (1,), SIZES, repeat=1, most_bytes=20)
    longest = frame.groupby("attention")["positions"].max()
    assert longest.to_dict() == {FULL[0]: 64, FULL[1]: 128, hashing_in(1): 128}


def test_crossings_in_words():
    frame = told(written=[100, 400, 1600], fused=[50, 60, 70], hashing=[300, 350, 400])
    assert lsh_cost.crossing(frame, TWO, FULL[0], "ms") == "from about 200 positions on"
    assert lsh_cost.crossing(frame, TWO, FULL[1], "ms") == "at no length up to 400"
    noisy = told(written=[100, 400, 1600], fused=[1, 1, 1], hashing=[90, 800, 800])
    assert lsh_cost.crossing(noisy, TWO, FULL[0], "ms") == "from about 300 positions on"
    always = told(written=[100, 400], fused=[1, 1], hashing=[90, 80])
    assert lsh_cost.crossing(always, TWO, FULL[0], "ms") == "from about 100 positions on"
    shorter = told(written=[100, 200], fused=[1, 1, 1], hashing=[300, 350, 1])
    assert lsh_cost.crossing(shorter, TWO, FULL[0], "MB") == "at no length up to 200"


@pytest.mark.parametrize(
    ("took", "verdict"),
    [
        (dict(written=[1, 9], fused=[1, 9], hashing=[5, 5]), "reproduced"),
        (dict(written=[1, 9], fused=[9, 2], hashing=[5, 5]), "partly reproduced"),
        (dict(written=[9, 1], fused=[9, 1], hashing=[5, 5]), "not reproduced"),
    ],
)
def test_the_verdict_is_about_the_longest_length(took, verdict):
    assert lsh_cost.cost_verdict(told(**took), TWO) == verdict


def test_figure_of_the_cost(cost):
    time, memory = lsh_cost.draw_cost(cost).axes
    assert [line.get_label() for line in memory.lines] == [*FULL, hashing_in(1), TWO]
    assert list(memory.lines[0].get_ydata()) == cost[cost["attention"] == FULL[0]]["MB"].tolist()
    assert list(time.lines[3].get_ydata()) == cost[cost["attention"] == TWO]["ms"].tolist()
    assert len({str(line.get_color()) for line in memory.lines}) == 3  # both kinds of full attention are black


# --- decoding ---


def test_earlier_alike_counts_one_by_one():
    buckets = torch.randint(3, (2, 2, 20), generator=torch.Generator().manual_seed(0))
    slowly = [[[row[:t].count(row[t]) for t in range(20)] for row in rows] for rows in buckets.tolist()]
    assert lsh_cost.earlier_alike(buckets).tolist() == slowly


def test_candidates_are_what_decoding_attends_to():
    qk, sizes = vectors(1, 2, 32, 8), LSHSizes(n_hashes=1, n_buckets=4, chunk_len=2)
    frame = lsh_cost.count_candidates(qk, (8, 32), (1,), sizes, seeds=1)
    keys, values = normalized(qk), torch.eye(32, dtype=qk.dtype).expand(1, 2, 32, 32)
    weights = bucket_attend(qk, keys, values, hash_buckets(qk, draw_rotations(qk, sizes, 0), sizes), sizes.window)
    seen = (weights.tril(-1) > 0).sum(-1).double()
    assert frame["positions"].tolist() == pytest.approx([float(seen[..., 7].mean()), float(seen[..., 28:].mean())])
    assert frame["even"].tolist() == [8 / 4, 4] and frame["most"].tolist() == [4, 4]


def test_rounds_add_up_and_seeds_average():
    qk = vectors(1, 1, 64, 8)
    apart = [lsh_cost.count_candidates(qk, (64,), (3,), SIZES, seeds=n)["positions"][0] for n in (1, 2)]
    assert apart[0] != apart[1]
    alone = lsh_cost.count_candidates(torch.zeros(1, 1, 64, 8), (64,), (1, 3), SIZES, seeds=1)  # all in one bucket
    assert alone["positions"].tolist() == pytest.approx([32, 96]) and alone["most"].tolist() == [32, 96]


def test_bytes_that_are_read():
    frame = DataFrame([{"context": 1000, "rounds": 2, "positions": 30.0, "even": 1.0, "most": 64}])
    row = lsh_cost.reading_table(frame, width=64).iloc[0]
    assert row["keys and values (KB)"] == pytest.approx(30 * 2 * 64 * 4 / 1e3)
    assert row["buckets (KB)"] == pytest.approx(1000 * 2 * 4 / 1e3)
    assert row["full attention (KB)"] == pytest.approx(1000 * 2 * 64 * 4 / 1e3)
    assert row["of context (%)"] == pytest.approx(3)
    assert row["of full attention (%)"] == pytest.approx(100 * (15.36 + 8) / 512)


def test_figure_of_candidates():
    frame = lsh_cost.count_candidates(vectors(1, 1, 64, 8), (32, 64), (1, 2), SIZES, seeds=1)
    axis = lsh_cost.draw_candidates(frame).axes[0]
    labels = [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]
    assert labels == ["full attention", hashing_in(1), TWO]
    assert list(axis.lines[0].get_ydata()) == [32, 64]
    assert list(axis.lines[1].get_ydata()) == frame[frame["rounds"] == 1]["positions"].tolist()
    assert list(axis.lines[2].get_ydata()) == frame[frame["rounds"] == 1]["even"].tolist()
