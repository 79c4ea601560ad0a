import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparselib.tasks.objectives import Causal, SpanCorruption, corrupt, random_spans, span_counts
from sparselib.tasks.tokenizers import PAD, Vocabulary


class Numbers(Vocabulary):
    """1,000 pieces, 100 sentinels, end = 1."""

    def __init__(self, sentinels=100):
        super().__init__(1000, sentinels, 1, "numbers")

    def encode_batch(self, texts):
        raise NotImplementedError

    def _decode_pieces(self, ids):
        raise NotImplementedError


lengths = st.tuples(st.integers(3, 200), st.integers(3, 100))
seeds = st.integers(0, 2**32 - 1)


def windows_of(objective, rows, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 1000, (rows, objective.size), dtype=np.int32))


def real(tokens, mask):
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]


def restored(source, target, pieces=1000, size=1100):
    """The text of one row: each sentinel of the source gives way to what follows it in the target."""
    assert source[-1] == target[-1] == 1  # end
    spans = {}
    for token in target[:-1]:
        if token >= pieces:
            current = spans.setdefault(token, [])
            assert token == size - len(spans)  # sentinels count down from the top, each once
            assert current == []
        else:
            current.append(token)
    text = []
    for token in source[:-1]:
        text += spans.pop(token) if token >= pieces else [token]
    assert not spans
    return text


@given(lengths, st.integers(1, 4), seeds)
def test_source_and_target_give_the_text_back(shape, rows, seed):
    objective = SpanCorruption(*shape, Numbers())
    windows = windows_of(objective, rows, seed)
    batch = objective(windows, np.random.default_rng(seed))
    sources = real(batch["source"], batch["mask"])
    targets = real(batch["target"][:, 1:], batch["target_mask"])
    for source, target, window in zip(sources, targets, windows.tolist(), strict=True):
        assert restored(source, target) == window


@given(lengths, st.integers(1, 4), seeds)
def test_lengths_are_fixed_and_as_full_as_they_can_be(shape, rows, seed):
    objective = SpanCorruption(*shape, Numbers())
    batch = objective(windows_of(objective, rows, seed), np.random.default_rng(seed))
    (length, target_length), size = shape, objective.size
    assert batch["source"].shape == batch["mask"].shape == (rows, length)
    assert batch["target"].shape == (rows, target_length + 1)
    assert batch["target_mask"].shape == (rows, target_length)
    assert batch["source"].dtype == batch["target"].dtype == torch.int64
    assert batch["mask"].dtype == batch["target_mask"].dtype == torch.bool
    assert (batch["target"][:, 0] == PAD).all()
    assert (batch["source"][~batch["mask"]] == PAD).all()
    assert (batch["target"][:, 1:][~batch["target_mask"]] == PAD).all()
    noise, spans = span_counts(size)
    assert batch["mask"].sum(1).tolist() == [size - noise + spans + 1] * rows
    assert batch["target_mask"].sum(1).tolist() == [noise + spans + 1] * rows
    noise, spans = span_counts(size + 1)  # one token more would not fit
    assert size - noise + spans + 2 > length or noise + spans + 1 > target_length


@pytest.mark.parametrize(
    ("length", "target_length", "size", "used"), [(512, 114, 568, (512, 114)), (512, 256, 568, (512, 114))]
)
def test_the_papers_lengths_take_568_tokens(length, target_length, size, used):
    objective = SpanCorruption(length, target_length, Numbers())
    batch = objective(windows_of(objective, 1, 0), np.random.default_rng(0))
    assert objective.size == objective.stride == size
    assert (int(batch["mask"].sum()), int(batch["target_mask"].sum())) == used


@given(st.integers(50, 700), st.integers(1, 4), seeds)
def test_fifteen_percent_are_lost_in_spans_of_three(size, rows, seed):
    spans = random_spans(rows, size, np.random.default_rng(seed))
    lost = spans % 2 == 1
    assert abs(lost.mean() - 0.15) <= 0.5 / size + 1e-12
    starts = lost & np.diff(spans, axis=1, prepend=0).astype(bool)
    per_row = starts.sum(1)
    assert (per_row == per_row[0]).all()
    assert abs(lost[0].sum() / per_row[0] - 3) <= 0.5 / per_row[0] * 3
    assert (np.diff(spans, axis=1) >= 0).all() and (np.diff(spans, axis=1) <= 1).all()
    assert (spans[:, 0] == 0).all() and (spans[:, -1] == 2 * per_row[0] - 1).all()


def test_every_token_can_be_lost():
    """Over many draws tokens in the middle are lost about equally often, and spans have many lengths."""
    spans = random_spans(4000, 100, np.random.default_rng(0))
    share = (spans % 2 == 1).mean(0)
    assert share[0] == 0 and share[-1] == 1  # a window starts with a kept span and ends with a lost one
    assert share[20:80].min() > 0.10 and share[20:80].max() < 0.20
    sizes = {int(count) for row in spans for count in np.bincount(row)[1::2]}
    assert sizes >= {1, 2, 3, 4, 5, 6, 7}


def test_a_window_by_hand():
    windows, spans = np.array([[10, 11, 12, 13, 14, 15]]), np.array([[0, 1, 1, 2, 2, 3]])
    source, target = corrupt(windows, spans, 1100)
    assert source.tolist() == [[10, 1099, 13, 14, 1098]]
    assert target.tolist() == [[1099, 11, 12, 1098, 15]]


@given(lengths, seeds)
def test_chance_comes_from_its_generator_alone(shape, seed):
    objective = SpanCorruption(*shape, Numbers())
    windows = windows_of(objective, 3, seed)
    one, other = (objective(windows, np.random.default_rng(seed)) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_causal_windows_are_the_tokens():
    objective = Causal(8)
    windows = torch.arange(18, dtype=torch.int32).view(2, 9)
    batch = objective(windows, np.random.default_rng(0))
    assert (objective.size, objective.stride) == (9, 8)
    assert batch["tokens"].dtype == torch.int64 and torch.equal(batch["tokens"], windows.long())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Causal(0), "length = 0"),
        (lambda: SpanCorruption(2, 9, Numbers()), "length = 2: .*at least 3"),
        (lambda: SpanCorruption(9, 2, Numbers()), "target_length = 2: .*at least 3"),
        (lambda: SpanCorruption(2000, 2000, Numbers()), "length = 2000: .*shorter: .*100 sentinels"),
        (lambda: SpanCorruption(9, 9, Numbers(0)), "length = 9: .*0 sentinels"),
    ],
)
def test_lengths_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
