"""Notebooks 08 to 11: the sweeps that are recorded for them, model sizes, learning rates, live trainings."""

from itertools import chain

import pytest

from sparselib.config import count_parameters
from sparselib.experiments import controller_traces, perplexity
from sparselib.experiments.recorded import load, planned_runs, table
from sparselib.paths import repository
from sparselib.results import statistics
from sparselib.results.figures import look

from .invented import invent

FILES = sorted(path.stem for path in (repository() / "data" / "sweeps").glob("*.yaml"))
DIGITS = ("copy", "copy_parts", "copy_tuning", "addition", "addition_parts", "addition_tuning")  # notebook 15
OF_TERRAFORMER = ("appendix", "appendix_tuning", "reversible", *DIGITS)  # notebooks 14 and 16
SWEEPS = [name for name in FILES if name not in OF_TERRAFORMER]
LAPTOP = [name for name in SWEEPS if not name.endswith("_paper")]
TRIED = (*perplexity.TUNING, *perplexity.WARM_UPS)
REPORTED = [name for name in LAPTOP if name not in TRIED]
FIGURES = [
    perplexity.figure_1(),
    perplexity.figure_1("figure1_paper"),
    perplexity.TUNED,
    perplexity.FIGURE_3.rows,
    perplexity.FIGURE_3_PAPER.rows,
    perplexity.CAUSES,
    perplexity.FIGURE_5,
    perplexity.FIGURE_5_PAPER,
    perplexity.LOSS,
    perplexity.LOSS_PAPER,
    controller_traces.ABLATIONS,
    controller_traces.SPARSITIES,
    *perplexity.scale_rows().values(),
]


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


@pytest.mark.parametrize("experiment", FILES)
def test_a_sweep_is_of_its_name(experiment):
    assert {config.experiment for config in planned_runs(experiment)} == {experiment}


def test_nothing_is_trained_twice():
    configs = chain.from_iterable(planned_runs(name) for name in LAPTOP)
    settings = [(c.model_config_(), c.optimizer, c.data, c.steps, c.batch, c.seed) for c in configs]
    assert all(settings.count(one) == 1 for one in settings)


@pytest.mark.parametrize("rows", FIGURES)
def test_what_a_figure_compares_differs_in_the_model_alone_and_weighs_the_same(rows):
    runs = {f"{c.experiment}/{c.variant}": c for c in chain.from_iterable(map(planned_runs, SWEEPS))}
    configs = [runs[row.run] for row in rows if not row.run.endswith("same_d_ff")]
    assert len({(c.data, c.steps, c.batch, c.validate_every, c.precision) for c in configs}) == 1
    assert len({c.optimizer.model_copy(update={"learning_rate": 1.0}) for c in configs}) == 1
    weights = [count_parameters(c.model_config_()) for c in configs]
    assert max(weights) < (1.08 if rows[0] == perplexity.PAPER_DENSE else 1.021) * min(weights)  # paper: its own d_ff


def test_every_recorded_run_is_shown():
    shown = {row.run for rows in FIGURES for row in rows}
    planned = {f"{c.experiment}/{c.variant}" for name in SWEEPS if name not in TRIED for c in planned_runs(name)}
    assert shown == planned


def test_every_model_is_tuned_over_the_same_rates_and_on_other_seeds():
    tuning, again = map(planned_runs, perplexity.TUNING)
    assert {config.variant for config in again} < {config.variant for config in tuning}
    rates = {}
    for config in tuning:
        rates.setdefault(config.variant.rpartition("_")[0], set()).add(config.optimizer.learning_rate)
    assert len(rates) == 5 and len({frozenset(tried) for tried in rates.values()}) == 1
    reported = {c.seed for name in REPORTED for c in planned_runs(name)}
    assert not reported & {config.seed for config in (*tuning, *again)}
    for config in planned_runs("figure1"):
        assert config.optimizer.learning_rate in rates[config.variant]


def test_models_of_a_kind_have_the_rate_of_that_kind_in_figure_1():
    tuned = [*planned_runs("figure1"), *(c for c in planned_runs("ablations") if c.variant == "ff_paper")]
    rates = {config.variant: config.optimizer.learning_rate for config in tuned}
    for config in chain.from_iterable(planned_runs(name) for name in REPORTED if name != "figure1_tuned"):
        kind = "ff" if "feedforward" in config.model else config.model.get("variant", "dense")
        kind += "_paper" * (config.model.get("controller") == "paper")
        assert config.optimizer.learning_rate == rates[kind], f"{config.experiment}/{config.variant}"


def test_figure_1_takes_the_best_rates_once_they_are_recorded(monkeypatch):
    monkeypatch.delenv("SPARSELIB_RUNS")
    recorded, frame = perplexity.load_tuning()
    if recorded.missing:
        pytest.skip("the sweep over learning rates is not recorded")
    table = perplexity.tuning_table(frame)
    assert table["used"].tolist() == table["best"].tolist()


def test_tuning_table_names_the_best_rate():
    recorded, frame = perplexity.load_tuning()
    assert perplexity.tuning_table(frame)["recorded"].tolist() == [0] * 5
    assert not perplexity.draw_tuning(frame, recorded).axes[0].lines
    best = {"dense": 0.002, "ff": 0.016, "ff_paper": 0.008, "qkv": 0.004, "ff_qkv": 0.001}
    invent("tuning", lambda c: 5 + abs(c.optimizer.learning_rate - best[c.variant.rpartition("_")[0]]))
    recorded, frame = perplexity.load_tuning()
    table = perplexity.tuning_table(frame)
    assert table["best"].tolist() == list(best.values())
    assert table["loss (nats)"].tolist() == [5] * 5
    assert table["best at the edge"].tolist() == ["no", "yes", "no", "no", "yes"]
    assert len(perplexity.draw_tuning(frame, recorded).axes[0].lines) == 5
    invent("tuning_again", lambda c: 4.9 + (c.variant != "dense_0.004"))
    table = perplexity.tuning_table(perplexity.load_tuning()[1])
    assert table["best"][0] == 0.004  # the mean of both
    assert table["best"][1] == 0.008  # at 0.016 the first seed was better, but has no second
    assert table["loss (nats)"][0] == pytest.approx((5.002 + 4.9) / 2)


