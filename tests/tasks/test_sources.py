import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.tasks import load_splits, shipped
from sparselib.tasks.corpora import load_corpus
from sparselib.tasks.objectives import Causal
from sparselib.tasks.sources import WindowSource
from sparselib.tasks.windows import pack
from sparselib.training.config import DataConfig

CAUSAL = DataConfig(corpus="lm_ci", vocab_size=400, length=32)
SPAN = DataConfig(corpus="lm_ci", vocab_size=500, length=32, objective="span", target_length=16)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSELIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def numbered(windows, length=4):
    """A source whose window i is all i."""
    return WindowSource(torch.arange(windows, dtype=torch.int32)[:, None].expand(-1, length + 1), Causal(length))


def first(source, count, batch, **settings):
    return list(itertools.islice(source.batches(batch, **settings), count))


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("data", [CAUSAL, SPAN])
def test_splits_are_what_the_config_says(data):
    splits = load_splits(data)
    assert splits.vocab_size == data.vocab_size
    for split, source in (("train", splits.train), ("validation", splits.validation)):
        windows = source.windows
        assert windows.dtype == torch.int64 and windows.max() < splits.vocabulary.pieces
        start = splits.vocabulary.decode(windows[0].tolist())
        assert load_corpus("lm_ci")[split]["text"][0].startswith(start[:40])


def test_windows_are_those_of_pack():
    splits = load_splits(CAUSAL)
    texts = load_corpus("lm_ci")["validation"]["text"]
    assert torch.equal(splits.validation.windows, pack(texts, splits.vocabulary, 32))


def test_a_second_start_reads_the_cache_alone(monkeypatch):
    once = load_splits(CAUSAL)

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr("sparselib.tasks.windows.texts", refuse)
    monkeypatch.setattr("sparselib.tasks.tokenizers.texts", refuse)
    again = load_splits(CAUSAL)
    assert again.checksum == once.checksum
    assert torch.equal(again.train.windows, once.train.windows)


def t5(vocab_size):
    """As the config of a run, before it is checked."""
    return DataConfig.model_construct(
        corpus="lm_ci", tokenizer="t5", vocab_size=vocab_size, length=32, objective="span", target_length=16
    )


def test_t5_needs_room_for_its_sentinels():
    batch = next(load_splits(t5(32100)).train.batches(8, seed=0))
    assert batch["source"].max() == 32099
    with pytest.raises(ValueError, match="vocab_size = 32000: must be 32100"):
        load_splits(t5(32000))


@given(st.integers(1, 30), st.data())
def test_a_pass_has_every_window_once(windows, data):
    batch = data.draw(st.integers(1, windows))
    a_pass = windows // batch
    taken = first(numbered(windows), 3 * a_pass, batch, seed=5)
    for number in range(3):
        seen = torch.cat([part["tokens"][:, 0] for part in taken[number * a_pass : (number + 1) * a_pass]]).tolist()
        assert len(set(seen)) == len(seen) == a_pass * batch


@given(st.integers(1, 30), st.data())
def test_skipping_goes_on_where_a_run_stopped(windows, data):
    batch = data.draw(st.integers(1, windows))
    skip, seed = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 2**63 - 1))
    whole = first(numbered(windows), skip + 5, batch, seed=seed)
    assert all(map(equal, first(numbered(windows), 5, batch, seed=seed, skip=skip), whole[skip:]))


@settings(max_examples=10)
@given(st.integers(0, 100), st.integers(0, 1000))
def test_spans_are_lost_alike_after_a_stop(skip, seed):
    train = load_splits(SPAN).train
    whole = first(train, skip + 2, 8, seed=seed)
    assert all(map(equal, first(train, 2, 8, seed=seed, skip=skip), whole[skip:]))


def test_another_seed_is_another_order():
    assert not equal(first(numbered(50), 1, 10, seed=0)[0], first(numbered(50), 1, 10, seed=1)[0])


def test_the_same_window_loses_other_spans_in_the_next_pass():
    train = load_splits(SPAN).train
    one = WindowSource(train.cuts[:1], train.objective)
    before, after = first(one, 2, 1, seed=0)
    assert not torch.equal(before["source"], after["source"])


@pytest.mark.parametrize("batch", [1, 7, 10_000])
def test_in_order_is_every_window_once_whatever_the_batch(batch):
    validation = load_splits(SPAN).validation
    parts = list(validation.in_order(batch))
    (whole,) = validation.in_order(len(validation.cuts))
    assert all(len(part["source"]) == batch for part in parts[:-1])
    for name, rows in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), rows)


def test_checksums_follow_the_texts(tmp_path):
    assert load_splits(CAUSAL).checksum == load_splits(SPAN).checksum
    for count in (400, 401):
        path = tmp_path / f"{count}.txt"
        path.write_text("\n\n".join(f"Text number {number}, and what it says." for number in range(count)))
    own = [load_splits(DataConfig(corpus=str(p), vocab_size=260, length=8)) for p in sorted(tmp_path.iterdir())]
    assert len({splits.checksum for splits in own} | {load_splits(CAUSAL).checksum}) == 3


def test_an_altered_file_is_refused_although_its_tokens_are_cached(monkeypatch, tmp_path):
    load_splits(CAUSAL)
    for path in shipped.corpora_dir().iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes() + (b" " if "lm_ci_train" in path.name else b""))
    monkeypatch.setattr(shipped, "corpora_dir", lambda: tmp_path)
    with pytest.raises(ValueError, match="lm_ci_train.jsonl.gz was altered"):
        load_splits(CAUSAL)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="lm_ci, validation = '.* tokens': must be at least the 1000001 tokens"):
        load_splits(DataConfig(corpus="lm_ci", vocab_size=400, length=1_000_000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0, "seed": 0}, "batch = 0"),
        ({"batch": 11, "seed": 0}, "batch = 11: must be at most the 10 windows"),
        ({"batch": 2, "seed": -1}, "seed = -1"),
        ({"batch": 2, "seed": 0, "skip": -1}, "skip = -1"),
        ({"batch": 2.0, "seed": 0}, "batch = 2.0"),
    ],
)
def test_bad_sizes_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        numbered(10).batches(**arguments)
    with pytest.raises(ValueError, match="batch = 0"):
        next(numbered(10).in_order(0))
