"""The command line: complete help, numbers equal to the package's, bad input in one line and exit code 2."""

import json
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from sparselib import __version__, notebooks
from sparselib.bench import roofline
from sparselib.cli import app
from sparselib.config import PRESETS, VARIANTS, count_parameters, decode_cost, preset
from sparselib.decode import memory, pack_random
from sparselib.decode.engine import usable_threads


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_version():
    assert call("--version").output == f"sparselib {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["presets", "cost", "bench", "decode", "notebooks", "book", "reference", "runs", "sweep", "--version"]),
        (["cost"], ["--preset", "--variant", "--context", "--json"]),
        (["bench"], ["machine", "decode"]),
        (["bench", "machine"], ["bandwidth", "FLOPs"]),
        (
            ["bench", "decode"],
            ["--preset", "--model", "--dtype", "--variant", "--threads", "--tokens", "--rounds", "--seed"]
            + ["--json", "--csv"],
        ),
        (
            ["decode"],
            ["--preset", "--variant", "--dtype", "--tokens", "--threads", "--seed", "--context", "--packed"]
            + ["--encoder", "--no-encoder"],
        ),
        (["notebooks"], ["run", "lint", "refresh"]),
        (["notebooks", "run"], ["[names]", "--profile", "--parameter", "-p", "--output"]),
        (["notebooks", "lint"], ["[folder]", "--profile"]),
        (["runs"], ["list", "show", "replay", "export"]),
        (["runs", "list"], ["--experiment", "--json", "--strict"]),
        (["runs", "show"], ["[key]", "--experiment", "--variant", "--seed"]),
        (["runs", "replay"], ["--experiment", "--variant", "--seed", "--steps"]),
        (["runs", "export"], ["--experiment", "--csv"]),
        (["sweep"], ["SWEEP.yaml", "--executor", "dask://HOST", "--workers"]),
        (["book"], ["--profile"]),
        (["train"], ["config", "--resume", "--seed", "--out", "accelerate launch"]),
        (["reference"], ["folder"]),
    ],
)
def test_help_is_complete(command, words):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert [word for word in words if word not in result.output] == []


def test_help_imports_nothing_heavy():
    code = "import sys, sparselib.cli; print(*{'torch', 'numpy', 'pandas', 'papermill'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_presets_shows_every_preset_and_variant():
    output = call("presets").output
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in output.splitlines()]
    shown = {(row[0], row[1]): row[2] for row in rows if len(row) == 5}
    for name in PRESETS:
        for variant in VARIANTS:
            assert shown[name, variant] == f"{count_parameters(preset(name, variant)):,}"


def test_cost_writes_the_numbers_of_decode_cost(tmp_path):
    file = tmp_path / "cost.json"
    result = call("cost", "--preset", "smoke", "--variant", "ff_qkv", "--context", "5", "--json", str(file))
    assert result.exit_code == 0, result.output
    numbers, expected = json.loads(file.read_text()), decode_cost(preset("smoke", "ff_qkv"), context=5)
    assert (numbers["bytes"], numbers["flops"]) == (expected.bytes, expected.flops)
    assert {name: part["bytes"] for name, part in numbers["parts"].items()} == {
        name: part.bytes for name, part in expected.parts.items()
    }
    assert f"{expected.flops:,}" in result.output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["cost", "--preset", "huge"], ["preset", "'huge'", "'paper_17b'"]),
        (["cost", "--preset", "smoke", "--variant", "dense2"], ["variant", "'dense2'", "'ff_qkv'"]),
        (["cost", "--preset", "smoke", "--context", "0"], ["context", "0"]),
        (["bench", "decode", "--preset", "huge"], ["preset", "'huge'", "'paper_17b'"]),
        (["bench", "decode", "--preset", "smoke", "--model", "rnn"], ["model", "'rnn'", "'terraformer'"]),
        (["bench", "decode", "--preset", "smoke", "--dtype", "fp8"], ["dtype", "'fp8'", "'int8'"]),
        (["bench", "decode", "--preset", "smoke", "--threads", "0"], ["threads", "0"]),
        (["decode"], ["preset", "packed", "exactly one"]),
        (["decode", "--preset", "smoke", "--packed", "file"], ["preset", "packed", "exactly one"]),
        (["decode", "--preset", "smoke", "--tokens", "2", "--dtype", "fp8"], ["dtype", "'fp8'", "'int8'"]),
        (["decode", "--preset", "smoke", "--tokens", "64"], ["98", "max_len = 64"]),
        (["decode", "--packed", "no_such_file"], ["no_such_file"]),
        (["book", "--profile", "fast"], ["profile", "'fast'", "'smoke'"]),
        (["notebooks", "run", "--profile", "fast"], ["profile", "'fast'", "'smoke'"]),
        (["notebooks", "lint", "--profile", "fast"], ["profile", "'fast'", "'smoke'"]),
        (["notebooks", "run", "-p", "seed"], ["'seed'", "NAME=VALUE"]),
        (["notebooks", "run", "-p", "profile=smoke"], ["--profile"]),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, names):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert [name for name in names if name not in result.stderr] == []


