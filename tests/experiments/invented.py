"""Records of runs that never were, for everything that draws recorded runs."""

from sparselib.experiments.recorded import planned_runs
from sparselib.results import store

from ..results.runs import record

POINTS = 8


def invent(experiment, final_loss, extra=None):
    """Save a record of every run of a sweep; ``final_loss`` and ``extra`` are functions of its config."""
    for config in planned_runs(experiment):
        save(config, final_loss(config), extra and extra(config))


def save(config, final_loss, extra=None, **fields):
    steps = [config.steps * point // POINTS for point in range(1, POINTS + 1)]
    run = record(losses=[6.0] * config.steps, final_loss=final_loss, **config.model_dump()).model_dump()
    run |= dict(validation=[(s, final_loss + 1 - s / config.steps) for s in steps], extra=extra or {})
    run |= dict(tokens=config.steps * config.batch * config.data.length, minutes=7.5) | fields
    store.save(store.RunRecord.model_validate(run))
