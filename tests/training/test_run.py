"""Whole runs: the same losses however they are stopped; every way to stop them."""

import signal
from types import SimpleNamespace

import pytest
import torch

from sparselib.checks import require
from sparselib.config import ModelConfig, count_parameters
from sparselib.models import Transformer
from sparselib.tasks.objectives import Causal, SpanCorruption
from sparselib.tasks.sources import Splits, WindowSource
from sparselib.training import TrainConfig, checkpoints, loop, train_run
from sparselib.training.trainer import Trainer

VOCAB, LENGTH = 32, 8
SIZES = dict(d_model=16, d_ff=32, n_heads=2, n_layers=2, max_len=LENGTH, dropout=0.2)
MODELS = {
    "dense": SIZES,
    "ff": SIZES | dict(feedforward="sparse", ff_sparsity=4, d_lowrank=4),
    "switch": SIZES | dict(feedforward="switch", ff_sparsity=4),
    "qkv": SIZES | dict(attention="mult_conv", n_modules=2, loss_sparsity=2),
}
QUIET = dict(folder=None, resume=False, progress=False)


def config(model="dense", **changes):
    fields = dict(
        experiment="e",
        variant="v",
        model=MODELS[model] if isinstance(model, str) else model,
        data=dict(corpus="lm_ci", vocab_size=VOCAB, length=LENGTH),
        optimizer=dict(learning_rate=1e-2, warmup=2),
        steps=7,
        batch=4,
        validate_every=3,
        seed=5,
    )
    return TrainConfig(**fields | changes)


def source(objective, rows):
    chance = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCAB - 4, (rows, 1), generator=chance)
    return WindowSource(((starts + torch.arange(objective.size)) % (VOCAB - 4)).int(), objective)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    """Counting, in place of text."""
    vocabulary = SimpleNamespace(vocab_size=VOCAB, end=1, sentinels=4, checksum="counting")

    def load(data):
        span = data.objective == "span"
        objective = SpanCorruption(data.length, data.target_length, vocabulary) if span else Causal(data.length)
        return Splits(source(objective, 30), source(objective, 6), vocabulary, "checksum")

    monkeypatch.setattr(loop, "load_splits", load)
    return vocabulary


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_run_that_was_stopped_goes_on_to_the_same_losses(tmp_path, model, optimizer):
    run = config(model, optimizer=dict(name=optimizer, learning_rate=1e-2, warmup=2))
    whole = train_run(run, **QUIET)
    for stop in (2, 5, None):
        torch.manual_seed(stop or 0)  # whatever was drawn before does not matter
        result = train_run(run, folder=tmp_path, resume=stop != 2, progress=False, stop_after=stop)
        assert result.checkpoint == checkpoints.latest(tmp_path)
    assert result.losses == whole.losses and len(set(whole.losses)) == 7
    assert result.validation == whole.validation and [step for step, _ in whole.validation] == [3, 6, 7]
    assert torch.equal(weights(result), weights(whole))
    assert result.tokens == whole.tokens == 7 * 4 * LENGTH


def test_what_a_run_gives(tmp_path):
    state = torch.get_rng_state()
    seen = []

    def look(step, model):
        seen.append((type(model), model.training))
        return {"step": float(step), "drawn": torch.rand(()).item()}

    result = train_run(config("ff"), folder=tmp_path, resume=False, progress=False, on_validate=look)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.losses == train_run(config("ff"), **QUIET).losses  # what is drawn while looking changes nothing
    assert result.extra["step"] == [3, 6, 7] and len(result.extra["drawn"]) == 3
    assert seen == [(Transformer, False)] * 3
    assert result.parameters == count_parameters(config("ff").model_config_())
    assert result.seconds > 0 and result.peak_memory_bytes > 10**7
    assert result.losses != train_run(config("ff", seed=6), **QUIET).losses
    again = train_run(config("ff"), folder=tmp_path, resume=True, progress=False, on_validate=look)
    assert (again.losses, again.extra, again.seconds) == (result.losses, result.extra, result.seconds)