def test_a_failed_notebook_is_exit_code_1(monkeypatch):
    def fail(*arguments):
        raise notebooks.NotebookFailed("01_x, cell [3]: ZeroDivisionError")

    monkeypatch.setattr(notebooks, "run_notebooks", fail)
    result = call("notebooks", "run")
    assert result.exit_code == 1
    assert result.stderr == "sparselib: 01_x, cell [3]: ZeroDivisionError\n"


def test_parameters_are_read_as_yaml(monkeypatch, tmp_path):
    seen = {}

    def run(profile, names, output, parameters):
        seen.update(profile=profile, names=names, parameters=parameters)
        return [tmp_path / "01_x.ipynb"]

    monkeypatch.setattr(notebooks, "run_notebooks", run)
    assert call("notebooks", "run", "01_x", "-p", "seed=3", "-p", "fresh=true", "--profile", "smoke").exit_code == 0
    assert seen == {"profile": "smoke", "names": ["01_x"], "parameters": {"seed": 3, "fresh": True}}


@pytest.fixture
def little_memory(monkeypatch):
    """A bandwidth is measured on a megabyte a thread."""
    monkeypatch.setattr(roofline, "SMALLEST", 4 * roofline.GRAIN * (psutil.cpu_count() or 1))
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 0)
    monkeypatch.setattr(roofline, "PASSES", 1)
    monkeypatch.setattr(roofline, "TILES", 2**8)


def test_bench_decode_writes_both_files_and_shows_the_rows(little_memory, tmp_path):
    files = ["--json", str(tmp_path / "new" / "out.json"), "--csv", str(tmp_path / "out.csv")]
    asked = ["--dtype", "fp32", "--variant", "dense", "--variant", "ff", "--threads", "1", "--tokens", "2"]
    result = call("bench", "decode", "--preset", "smoke", *asked, "--rounds", "2", *files)
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "new" / "out.json").read_text())
    rows = numbers["rows"]
    assert [(row["variant"], row["scope"], row["n"]) for row in rows] == [
        (variant, scope, 4) for variant in ("dense", "ff") for scope in ("block", "model")
    ]
    assert numbers["machine"]["threads"] == 1
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + len(rows)
    shown = [line for line in result.stdout.splitlines() if line.split()[:2] == ["fp32", "ff"]]
    assert len(shown) == 2 and f"{rows[-1]['speedup']:.2f}x" in shown[1]
    assert "%|" not in result.stdout  # the progress bar is on stderr


def test_bench_machine_shows_every_number_of_threads(monkeypatch):
    measured = staticmethod(lambda threads: roofline.Roofline(threads, 19.04 * threads, 80.4 * threads))
    monkeypatch.setattr(roofline.Roofline, "measure", measured)
    result = call("bench", "machine")
    assert result.exit_code == 0, result.output
    rows = [line.strip("│").split("│") for line in result.output.splitlines() if line.startswith("│")]
    threads = [int(row[0]) for row in rows]
    assert threads[0] == 1 and threads[-1] == usable_threads()
    assert [float(row[1]) for row in rows] == pytest.approx([19.04 * n for n in threads], abs=0.05)
    assert [float(row[2]) for row in rows] == pytest.approx([80.4 * n for n in threads], abs=0.5)


def test_decode_says_what_it_made_and_how_fast_it_was(little_memory):
    result = call("decode", "--preset", "smoke", "--variant", "ff_qkv", "--tokens", "3", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert f"{count_parameters(preset('smoke', 'ff_qkv')):,} weights" in result.stdout
    for unit in ("tokens/s", "ms a token", "3 tokens", "GB/s", "% of the limit", "GB of memory"):
        assert unit in result.stdout


def test_decode_reads_a_packed_file(little_memory, tmp_path):
    packed = pack_random(preset("smoke"), seed=1)
    packed.save(tmp_path / "model.safetensors")
    result = call("decode", "--packed", str(tmp_path / "model.safetensors"), "--tokens", "2", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert f"{count_parameters(preset('smoke')):,} weights" in result.stdout


def test_what_does_not_fit_is_refused_with_the_numbers_in_one_line(little_memory, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2 * 10**9}))
    result = call("decode", "--preset", "paper_17b", "--dtype", "int8")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "16.0 GB" in result.stderr and "1.5 GB are free" in result.stderr
    smaller = call("decode", "--preset", "paper_17b", "--dtype", "int8", "--no-encoder")
    assert "8.7 GB" in smaller.stderr


def test_reference_passes_on_the_exit_code_of_the_checker(tmp_path):
    assert call("reference", str(tmp_path)).exit_code == 1  # nothing to compare
