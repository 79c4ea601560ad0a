"""Terraformers beside Transformers: times of small ones, and the sweeps of their perplexity."""

from itertools import chain

import pytest

from sparselib.config import count_parameters
from sparselib.experiments import decoding, perplexity, reversibility, terraformer
from sparselib.experiments.recorded import planned_runs


def test_times_of_both_are_set_beside_the_papers():
    configs = terraformer.configs_of_both("smoke")
    measured, roofline = decoding.time_configs(configs, tokens=2, rounds=2, threads=1)
    frame = terraformer.both_table(configs, measured, roofline)
    assert frame["model"].tolist() == list(configs)
    assert frame["paper (ms)"].dropna().tolist() == pytest.approx([160, 61, 86]) and len(frame) == 4
    assert frame["here, times dense"][0] == 1 and (frame["% of limit"] > 0).all()
    theirs, ours, alike = terraformer.times_the_transformer(measured)
    assert theirs == pytest.approx(86 / 61)
    assert ours == pytest.approx(measured.ratio("Terraformer, sparse loss", "sparse Transformer"))
    assert alike == pytest.approx(measured.ratio("Terraformer, sparse loss", "sparse Transformer, sparse loss"))


def test_what_is_compared_weighs_the_same_and_sees_the_same():
    configs = list(chain.from_iterable(map(planned_runs, ("appendix", "reversible"))))
    weights = [count_parameters(config.model_config_()) for config in configs]
    assert max(weights) < 1.006 * min(weights)
    assert len({(c.data, c.optimizer.warmup, c.steps, c.batch, c.validate_every) for c in configs}) == 1
    rows = {row.run for row in (*terraformer.APPENDIX, *reversibility.HARM)}
    assert rows == {f"{config.experiment}/{config.variant}" for config in configs}


def test_models_are_tuned_alike_and_take_the_best_rate_once_it_is_recorded():
    tuning, appendix = map(planned_runs, ("appendix_tuning", "appendix"))
    tried = {(c.variant.rpartition("_")[0], c.optimizer.learning_rate) for c in tuning}
    kinds, rates = {kind for kind, _ in tried}, {rate for _, rate in tried}
    assert len(tried) == len(kinds) * len(rates) and kinds == {config.variant for config in appendix}
    assert not {config.seed for config in tuning} & {config.seed for config in appendix}
    taken = {config.variant: config.optimizer.learning_rate for config in appendix}
    assert all(c.optimizer.learning_rate == taken["terraformer"] for c in planned_runs("reversible"))
    recorded, frame = perplexity.load_tuning(terraformer.APPENDIX_TUNING)
    table = perplexity.tuning_table(frame, ("appendix",))
    if recorded.missing:
        pytest.skip("the sweep over learning rates is not recorded")
    assert table["used"].tolist() == table["best"].tolist()