def test_what_is_looked_at_must_always_have_the_same_names():
    with pytest.raises(ValueError, match="on_validate"):
        train_run(config(), **QUIET, on_validate=lambda step, model: {f"at {step}": 0.0})


@pytest.mark.parametrize("model", ["dense", "ff"])
def test_accumulation_is_a_larger_batch(model):
    noiseless = {"temperature": 1e6, "hard_share": 0.0} if model == "ff" else {}  # the parts draw other noise
    plain = config(MODELS[model] | {"dropout": 0.0} | noiseless)
    whole = train_run(plain, **QUIET)
    parts = train_run(plain.model_copy(update={"accumulate": 4}), **QUIET)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "terraformer"])
def test_a_model_with_a_source_learns_spans_part_by_part(architecture):
    model = SIZES | dict(architecture=architecture, n_encoder_layers=1, dropout=0.0)
    span = dict(corpus="lm_ci", vocab_size=VOCAB, length=LENGTH, objective="span", target_length=6)
    run = TrainConfig.model_validate(config(steps=40).model_dump() | {"model": model, "data": span})
    result = train_run(run, **QUIET)
    assert sum(result.losses[-5:]) < 0.8 * sum(result.losses[:5])
    parts = train_run(run.model_copy(update={"accumulate": 2}), **QUIET, stop_after=3)
    assert parts.losses == pytest.approx(result.losses[:3], rel=1e-5)


def test_bfloat16_learns_about_the_same():
    single = train_run(config("dense"), **QUIET)
    half = train_run(config("dense", precision="bf16"), **QUIET)
    assert half.losses == pytest.approx(single.losses, rel=0.05) and half.losses != single.losses


def test_epochs_become_steps():
    assert len(train_run(config(steps=None, epochs=1.5), **QUIET).losses) == round(1.5 * 30 / 4)
    with pytest.raises(ValueError, match="warmup = 9: must be at most steps = 8"):
        train_run(config(steps=None, epochs=1, optimizer=dict(learning_rate=1, warmup=9)), **QUIET)


def test_a_vocabulary_of_another_size_is_refused(data):
    data.vocab_size = VOCAB + 1
    with pytest.raises(ValueError, match="data.vocab_size = 32: must be 33"):
        train_run(config(), **QUIET)


def test_a_folder_that_is_taken_is_refused_but_to_go_on(tmp_path):
    keep = dict(folder=tmp_path, progress=False)
    train_run(config(), **keep, resume=False, stop_after=2)
    with pytest.raises(ValueError, match="folder = .*step_00000002 is there"):
        train_run(config(), **keep, resume=False)
    with pytest.raises(ValueError, match="seed = 6: must be 5"):
        train_run(config(seed=6), **keep, resume=True)
    assert checkpoints.latest(tmp_path).name == "step_00000002"


def test_weights_of_another_shape_are_refused(tmp_path, monkeypatch):
    keep = dict(folder=tmp_path, progress=False)
    train_run(config(), **keep, resume=False, stop_after=2)
    wider = ModelConfig(vocab_size=VOCAB, **SIZES | {"d_ff": 40})
    monkeypatch.setattr(TrainConfig, "model_config_", lambda self: wider)
    with pytest.raises(ValueError, match="feedforward.* in the checkpoint = .32.*: must be .40"):
        train_run(config(), **keep, resume=True)


def spoil(monkeypatch, at, what):
    """Let something happen before update ``at``."""
    update = Trainer.update

    def spoiled(self, batch, step):
        if step == at:
            what(self)
        return update(self, batch, step)

    monkeypatch.setattr(Trainer, "update", spoiled)


def test_not_a_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    spoil(monkeypatch, 6, lambda t: t.bare_model.unembedding.bias.data.fill_(float("nan")))
    run = config(checkpoint_every=2)
    with pytest.raises(FloatingPointError, match="loss is nan at step 6: .* last good checkpoint: .*step_00000004"):
        train_run(run, folder=tmp_path, resume=False, progress=False)
    with pytest.raises(FloatingPointError, match="last good checkpoint: none"):
        train_run(run, **QUIET)


