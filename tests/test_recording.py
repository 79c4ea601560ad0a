"""Recording and replay with a stand-in for the training; the last test trains for real."""

import subprocess
from types import SimpleNamespace

import pytest
from torch import nn

from sparselib import recording
from sparselib.config import count_parameters
from sparselib.experiments.controller import STATISTICS
from sparselib.recording import Code
from sparselib.results import store

from .results.runs import CHECKSUM, MODEL, config

WEIGHTS = count_parameters(config().model_config_())
LOSSES = [6.0 - step / 10 for step in range(6)]


class Training:
    """Stands in for ``train_run``: notes how it was called, leaves a checkpoint, and may break."""

    def __init__(self):
        self.calls, self.breaks, self.shift, self.model = [], False, 0.0, nn.Linear(1, 1)

    def __call__(self, config, *, folder, resume, progress, on_validate=None, stop_after=None):
        found = sorted(path.name for path in folder.iterdir()) if folder and folder.is_dir() else []
        self.calls.append(SimpleNamespace(config=config, folder=folder, resume=resume, found=found))
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "step_3").touch()
        if self.breaks:
            raise KeyboardInterrupt
        return SimpleNamespace(
            losses=[loss + self.shift for loss in LOSSES[:stop_after]],
            validation=[(3, 5.9), (6, 5.5)],
            tokens=768,
            seconds=90.0,
            peak_memory_bytes=2_345_678_901,
            parameters=WEIGHTS,
            model=self.model,
            extra={"usage.1": [0.5, 0.6]},
        )


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARSELIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recording, "code", lambda: Code("a" * 40, "b" * 40))
    monkeypatch.setattr(recording, "data_checksum", lambda data: CHECKSUM)
    splits = SimpleNamespace(validation_windows=[])
    monkeypatch.setattr(recording, "load_splits", lambda data: splits)
    fake = Training()
    monkeypatch.setattr(recording, "train_run", fake)
    return fake


def test_a_run_is_trained_once_and_then_read(training):
    run = recording.record(config())
    assert recording.record(config()) == run == store.find(config(), CHECKSUM)
    assert len(training.calls) == 1 and training.calls[0].resume
    assert not training.calls[0].folder.exists()
    assert (run.losses, run.validation, run.final_loss) == (LOSSES, [(3, 5.9), (6, 5.5)], 5.5)
    assert (run.minutes, run.peak_memory_gb, run.parameters, run.tokens) == (1.5, 2.346, WEIGHTS, 768)
    assert (run.code_version, run.extra) == ("a" * 40, {"usage.1": [0.5, 0.6]})
    assert {"cpu", "python", "torch", "numpy", "threads", "training_threads", "device"} <= run.machine.keys()


def test_another_seed_is_another_run(training):
    assert recording.record(config(seed=1)).key != recording.record(config()).key
    assert len(store.scan()[0]) == 2


def test_an_interrupted_run_goes_on_with_the_same_code_and_starts_again_with_other(training, monkeypatch):
    training.breaks = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            recording.record(config())
    monkeypatch.setattr(recording, "code", lambda: Code("d" * 40, "e" * 40))
    training.breaks = False
    assert recording.record(config()).code_version == "d" * 40
    assert [call.found for call in training.calls] == [[], ["step_3"], []]
    assert not any(call.folder.exists() for call in training.calls)


def test_a_run_is_not_trained_by_unknown_code(training, monkeypatch):
    def unclean():
        raise ValueError("code = ' M sparselib/config.py'")

    monkeypatch.setattr(recording, "code", unclean)
    with pytest.raises(ValueError, match=r"sparselib/config\.py"):
        recording.record(config())
    assert training.calls == []


@pytest.mark.parametrize(("steps", "shift"), [(4, 0.0), (3, 0.01), (100, -0.002)])
def test_replay_tells_the_largest_difference(training, steps, shift):
    run = recording.record(config())
    training.shift = shift
    assert recording.replay(run, steps) == pytest.approx(abs(shift))
    assert (training.calls[-1].config, training.calls[-1].folder) == (config(), None)


def test_replay_refuses_other_data(training, monkeypatch):
    run = recording.record(config())
    monkeypatch.setattr(recording, "data_checksum", lambda data: "1" * 64)
    with pytest.raises(ValueError, match="data checksum = '1{64}': must be that of the run, 0{64}"):
        recording.replay(run)


def test_replay_refuses_another_kind_of_device(training):
    run = recording.record(config())
    training.model.to("meta")
    with pytest.raises(ValueError, match="device = 'meta': must be 'cpu', on which the run was recorded"):
        recording.replay(run)


# --- the code's version -----------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with a package and a corpus, all committed."""
    for file in ("sparselib/a.py", "data/corpora/text.txt", "README.md"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("1")
    monkeypatch.setattr(recording, "repository", lambda: tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *command):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a change")


def test_code_is_the_commit_and_what_sparselib_was_in_it(clone):
    first = recording.code()
    assert first.commit == git(clone, "rev-parse", "HEAD").strip()
    (clone / "README.md").write_text("2")
    assert recording.code() == first
    commit(clone)
    second = recording.code()
    assert (second.commit != first.commit, second.tree) == (True, first.tree)
    (clone / "sparselib" / "a.py").write_text("2")
    commit(clone)
    assert recording.code().tree != first.tree


@pytest.mark.parametrize("file", ["sparselib/a.py", "sparselib/inside/new.py", "data/corpora/text.txt"])
def test_changed_code_and_texts_have_no_version(clone, file):
    (clone / file).parent.mkdir(exist_ok=True)
    (clone / file).write_text("2")
    with pytest.raises(ValueError, match=f"code = '.*{file}'.*: must be committed"):
        recording.code()


def test_code_outside_git_has_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "repository", lambda: tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="code version: unknown, .*git"):
        recording.code()


# --- a real training --------------------------------------------------------------------------------------------------


def test_a_real_run_is_recorded_and_replays_to_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    monkeypatch.setattr(recording, "code", lambda: Code("a" * 40, "b" * 40))
    sparse = MODEL | dict(feedforward="sparse", ff_sparsity=8, d_lowrank=8)
    run = recording.record(config(model=sparse, validate_every=3), progress=False)
    assert [step for step, _ in run.validation] == [3, 6]
    assert len(run.losses) == 6 and run.tokens == 6 * 4 * 32
    assert {f"{name}.{block}" for name in STATISTICS for block in (1, 2)} == run.extra.keys()
    assert recording.replay(run, 4) < 1e-5  # the file's rounding


def test_of_copying_the_accuracies_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))
    monkeypatch.setattr(recording, "code", lambda: Code("a" * 40, "b" * 40))
    model = MODEL | dict(architecture="terraformer", n_encoder_layers=1, vocab_size=16, max_len=32)
    data = dict(corpus="copy", objective="toy", vocab_size=16, length=8)
    run = recording.record(config(model=model, data=data), progress=False)
    assert run.extra.keys() == {f"{a}.{b}" for a in ("within", "beyond") for b in ("tokens", "sequences")}
