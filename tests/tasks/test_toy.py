"""Copying and adding: right answers, the lengths asked for, the same batches for the same seed, accuracies."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparselib.tasks import load_splits, toy
from sparselib.tasks.toy import END, EXAMPLES, PLUS, TASKS, VOCAB_SIZE, ZERO, Digits, ToySource, accuracies, accuracy
from sparselib.training import TrainConfig, train_run
from sparselib.training import config as training
from sparselib.training.config import TOY_SIZE

from ..helpers import seeds

tasks = st.sampled_from(["copy", "addition"])


def rows(batch):
    """Source and target of every row, without padding, start and end."""
    for source, mask, target, target_mask in zip(
        *(batch[n] for n in ("source", "mask", "target", "target_mask")), strict=True
    ):
        assert target[0] == 0 and not (mask[1:] > mask[:-1]).any()
        assert (source[~mask] == 0).all() and (target[1:][~target_mask] == 0).all()
        *answer, end = target[1:][target_mask].tolist()
        assert end == END
        yield source[mask].tolist(), answer


def number(tokens):
    return int("".join(str(token - ZERO) for token in reversed(tokens)))


@given(task=tasks, shortest=st.integers(2, 9), more=st.integers(0, 9), seed=seeds)
def test_answers_are_right_and_as_long_as_asked(task, shortest, more, seed):
    source = ToySource(task, shortest, shortest + more)
    for question, answer in rows(next(source.batches(20, seed))):
        if task == "copy":
            assert question == answer
        else:
            at = question.index(PLUS)
            assert number(answer) == number(question[:at]) + number(question[at + 1 :])
            assert 1 <= at <= len(question) - 2
            assert all(part[-1] != ZERO for part in (question[:at], question[at + 1 :]) if len(part) > 1)
        digits = len(question) - (task == "addition")
        assert shortest <= digits <= shortest + more
        assert all(ZERO <= token < ZERO + 10 or token == PLUS for token in question)


def lengths(batch):
    return set(batch["mask"].sum(1).tolist())


def test_all_lengths_and_digits_come():
    source = ToySource("copy", 1, 5)
    batches = list(itertools.islice(source.batches(20, 0), 100))
    assert all(len(lengths(batch)) == 1 for batch in batches)
    assert set().union(*map(lengths, batches)) == lengths(next(source.in_order(EXAMPLES))) == {1, 2, 3, 4, 5}
    assert set(batches[0]["source"].flatten().tolist()) <= set(range(ZERO, ZERO + 10)) and PLUS < VOCAB_SIZE
    assert set().union(*(b["source"].flatten().tolist() for b in batches)) == set(range(ZERO, ZERO + 10))


def test_every_share_of_the_digits_comes_in_the_first_number():
    questions = [question for question, _ in rows(next(ToySource("addition", 5, 5).batches(200, 0)))]
    assert {question.index(PLUS) for question in questions} == {1, 2, 3, 4}


def test_lengths_grow():
    source = ToySource("copy", 1, 32, growing=6)
    assert [source.longest_at(index) for index in (0, 1, 2, 4, 6, 7)] == [4, 6, 8, 16, 32, 32]
    assert all(max(lengths(b)) <= 23 for b in itertools.islice(source.batches(1, 0), 6))
    later = itertools.islice(source.batches(1, 0, skip=6), 200)
    assert {32} in map(lengths, later)
    assert ToySource("copy", 10, 12, growing=2).longest_at(0) == 10
    assert ToySource("copy", 1, 3, growing=2).longest_at(0) == 3


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_batches_depend_on_the_seed_alone_and_can_be_skipped():
    source = ToySource("addition", 2, 8)
    first = list(itertools.islice(source.batches(4, 3), 3))
    assert same(next(source.batches(4, 3, skip=2)), first[2])
    assert not same(next(source.batches(4, 4)), first[0]) and not same(first[0], first[1])
    parts = list(source.in_order(100))
    assert [len(part["source"]) for part in parts] == [100, 100, 56] and EXAMPLES == 256
    assert same(parts[0], next(source.in_order(100)))


class Solver(nn.Module):
    """Copies, with every ``fault``-th sequence's first token wrong."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.weight = fault, nn.Parameter(torch.zeros(()))

    def forward(self, source, target, mask=None):
        assert not self.training
        answer = torch.cat([source, torch.zeros_like(source[:, :1])], 1)
        answer[torch.arange(len(source)), mask.sum(1)] = END
        answer[:: self.fault, 0] += 1
        return nn.functional.one_hot(answer[:, : target.shape[1]], VOCAB_SIZE).double()


