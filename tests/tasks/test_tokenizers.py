import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.tasks import tokenizers
from sparselib.tasks.corpora import load_corpus, texts
from sparselib.tasks.tokenizers import END, bpe_tokenizer, t5_tokenizer, vocabulary_of
from sparselib.tasks.windows import pack
from sparselib.training.config import T5_SIZE, DataConfig


def first_texts(corpus, split, most):
    """A tenth of lm_ci, which is learned from in a tenth of the time."""
    assert split == "train" and most is None
    return texts(corpus, split, 100)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSELIB_CACHE", str(folder))
        patch.setattr(tokenizers, "texts", first_texts)
        yield folder / "tokenizers"


@pytest.fixture
def cached(cache):
    """The one file that a tokenizer of 300 leaves."""
    bpe_tokenizer("lm_ci", 300)
    (path,) = cache.glob("lm_ci-300-*")
    return path


@pytest.mark.parametrize("size", [257, 300, 1000])
def test_the_vocabulary_is_as_large_as_asked(size):
    tokenizer = bpe_tokenizer("lm_ci", size)
    assert tokenizer.vocab_size == tokenizer.pieces == size
    assert tokenizer.end == 0 and tokenizer.decode([0]) == ""


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(text):
    tokenizer = bpe_tokenizer("lm_ci", 300)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


def test_the_name_of_the_end_inside_a_text_is_text():
    for tokenizer in (bpe_tokenizer("lm_ci", 300), bpe_tokenizer("lm_ci", 300)):  # learned, cached
        (ids,) = tokenizer.encode_batch([f"a{END}b"])
        assert 0 not in ids and tokenizer.decode(ids) == f"a{END}b"


def test_windows_of_the_corpus():
    corpus, tokenizer = load_corpus("lm_ci"), bpe_tokenizer("lm_ci", 1000)
    windows = pack(corpus["validation"]["text"], tokenizer, 128)
    assert windows.min() == 0 and windows.max() < 1000
    assert tokenizer.decode(windows[0].tolist()).startswith(corpus["validation"][0]["text"][:80])
    ends = int((windows[:, 1:] == 0).sum())
    assert len(corpus["validation"]) - 3 <= ends <= len(corpus["validation"])


def test_the_cache_is_used(cached, monkeypatch):
    def refuse(*_):
        raise AssertionError("learned again")

    monkeypatch.setattr(tokenizers, "_learn", refuse)
    assert bpe_tokenizer("lm_ci", 300).vocab_size == 300


def spoil_value(text):
    kept = json.loads(text)
    return json.dumps({**kept, "tokenizer": kept["tokenizer"].replace('"e"', '"\u00e9"', 1)})


@pytest.mark.parametrize(
    "spoil",
    [lambda _: "", lambda t: t[: len(t) // 2], lambda _: "[]", lambda _: "null", lambda _: "{}", spoil_value],
)
def test_a_damaged_cache_is_rebuilt(cached, spoil):
    whole = cached.read_text("utf-8")
    cached.write_text(spoil(whole), "utf-8")
    assert bpe_tokenizer("lm_ci", 300).vocab_size == 300
    assert cached.read_text("utf-8") == whole


def test_a_cache_of_bytes_that_are_no_text_is_rebuilt(cached):
    whole = cached.read_bytes()
    cached.write_bytes(b"\xff\xfe\x00")
    bpe_tokenizer("lm_ci", 300)
    assert cached.read_bytes() == whole


def test_a_cache_that_cannot_be_written_only_warns(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPARSELIB_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="SPARSELIB_CACHE"):
        assert bpe_tokenizer("lm_ci", 260).vocab_size == 260


def test_another_text_has_another_cache_file(monkeypatch):
    mine = tokenizers._cache_file("lm_ci", 300)
    monkeypatch.setattr(tokenizers, "corpus_checksum", lambda *_: "0" * 64)
    assert tokenizers._cache_file("lm_ci", 300) != mine


@pytest.mark.parametrize("size", [0, 256, 300.0, True, "300"])
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(ValueError, match="vocab_size = .*257"):
        bpe_tokenizer("lm_ci", size)


def test_more_tokens_than_the_corpus_can_give_are_refused(monkeypatch, cache):
    monkeypatch.setattr(tokenizers, "texts", lambda *_: iter(["tea tea", "tea"]))
    with pytest.raises(ValueError, match="vocab_size = 900: must be at most 2"):
        bpe_tokenizer("lm_ci", 900)
    assert not list(cache.glob("lm_ci-900-*"))


def test_unknown_corpus_is_refused():
    with pytest.raises(ValueError, match="corpus"):
        bpe_tokenizer("nothing", 300)


def test_sentinels_are_the_topmost_ids():
    plain, marked = bpe_tokenizer("lm_ci", 300), bpe_tokenizer("lm_ci", 400, sentinels=100)
    assert marked.vocab_size == 400 and marked.pieces == 300
    assert marked.checksum == plain.checksum
    (ids,) = marked.encode_batch(["some text"])
    assert marked.decode([399, *ids, 0, 398, 300]) == "<extra_id_0>some text<extra_id_1><extra_id_99>"
    with pytest.raises(ValueError, match="vocab_size = 356.*357"):
        bpe_tokenizer("lm_ci", 356, sentinels=100)


@pytest.mark.parametrize("token", [-1, 300])
def test_ids_that_are_none_are_refused(token):
    with pytest.raises(ValueError, match=f"ids = {token}: must be in 0 .. vocab_size - 1 = 299"):
        bpe_tokenizer("lm_ci", 300).decode([5, token])


def test_t5_has_its_pieces_and_sentinels():
    t5 = t5_tokenizer()
    assert (t5.pieces, t5.vocab_size, t5.end) == (32000, 32100, 1)
    (ids,) = t5.encode_batch(["Nothing is lost."])
    assert (
        t5.decode([*ids, 32099, *ids, t5.end, 0, 32000]) == "Nothing is lost.<extra_id_0>Nothing is lost.<extra_id_99>"
    )
    # ids that every T5 checkpoint knows
    assert t5.encode_batch(["translate English to German: That is good."]) == [
        [13959, 1566, 12, 2968, 10, 466, 19, 207, 5]
    ]


def test_names_of_special_tokens_inside_a_text_are_text_for_t5():
    (ids,) = t5_tokenizer().encode_batch(["a </s> <pad> <extra_id_0> b"])
    assert max(ids) < 32000 and not {0, 1} & set(ids)


@pytest.mark.parametrize(
    ("fields", "size", "sentinels"),
    [
        ({"vocab_size": 400}, 400, 0),
        ({"vocab_size": 400, "objective": "span", "target_length": 32}, 400, 100),
        ({"vocab_size": T5_SIZE, "tokenizer": "t5"}, 32100, 100),
    ],
)
def test_a_config_chooses_the_vocabulary(fields, size, sentinels):
    vocabulary = vocabulary_of(DataConfig(corpus="lm_ci", **fields))
    assert (vocabulary.vocab_size, vocabulary.sentinels) == (size, sentinels)
