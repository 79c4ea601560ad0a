"""Notebook 13: where hashing equals full attention, what it finds, in cases where that is known."""

import numpy as np
import pytest
import torch

from sparselib.config import LSHSizes, preset
from sparselib.experiments import lsh
from sparselib.experiments.lsh import Vectors
from sparselib.layers import lsh_attend
from sparselib.layers.lsh import full_attend, hash_buckets, normalized
from sparselib.models import Transformer

from .. import slow
from ..helpers import close, ids, vectors

B, H, L, DH = 2, 2, 32, 8
SIZES = LSHSizes(n_hashes=2, n_buckets=4, chunk_len=4)
QUERIES = torch.arange(L // 2, L, 3)


@pytest.fixture
def some():
    return Vectors(vectors(B, H, L, DH), vectors(B, H, L, DH, seed=1))


@pytest.fixture(scope="module")
def found():
    some = Vectors(vectors(1, H, L, DH), vectors(1, H, L, DH, seed=1))
    tight = lsh.clustered_vectors(some, n_clusters=4, cosine=0.95, norm=20.0)
    return lsh.measure_found({"random": some, "clusters": tight}, (1, 4), (4, 8), 4, seeds=2)


def buckets_of(qk, sizes=SIZES, seed=0):
    return hash_buckets(qk, lsh.draw_rotations(qk, sizes, seed), sizes)


# --- exactness and decoding ---


def test_one_bucket_is_full_attention_and_several_are_not():
    frame = lsh.check_exactness(length=24, n_buckets=4)
    assert frame[["causal", "padding"]].to_numpy().tolist() == [[c, p] for c in ("yes", "no") for p in ("no", "yes")]
    for what in ("output", "gradient"):
        assert (frame[f"{what}, one bucket"] < 1e-12).all()
        assert (frame[f"{what}, 4 buckets"] > 0.01).all()


def test_the_check_would_see_padding(monkeypatch):
    monkeypatch.setattr(lsh, "full_attend", lambda qk, keys, v, causal, mask: full_attend(qk, keys, v, causal))
    frame = lsh.check_exactness(length=24, n_buckets=4)
    wrong = frame["output, one bucket"] > 0.01  # causal queries before the padding do not see it; the padding does
    assert wrong.tolist() == [False, True, False, True]


def test_decoding_is_compared_in_the_order_of_its_rows():
    frame = lsh.check_decoding(32)
    small = (frame["largest difference"] < 1e-12).tolist()
    assert small == [True, True, True, False, True, False]


# --- vectors ---


def test_text_vectors_are_what_the_first_layer_attends_with():
    model = Transformer(preset("smoke", max_len=16, lsh=LSHSizes(n_hashes=1, n_buckets=2, chunk_len=4, full_below=16)))
    tokens, inputs = ids(2, 16, high=512), []
    layer = model.stack.blocks[0].attention
    layer.register_forward_hook(lambda _, args, y: inputs.append((args[0], y)))
    with torch.no_grad():
        model.eval()(tokens)
        read = lsh.text_vectors(model, tokens)
        ((_, y),) = inputs
        attended = full_attend(read.qk, normalized(read.qk), read.v)
        torch.testing.assert_close(layer.output(attended.transpose(1, 2).flatten(2)), y)


def test_clustered_vectors_are_near_their_centres_and_have_one_length():
    like = Vectors(torch.zeros(2, 1, 400, 64), torch.zeros(2, 1, 400, 64))
    made = lsh.clustered_vectors(like, n_clusters=2, cosine=0.8, norm=5.0)
    assert made.qk.dtype == made.v.dtype == torch.float32 and made.v.std() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(made.qk.norm(dim=-1), torch.full((2, 1, 400), 5.0))
    unit = made.qk / 5
    cosines = (unit @ unit.transpose(2, 3)).flatten().numpy()
    same = cosines > 0.5
    assert cosines[same].mean() == pytest.approx(0.8, abs=0.05) and same.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(cosines[~same]).mean() < 0.25
    assert not torch.equal(made.qk, lsh.clustered_vectors(like, 2, 0.8, 5.0, seed=9).qk)


def test_one_after_another_keeps_order_and_heads(some):
    joined = lsh.one_after_another(some)
    assert joined.qk.shape == joined.v.shape == (1, H, B * L, DH)
    assert torch.equal(joined.v[0, 1], torch.cat([some.v[0, 1], some.v[1, 1]]))


# --- what is found ---


def test_values_of_identity_return_the_weights(some):
    buckets = buckets_of(some.qk)
    weights = lsh_attend(some.qk, lsh.identity(some.qk), buckets, SIZES)
    close(weights.sum(-1), torch.ones(B, H, L, dtype=torch.float64))
    close(weights @ some.v, lsh_attend(some.qk, some.v, buckets, SIZES))


def test_decoding_weights_are_those_of_the_slow_rule(some):
    buckets = buckets_of(some.qk)
    weights = lsh.decoding_weights(some.qk, buckets, SIZES, QUERIES)
    assert weights.shape == (B, H, len(QUERIES), L)
    for b, h in np.ndindex(B, H):
        arrays = some.qk[b, h].numpy(), some.v[b, h].numpy()
        y = slow.lsh_decoding(*arrays, buckets[b, h].tolist(), SIZES.window)
        close((weights[b, h] @ some.v[b, h]), np.array(y)[QUERIES])


def test_quality_of_known_weights():
    full = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0, 0], [0.4, 0.2, 0.1, 0.1, 0.2, 0]], dtype=torch.float64)[None, None]
    seen = torch.tensor([[0, 0.5, 0.5, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.float64)[None, None]
    found = lsh.quality(full, seen, torch.eye(6, dtype=torch.float64)[None, None], torch.tensor([4, 5]))
    assert found["positions"] == 1.5  # two, and one
    assert found["chance"] == pytest.approx((2 / 4 + 1 / 5) / 2)
    assert found["mass"] == pytest.approx((0.5 + 0.4) / 2)
    assert found["latest"] == pytest.approx((0.7 + 0.2) / 2)
    assert found["best"] == pytest.approx((0.7 + 0.4) / 2)
    assert found["error"] == pytest.approx(float((seen - full).norm() / full.norm()))


def test_a_query_that_finds_nobody_found_nothing():
    full, itself = torch.full((1, 1, 1, 4), 0.25), torch.zeros(1, 1, 1, 4)
    full[..., 3], itself[..., 3] = 0, 1
    found = lsh.quality(full * 4 / 3, itself, torch.eye(4)[None, None], torch.tensor([3]))
    assert [found[name] for name in ("positions", "chance", "mass", "best")] == [0, 0, 0, 0]
    assert found["latest"] == pytest.approx(0, abs=1e-6)


def test_full_attention_itself_finds_all(some):
    full = full_attend(some.qk, normalized(some.qk), lsh.identity(some.qk))[:, :, QUERIES]
    found = lsh.quality(full, full, some.v, QUERIES)
    assert found == pytest.approx(
        dict(positions=float(QUERIES.double().mean()), chance=1, mass=1, latest=1, best=1, error=0)
    )


def test_rows_of_what_is_found(found):
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert found[["chance", "mass", "latest", "best"]].stack().between(0, 1 + 1e-6).all()
    assert (found["mass"] <= found["best"] + 1e-9).all()
    means = lsh.found_table(found, 8)
    assert means[["vectors", "rounds"]].to_numpy().tolist() == [[v, r] for v in ("random", "clusters") for r in (1, 4)]
    assert (means["mass"][[1, 3]].to_numpy() > means["mass"][[0, 2]].to_numpy()).all()  # more rounds find more
    assert (means["mass"] > means["chance"])[2:].all()  # hashing is made for clusters
    one = found.query("vectors == 'clusters' and buckets == 8 and rounds == 4 and rule == 'decoding'")
    assert lsh.found_table(found, 8, "decoding")["mass"].iloc[-1] == pytest.approx(one["mass"].mean())


def test_the_seed_draws_the_rotations(found):
    both = found[(found["vectors"] == "random") & (found["rule"] == "training") & (found["rounds"] == 1)]
    first, second = (both[both["seed"] == seed]["mass"].tolist() for seed in (0, 1))
    assert first != second


def test_figures_of_what_is_found(found):
    above, below = np.split(np.array(lsh.draw_found(found, 8).axes), 2)
    assert [axis.get_title() for axis in above] == ["random", "clusters"]
    assert [len(axis.lines) for axis in (*above, *below)] == [5, 5, 2, 2]
    means = lsh.found_table(found, 8)
    drawn = {line.get_label(): line.get_ydata() for line in above[0].lines}
    assert list(drawn["8 buckets"]) == pytest.approx(means["mass"][:2].tolist())
    assert list(drawn["as many: best"]) == pytest.approx(means["best"][:2].tolist())
    rules = lsh.draw_rules(found, 8).axes[1]
    assert [line.get_label() for line in rules.lines] == ["training's rule", "decoding's rule"]
    assert list(rules.lines[1].get_ydata()) == pytest.approx(lsh.found_table(found, 8, "decoding")["mass"][2:].tolist())
