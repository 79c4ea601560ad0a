"""Table 4: its sweeps, its table and verdict on invented runs, a live training."""

from dataclasses import replace
from itertools import chain

import pytest

from sparselib.experiments import long_digits
from sparselib.experiments.recorded import load, planned_runs
from sparselib.results import statistics
from sparselib.tasks.toy import ranges

from .invented import POINTS, invent

SWEEPS = {task: (task, f"{task}_parts") for task in ("copy", "addition")}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


def recorded():
    return {task: load(long_digits.rows_of(task)) for task in SWEEPS}


def ending_in(tokens):
    """Accuracies that end in ``tokens(config)``, a share; of sequences, half as many."""

    def extra(config):
        shares = {"tokens": tokens(config), "sequences": tokens(config) / 2}
        return {
            f"{where}.{name}": [0.0] * (POINTS - 1) + [x]
            for where in ("within", "beyond")
            for name, x in shares.items()
        }

    return extra


def invent_all(tokens):
    for sweep in chain.from_iterable(SWEEPS.values()):
        invent(sweep, lambda config: 1.0, ending_in(tokens))


def test_the_models_of_a_task_see_the_same_and_both_tasks_have_the_same_models():
    models, longest = [], {"copy": 128, "addition": 32}
    for task, sweeps in SWEEPS.items():
        configs = list(chain.from_iterable(map(planned_runs, sweeps)))
        assert {c.data.corpus for c in configs} == {task} and {c.data.length for c in configs} == {longest[task]}
        same = {(c.data, c.steps, c.batch, c.optimizer.warmup, c.validate_every) for c in configs}
        assert len(same) == 1
        assert len({c.optimizer for c in configs if c.variant != "dense"}) == 1
        assert {row.run for row in long_digits.rows_of(task)} == {f"{c.experiment}/{c.variant}" for c in configs}
        assert all(c.model_config_().max_len > ranges(longest[task])["beyond"][1] for c in configs)
        models.append([replace(c.model_config_(), max_len=512) for c in configs])
    assert models[0] == models[1]
    assert long_digits.sizes()["attentions in a decoder block"].tolist() == [2, 2, 2, 2, 1, 2]


@pytest.mark.parametrize("task", SWEEPS)
def test_both_models_are_tuned_over_the_same_rates_on_another_seed(task):
    tuning, reported = planned_runs(*long_digits.tuning_of(task)), planned_runs(task)
    tried = {(c.variant.rpartition("_")[0], c.optimizer.learning_rate) for c in tuning}
    assert len(tried) == 2 * len({rate for _, rate in tried}) >= 6
    assert {(c.variant, c.optimizer.learning_rate) for c in reported} <= tried
    assert not {c.seed for c in tuning} & {c.seed for c in reported}
    same = {(c.data, c.steps, c.batch, c.optimizer.warmup) for c in (*tuning, *reported)}
    assert len(same) == 1


def test_nothing_recorded_is_drawn_and_told_as_that():
    assert long_digits.verdict(recorded())[0] == "not tested"
    assert long_digits.table(recorded())["seeds"].tolist() == [0] * 12
    assert len(long_digits.draw(recorded()).axes) == 4
    assert "without recurrence not recorded yet" in long_digits.parts(recorded()["copy"])


def test_accuracies_stand_beside_the_papers():
    invent_all(lambda config: 0.8 + 0.01 * config.seed if config.variant == "dense" else 0.9)
    frame = long_digits.table(recorded()).set_index(["task", "model"])
    assert frame.loc[("copy", "Transformer"), "beyond, tokens (%)"] == pytest.approx(82)
    assert frame.loc[("copy", "Terraformer"), "beyond, sequences (%)"] == pytest.approx(45)
    assert frame.loc[("addition", "Terraformer"), "paper, tokens (%)"] == 86.9
    assert frame["paper, sequences (%)"].isna().sum() == 8
    assert frame["seeds"].tolist() == [5, 5, 3, 3, 3, 3] * 2
    axis = long_digits.draw(recorded()).axes[0]
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([82, 90, 90, 90, 90, 90])


def test_the_verdict_asks_for_more_in_both_tasks_and_measures():
    invent_all(lambda config: 0.5 if config.variant == "dense" else 0.9 - 0.1 * (config.variant == "from_zero"))
    word, why = long_digits.verdict(recorded())
    assert word == "reproduced" and "copy, tokens: +40.0 points (+40.0 to +40.0)" in why
    assert "positions from 0 -10.0 points (-10.0 to -10.0)" in long_digits.parts(recorded()["addition"])


def test_the_verdict_is_partly_where_one_task_fails():
    invent_all(lambda config: 0.5 + 0.2 * (config.variant == "terraformer") * (config.data.corpus == "copy"))
    assert long_digits.verdict(recorded())[0] == "partly reproduced"


def test_a_live_training_answers():
    live = long_digits.train_live(steps=200, length=3, seed=0)
    frame = long_digits.examples(live.model.eval(), "copy", [2, 3, 9])
    assert frame["source"].str.len().tolist() == [2, 3, 9]
    assert all(
        (a == s) == (r == "yes") for a, s, r in zip(frame["answer"], frame["source"], frame["right"], strict=True)
    )
    assert frame["right"][0] == "yes"