def test_accuracy_counts_tokens_and_whole_sequences():
    source = ToySource("copy", 4, 4)
    model = Solver(4)
    assert accuracy(model, source, 64) == {"tokens": 0.95, "sequences": 0.75}
    assert model.training


def test_accuracies_are_of_the_longest_in_training_and_of_longer_ones():
    assert toy.ranges(128) == {"within": (96, 128), "beyond": (256, 300)}
    model = Solver(2)
    model.config = SimpleNamespace(max_len=19)
    found = accuracies(model, "copy", 8)  # beyond: 16 to 18
    assert {name: found[f"{name}.sequences"] for name in ("within", "beyond")} == {"within": 0.5, "beyond": 0.5}
    assert 1 - 0.5 / 6.9 < found["within.tokens"] < found["beyond.tokens"] < 1  # the end counts
    model.config.max_len = 18
    assert accuracies(model, "copy", 8).keys() == {"within.tokens", "within.sequences"}


def test_digits_are_a_vocabulary():
    digits = Digits()
    (tokens,) = digits.encode_batch(["12+9"])
    assert tokens == [ZERO + 1, ZERO + 2, PLUS, ZERO + 9] and digits.vocab_size == VOCAB_SIZE == TOY_SIZE
    assert digits.decode([0, *tokens, END, 0]) == "12+9"
    with pytest.raises(ValueError, match="text = '1-2': must be made of 0123456789"):
        digits.encode_batch(["1-2"])


MODEL = {"preset": "smoke", "architecture": "terraformer", "n_layers": 1, "d_model": 32}


def config(**data):
    data = dict(corpus="copy", objective="toy", vocab_size=VOCAB_SIZE, length=6) | data
    fields = dict(experiment="e", variant="v", model=MODEL, data=data, batch=16, steps=30)
    return TrainConfig.model_validate(fields | dict(optimizer=dict(learning_rate=0.01, warmup=3)))


@pytest.mark.parametrize("task", ["copy", "addition"])
def test_a_training_reads_it(task):
    assert TASKS == training.TASKS
    result = train_run(config(corpus=task), folder=None, resume=False, progress=False)
    assert sum(result.losses[-5:]) < 0.95 * sum(result.losses[:5])
    splits = load_splits(config(corpus=task).data)
    assert result.validation[-1][1] == pytest.approx(result.losses[-1], rel=0.3)
    with pytest.raises(ValueError, match="objective = 'toy'"):
        splits.validation_windows  # noqa: B018


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dict(corpus="lm_ci"), "corpus = 'lm_ci': must be one of .'copy', 'addition'. with toy"),
        (dict(objective="causal"), "corpus = 'copy': must be one of"),
        (dict(vocab_size=20), "vocab_size = 20: must be 16"),
        (dict(length=64), "model.max_len = 64: must be at least the 65 tokens"),
        (
            dict(corpus="lm_ci", objective="causal", vocab_size=512, growing=3),
            "growing = 3: must be given with toy only",
        ),
    ],
)
def test_configs_refused(data, message):
    with pytest.raises(ValueError, match=message):
        config(**data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sort", 1, 2), "task = 'sort': must be one of 'copy', 'addition'"),
        (("copy", 0, 2), "shortest = 0: must be an int of at least 1"),
        (("addition", 1, 2), "shortest = 1: must be an int of at least 2"),
        (("copy", 3, 2), "longest = 2: must be at least shortest = 3"),
        (("copy", 1, 2, -1), "growing = -1: must be an int of at least 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        ToySource(*arguments)