def test_warm_up_is_compared_at_the_rate_of_each_model():
    recorded, frame = perplexity.load_warmup()
    assert frame.shape == (4, 9) and frame.iloc[:, 1:-1].isna().all(axis=None)
    for experiment in ("warmup", "warmup_again"):
        invent(experiment, lambda c: c.optimizer.warmup / 100 + c.optimizer.learning_rate)
    invent("tuning", lambda c: 100 * c.optimizer.learning_rate)
    frame = perplexity.load_warmup()[1].set_index("model")
    tried = ["20 steps, 1x", "60 steps, 1x", "180 steps, 1x", "300 steps, 1x", "180 steps, 2x", "180 steps, 4x"]
    assert list(frame) == [*(f"{name} (nats)" for name in tried), "best", "used"]
    assert frame.loc["dense"].tolist()[:6] == pytest.approx([0.204, 0.4, 1.804, 3.004, 1.808, 1.816])
    assert frame.loc["sparse QKV"].tolist()[:6] == pytest.approx([0.208, 0.8, 1.808, 3.008, 1.816, 1.832])
    assert frame["best"].tolist() == ["20 steps, 1x"] * 4
    invent("warmup_edge", lambda c: 9 + c.optimizer.learning_rate)
    both = perplexity.load_warmup()[1].set_index("model").loc["sparse FF+QKV"]
    assert both["180 steps, 2x (nats)"] == pytest.approx((1.816 + 9.016) / 2)
    assert both["best"] == "180 steps, 2x"  # 20 steps were better, but have no second seed


def test_the_tuned_models_take_what_is_best(monkeypatch):
    monkeypatch.delenv("SPARSELIB_RUNS")
    _, frame = perplexity.load_warmup()
    assert frame["used"].tolist() == frame["best"].tolist()
    feedforwards = [c for c in planned_runs("figure1_tuned") if c.variant.startswith("ff") and c.variant != "ff_qkv"]
    assert len({(c.optimizer.learning_rate, c.optimizer.warmup) for c in feedforwards}) == 1


def test_at_one_rate_models_are_compared_over_the_seeds_that_both_have():
    assert perplexity.by_rate().iloc[:, 1:].isna().all(axis=None)
    invent("tuning", lambda c: 5 + 0.1 * c.variant.startswith("ff_qkv"))
    invent("tuning_again", lambda c: 6 + 0.3 * c.variant.startswith("ff_qkv"))
    frame = perplexity.by_rate().set_index("model")
    rates = {c.optimizer.learning_rate for c in planned_runs("tuning")}
    assert list(frame) == [f"{rate:g} (nats)" for rate in sorted(rates)]
    again = {c.variant for c in planned_runs("tuning_again")}
    both = {rate for rate in rates if {f"dense_{rate:g}", f"ff_qkv_{rate:g}"} <= again}
    for rate in rates:
        assert frame.loc[look("ff_qkv").label, f"{rate:g} (nats)"] == pytest.approx(0.2 if rate in both else 0.1)
        assert frame.loc[look("qkv").label, f"{rate:g} (nats)"] == pytest.approx(0)


def test_what_a_token_reads_of_a_sparse_feedforward():
    recorded = load(perplexity.CAUSES)
    read = perplexity.with_reads(recorded, table(recorded))["read (%)"]
    dense = 4 * (2 * 128 * 512 + 512 + 128)
    n4_rank64 = 4 * (96 * (2 * 128 + 1) + 128 + 128 * 64 + 64 * 384)  # units, bias, the controller
    assert read[0] == 100 and read[4] == pytest.approx(100 * n4_rank64 / dense)
    assert read[1] < min(read[2:])


def test_each_size_is_compared_with_its_own_dense_model():
    rows = perplexity.scale_rows()
    empty = {size: load(part) for size, part in rows.items()}
    perplexity.draw_scale(empty)
    assert perplexity.trend(empty).count("is not recorded yet at both") == 2
    for experiment in ("figure1", "scale"):
        invent(experiment, lambda c: c.model.get("d_model", 128) / 100 + 0.25 * c.variant.endswith("ff"))
    sizes = {size: load(part) for size, part in rows.items()}
    frame = perplexity.scale_table(sizes)
    assert frame["d_model"].tolist() == [size for size in rows for _ in range(3)]
    assert frame[frame["model"] == "sparse FF"]["difference (nats)"].tolist() == pytest.approx([0.25] * 3)
    assert len(perplexity.draw_scale(sizes).axes[0].containers) == 2
    assert perplexity.trend(sizes).startswith("from d_model 64 to 256 the difference of sparse FF changes by +0.000 (")


def test_live_trainings_learn_and_depend_on_the_seed_alone():
    models = {"dense": {}, "both": {"variant": "ff_qkv"}}
    trained = perplexity.train_live(models, seed=0, steps=20)
    again = perplexity.train_live({"both": {"variant": "ff_qkv"}}, seed=0, steps=20)
    other = perplexity.train_live({"both": {"variant": "ff_qkv"}}, seed=1, steps=20)
    assert trained[1].result.losses == again[0].result.losses != other[0].result.losses
    frame = perplexity.live_table(trained)
    assert frame["model"].tolist() == ["dense", "both"]
    assert (frame["validation loss (nats)"] < frame["loss at first (nats)"]).all()