def test_an_activation_that_is_not_a_number_stops_the_run_in_the_same_words(tmp_path, monkeypatch):
    """Layers refuse NaN before there is a loss."""
    spoil(monkeypatch, 6, lambda t: t.bare_model.embedding.weight.data.fill_(float("nan")))
    with pytest.raises(FloatingPointError, match="an activation is NaN at step 6: .*: .*step_00000004"):
        train_run(config(checkpoint_every=2), folder=tmp_path, resume=False, progress=False)
    wild = config(optimizer=dict(learning_rate=1e9, warmup=0))
    with pytest.raises(FloatingPointError, match="at step [23]: lower the learning rate"):
        train_run(wild, **QUIET)


def test_bad_input_is_not_taken_for_a_training_that_diverges(monkeypatch):
    spoil(monkeypatch, 2, lambda _: require(False, "x", 1, "something else"))
    with pytest.raises(ValueError, match="something else"):
        train_run(config(), **QUIET)


def test_a_folder_that_cannot_be_written_to_is_told_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    spoil(monkeypatch, 1, lambda _: 1 / 0)
    with pytest.raises(OSError, match="checkpoints cannot be written to .*file/folder"):
        train_run(config(), folder=tmp_path / "file" / "folder", resume=False, progress=False)


def test_an_infinite_gradient_never_reaches_the_weights(tmp_path, monkeypatch):
    def blow_up(trainer):
        weight = trainer.bare_model.embedding.weight
        weight.register_hook(lambda grad: grad * float("inf"))

    spoil(monkeypatch, 4, blow_up)
    with pytest.raises(FloatingPointError, match="norm of the gradients is (nan|inf) at step 4: .*step_00000003"):
        train_run(config(checkpoint_every=1), folder=tmp_path, resume=False, progress=False)
    found = checkpoints.load(checkpoints.latest(tmp_path))
    assert all(weight.isfinite().all() for weight in found.weights.values())


def test_an_infinite_validation_loss_stops_the_run(monkeypatch):
    monkeypatch.setattr("sparselib.training.trainer.mean_loss", lambda *_: float("inf"))
    with pytest.raises(FloatingPointError, match="validation loss is inf at step 3"):
        train_run(config(), **QUIET)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_scheduler_finishes_the_step_and_saves(tmp_path, monkeypatch, number):
    handler = signal.getsignal(number)
    whole = train_run(config("ff"), **QUIET)
    spoil(monkeypatch, 4, lambda _: signal.raise_signal(number))
    with pytest.raises(KeyboardInterrupt, match="stopped after step 4 of 7, kept in .*step_00000004"):
        train_run(config("ff"), folder=tmp_path, resume=False, progress=False)
    with pytest.raises(KeyboardInterrupt, match="kept in no folder"):
        train_run(config("ff"), **QUIET)
    assert signal.getsignal(number) is handler
    assert train_run(config("ff"), folder=tmp_path, resume=True, progress=False).losses == whole.losses


def test_a_second_ctrl_c_strikes_at_once(tmp_path, monkeypatch):
    spoil(monkeypatch, 4, lambda _: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt) as caught:
        train_run(config(checkpoint_every=2), folder=tmp_path, resume=False, progress=False)
    assert str(caught.value) == "" and checkpoints.latest(tmp_path).name == "step_00000002"


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    run, save_file = config(checkpoint_every=2), checkpoints.save_file

    def full(tensors, path):
        if "00000004" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="step 4 could not be written .*No space left.*step_00000002"):
        train_run(run, folder=tmp_path, resume=False, progress=False)
    monkeypatch.setattr(checkpoints, "save_file", save_file)
    assert train_run(run, folder=tmp_path, resume=True, progress=False).losses == train_run(run, **QUIET).losses


def test_the_bar_counts_on_from_the_checkpoint(tmp_path, capsys):
    train_run(config(), folder=tmp_path, resume=False, progress=True, stop_after=3)
    assert "tok/s" in capsys.readouterr().err
    train_run(config(), folder=tmp_path, resume=True, progress=True)
    bar = capsys.readouterr().err
    assert "43%" in bar and "100%" in bar and "loss=" in bar
