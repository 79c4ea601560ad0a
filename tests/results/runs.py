"""A small recorded run for the tests of the store and of all that reads it."""

import datetime

from sparselib.config import count_parameters
from sparselib.results.store import RECIPE, RunRecord, key_of
from sparselib.training.config import TrainConfig

CHECKSUM = "0" * 64
MODEL = dict(vocab_size=512, d_model=32, d_ff=128, n_heads=4, n_layers=2, max_len=64)


def config(**changes):
    fields = dict(
        experiment="figure1",
        variant="dense",
        model=MODEL,
        data=dict(corpus="lm_ci", vocab_size=512, length=32),
        optimizer=dict(learning_rate=0.01, warmup=2),
        steps=6,
        batch=4,
        seed=0,
    )
    return TrainConfig.model_validate(fields | changes)


def record(losses=None, final_loss=6.0, **changes):
    settings = config(**changes)
    losses = losses or [6.25, *[6.123456789] * (settings.steps - 1)]
    return RunRecord(
        experiment=settings.experiment,
        variant=settings.variant,
        seed=settings.seed,
        key=key_of(settings, CHECKSUM),
        config=settings.model_dump(mode="json"),
        recipe=RECIPE,
        data_checksum=CHECKSUM,
        parameters=count_parameters(settings.model_config_()),
        tokens=768,
        losses=losses,
        validation=[(len(losses), final_loss)],
        final_loss=final_loss,
        minutes=0.1,
        peak_memory_gb=0.5,
        code_version="a" * 40,
        date=datetime.date(2026, 1, 2),
        machine={"cpu": "some CPU", "threads": 2},
    )
