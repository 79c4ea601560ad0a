"""Checkpoints as files: whole or not there, refused when damaged or another run's."""

import json

import pytest
import torch

from sparselib.training import TrainConfig, checkpoints
from sparselib.training.checkpoints import Trace, check_same_run, latest, load, save

CONFIG = TrainConfig(
    experiment="e",
    variant="v",
    model={"preset": "smoke"},
    data={"corpus": "lm_ci", "vocab_size": 300, "length": 8},
    optimizer={"learning_rate": 0.1, "warmup": 1},
    steps=9,
    batch=2,
)
CHECKSUMS = {"data": "abc", "vocabulary": "xyz"}
WEIGHTS = {"w": torch.arange(6.0).view(2, 3)}
STATE = {"w/step": torch.tensor(3.0), "generators": torch.zeros(1, 5, dtype=torch.uint8)}


def write(folder, step):
    trace = Trace(losses=[0.1 * s for s in range(step)], validation=[(1, 2.5)], extra={"dead": [float("nan")]})
    return save(folder, CONFIG, CHECKSUMS, trace, WEIGHTS, STATE)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    path = write(tmp_path / "new", 3)
    found = load(path)
    assert path == latest(tmp_path / "new") == found.path and path.name == "step_00000003"
    assert found.manifest.config == CONFIG and found.manifest.trace.losses == [0.0, 0.1, 0.2]
    assert found.manifest.trace.step == 3 and found.manifest.trace.validation == [(1, 2.5)]
    assert str(found.manifest.trace.extra) == "{'dead': [nan]}"
    assert torch.equal(found.weights["w"], WEIGHTS["w"]) and found.state.keys() == STATE.keys()
    check_same_run(found, CONFIG, CHECKSUMS, 1)


def test_a_new_checkpoint_takes_the_place_of_the_old(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "step_mine").touch()
    write(tmp_path, 12)
    assert write(tmp_path, 12).name == "step_00000012"  # again: nothing to do
    assert files(tmp_path) == ["step_00000012", "step_mine"]
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("when", [1, 2])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, when):
    old, calls, save_file = write(tmp_path, 3), [], checkpoints.save_file

    def full(tensors, path):
        calls.append(path)
        if len(calls) == when:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match=f"step 4 could not be written .*No space left.*last good one is {old}"):
        write(tmp_path, 4)
    assert files(tmp_path) == [old.name] and load(old).manifest.trace.step == 3


def test_a_full_disk_at_the_first_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_digest", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, 4)
    assert files(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="there is no earlier one"):
        write(tmp_path / "file" / "folder", 4)


@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damaged_tensors_are_refused(tmp_path, file, how):
    path = write(tmp_path, 3) / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if how == "flip" else content[:-1])
    if how == "remove":
        path.unlink()
    with pytest.raises(ValueError, match=file):
        load(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: {}, "format|config"),
        (lambda run: run | {"format": 1}, "format = 1"),
        (lambda run: run | {"more": 1}, "more = 1"),
        (lambda run: run | {"sha256": {}}, "safetensors"),
        (lambda run: run | {"trace": run["trace"] | {"losses": ["low"]}}, "trace.losses.0 = 'low'"),
        (lambda run: run | {"config": run["config"] | {"batch": 0}}, "config.batch = 0"),
    ],
)
def test_a_foreign_run_json_is_refused(tmp_path, change, message):
    path = write(tmp_path, 3)
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(change(run)))
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", None])
def test_a_broken_run_json_is_refused(tmp_path, content):
    path = write(tmp_path, 3) / "run.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match="step_00000003"):
        load(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed = 1: must be 0 to go on from .*step_00000003"),
        ({"steps": None, "epochs": 2.0}, "epochs = 2.0: must be None"),
        ({"optimizer": CONFIG.optimizer.model_copy(update={"learning_rate": 0.2})}, "optimizer.learning_rate = 0.2"),
        ({"data": CONFIG.data.model_copy(update={"vocab_size": 512})}, "data.vocab_size = 512: must be 300"),
        ({"model": {"preset": "smoke", "d_ff": 8}}, "model.d_ff = 8: must be 128"),
        ({"model": {"preset": "smoke", "hard_share": 0.5}}, "model.hard_share = 0.5: must be 0.3 to go on"),
    ],
)
def test_another_config_is_refused_by_the_field_that_differs(tmp_path, change, message):
    found = load(write(tmp_path, 3))
    with pytest.raises(ValueError, match=message):
        check_same_run(found, CONFIG.model_copy(update=change), CHECKSUMS, 1)


def test_other_data_and_other_processes_are_refused(tmp_path):
    found = load(write(tmp_path, 3))
    with pytest.raises(ValueError, match="data checksum = 'abd': must be 'abc'"):
        check_same_run(found, CONFIG, CHECKSUMS | {"data": "abd"}, 1)
    with pytest.raises(ValueError, match="vocabulary checksum = 'other': must be 'xyz'"):
        check_same_run(found, CONFIG, CHECKSUMS | {"vocabulary": "other"}, 1)
    with pytest.raises(ValueError, match="processes = 2: must be 1"):
        check_same_run(found, CONFIG, CHECKSUMS, 2)
