import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sparselib.tasks import windows
from sparselib.tasks.tokenizers import Vocabulary, bpe_tokenizer
from sparselib.tasks.windows import join, pack, token_row, token_stream


class Bytes(Vocabulary):
    """Bytes shifted by one, end = 0."""

    def __init__(self):
        super().__init__(257, 0, 0, "bytes")

    def encode_batch(self, texts):
        return [[1 + byte for byte in text.encode()] for text in texts]

    def _decode_pieces(self, ids):
        return bytes(token - 1 for token in ids if token).decode()


documents = st.lists(st.text(min_size=1, max_size=20).filter(str.strip), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSELIB_CACHE", str(tmp_path_factory.mktemp("vocabulary")))
        return bpe_tokenizer("lm_ci", 300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where rows are kept: nothing yet."""
    monkeypatch.setenv("SPARSELIB_CACHE", str(tmp_path))
    return tmp_path / "tokens"


@given(documents, st.integers(min_value=1, max_value=9))
def test_windows_predict_every_token_once_and_in_order(texts, length):
    stream = [token for ids in Bytes().encode_batch(texts) for token in (*ids, 0)]
    if len(stream) <= length:
        with pytest.raises(ValueError, match="tokens of a window"):
            pack(texts, Bytes(), length)
        return
    packed = pack(texts, Bytes(), length)
    kept = (len(stream) - 1) // length * length
    assert packed.dtype == torch.int64 and packed.shape == (kept // length, length + 1)
    assert packed[:, 1:].flatten().tolist() == stream[1 : kept + 1]
    assert packed[:, :-1].flatten().tolist() == stream[:kept]


@given(documents, st.integers(min_value=1, max_value=9), st.booleans(), st.integers(min_value=1, max_value=3))
def test_a_stream_gives_the_windows_of_the_whole_text(texts, stride, overlap, together):
    size = stride + overlap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "TOGETHER", together)
        streamed = [window.tolist() for window in token_stream(iter(texts), Bytes(), size, stride)]
    row = join(texts, Bytes())
    assert streamed == (row.unfold(0, size, stride).tolist() if len(row) >= size else [])


@pytest.mark.parametrize(
    ("texts", "length", "message"),
    [
        ([], 4, "documents = .*at least one"),
        (["good", " \n"], 4, r"documents\[1\]"),
        ("one string", 4, "a list of strings"),
        (["good text"], 0, "length = 0"),
        (["good text"], 2.5, "length = 2.5"),
        (["good"], 5, "documents = '5 tokens': must be at least the 6 tokens of a window"),
    ],
)
def test_bad_input_to_pack_is_refused(texts, length, message):
    with pytest.raises(ValueError, match=message):
        pack(texts, Bytes(), length)


def test_a_row_is_made_once(folder, vocabulary, monkeypatch):
    row = token_row("lm_ci", "validation", vocabulary)
    assert row.dtype == torch.int32

    def refuse(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(windows, "texts", refuse)
    assert torch.equal(token_row("lm_ci", "validation", vocabulary), row)


def test_splits_and_vocabularies_have_rows_of_their_own(folder, vocabulary):
    rows = [token_row("lm_ci", "validation", v) for v in (vocabulary, Bytes())]
    rows += [token_row("lm_ci", "train", vocabulary)]
    assert len({len(row) for row in rows}) == len(list(folder.iterdir())) == 3


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: save_file({"other": torch.zeros(2)}, path, metadata={"sha256": "0"}),
        lambda path: save_file({"row": torch.zeros(2, dtype=torch.int32)}, path),
        flip_last_byte,
    ],
)
def test_a_damaged_row_is_made_again(folder, vocabulary, spoil):
    row = token_row("lm_ci", "validation", vocabulary).clone()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()  # the row may still be mapped from the old file
    path.write_bytes(whole)
    spoil(path)
    assert torch.equal(token_row("lm_ci", "validation", vocabulary), row)
    assert path.read_bytes() == whole


def test_a_row_that_cannot_be_kept_only_warns(folder, vocabulary):
    folder.write_text("")
    with pytest.warns(UserWarning, match="SPARSELIB_CACHE"):
        assert len(token_row("lm_ci", "validation", vocabulary)) > 1000
