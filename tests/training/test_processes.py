"""Several processes are one: the same losses from the same batches. And the command that starts them."""

import os
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from sparselib import recording
from sparselib.cli import app
from sparselib.results import store
from sparselib.training import TrainConfig, checkpoints, loop, train_run

FIELDS = {
    "experiment": "e",
    "variant": "v",
    "model": {"preset": "smoke"},
    "data": {"corpus": "lm_ci", "vocab_size": 300, "length": 64},
    "optimizer": {"learning_rate": 1e-2, "warmup": 1},
    "steps": 4,
    "batch": 16,
    "accumulate": 2,
}

REVERSIBLE = FIELDS | {
    "model": {"preset": "smoke", "architecture": "terraformer", "n_encoder_layers": 1, "sru_units": 4},
    "data": {"corpus": "lm_ci", "vocab_size": 400, "length": 64, "objective": "span", "target_length": 32},
}


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, FIELDS)


def write(folder, fields):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def call(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


SCRIPT = """
import sys
from pathlib import Path
from sparselib import recording
from sparselib.cli import app
from sparselib.results import store
from sparselib.training import TrainConfig, train_run
file, out = sys.argv[1:]
train_run(TrainConfig.load(Path(file)), folder=Path(out), resume=False, progress=False, stop_after=2)
app(["train", file, "--out", out, "--resume"])
"""


# accelerate spreads weights over GPUs only; this tells it that the two processes on CPUs are such.
SPREAD = """
from accelerate import Accelerator, utils
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from sparselib.training import trainer
class Spread(Accelerator):
    def __init__(self, **settings):
        super().__init__(**settings)
        plugin = utils.FullyShardedDataParallelPlugin()
        AcceleratorState._shared_state |= {"distributed_type": utils.DistributedType.FSDP, "fsdp_plugin": plugin}
    def prepare(self, model, optimizer):
        model, optimizer = super().prepare(model, optimizer)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        return model, optimizer
trainer.Accelerator = Spread
"""
WHOLE, FSDP = "--multi_gpu", "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy"
OF_BLOCKS = f"{FSDP} TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block"


@pytest.mark.parametrize(
    ("fields", "options"),
    [(FIELDS, WHOLE), (REVERSIBLE, WHOLE), (FIELDS, OF_BLOCKS), (REVERSIBLE, f"{FSDP} NO_WRAP")],
    ids=["decoder", "reversible", "decoder, weights spread", "reversible, weights spread"],
)
def test_two_processes_are_one_also_when_they_go_on(fields, options, tmp_path):
    file = write(tmp_path, fields)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT if options == WHOLE else SPREAD + SCRIPT)
    launch = "accelerate.commands.launch --num_processes 2 --num_machines 1 --mixed_precision no"
    command = [sys.executable, "-m", *launch.split(), "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [*options.split(), *map(str, [script, file, tmp_path / "two"])]
    environment = os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("validation loss") == 1  # one of the two speaks
    manifest = checkpoints.load(checkpoints.latest(tmp_path / "two")).manifest
    assert manifest.processes == 2
    alone = train_run(TrainConfig.load(file), folder=None, resume=False, progress=False)
    assert manifest.trace.losses == pytest.approx(alone.losses, rel=1e-5)
    assert manifest.trace.validation[0][1] == pytest.approx(alone.validation[0][1], rel=1e-5)
    result = call(file, "--out", tmp_path / "two", "--resume")
    assert result.exit_code == 2 and "processes = 1: must be 2" in result.output


def test_the_command_trains_and_says_what_came_out(file, tmp_path):
    result = call(file, "--out", tmp_path / "out", "--seed", 3)
    assert result.exit_code == 0, result.output
    manifest = checkpoints.load(tmp_path / "out" / "step_00000004").manifest
    assert manifest.config.seed == 3 and f"validation loss {manifest.trace.validation[0][1]:.4f}" in result.output
    assert all(word in result.output for word in ("weights", "tokens/s", "GB at the peak", "step_00000004"))


def test_the_command_refuses_in_one_line(file, tmp_path):
    (tmp_path / "bad.yaml").write_text("batch: 1")
    for bad in (tmp_path / "bad.yaml", tmp_path / "none.yaml"):
        result = call(bad)
        assert result.exit_code == 2 and str(bad) in result.output and result.output.count("\n") == 1
    for arguments, words in (
        (("--seed", -1), "--seed: seed = -1"),
        (("--record", "--out", tmp_path), "left out with --record"),
    ):
        result = call(file, *arguments)
        assert result.exit_code == 2 and words in result.output and result.output.count("\n") == 1
    assert call(tmp_path).exit_code == 2 and "Is a directory" in call(tmp_path).output


def test_the_command_records_what_it_has_trained(file, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARSELIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recording, "code", lambda: recording.Code("a" * 40, "b" * 40))
    result = call(file, "--record", "--seed", 3)
    (run,), faults = store.scan()
    assert result.exit_code == 0 and f"recorded as {run.key}" in result.output and not faults
    assert (run.seed, len(run.losses), run.machine["processes"]) == (3, 4, 1)
    again = call(file, "--record", "--seed", 3)  # is read
    assert again.exit_code == 0 and f"{run.final_loss:.4f}" in again.output


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (FloatingPointError("loss is nan"), 1, "loss is nan"),
        (OSError(28, "No space left on device"), 1, "No space left"),
        (KeyboardInterrupt("stopped after step 2"), 130, "stopped after step 2; to go on: sparselib train {} --resume"),
    ],
)
def test_the_command_ends_in_one_line_however_a_run_ends(file, monkeypatch, error, code, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop, "load_splits", fail)
    result = call(file, "--seed", 4)
    assert result.exit_code == code and words.format(file) in result.output and result.output.count("\n") == 1
    assert code != 130 or "--seed 4 --out" in result.output
