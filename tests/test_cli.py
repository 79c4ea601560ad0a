"""The command line: complete help, numbers equal to the package's, bad input in one line and exit code 2."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sparselib import __version__, notebooks
from sparselib.cli import app
from sparselib.config import PRESETS, VARIANTS, count_parameters, decode_cost, preset


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def test_version():
    assert call("--version").output == f"sparselib {__version__}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["presets", "cost", "notebooks", "book", "reference", "--version"]),
        (["cost"], ["--preset", "--variant", "--context", "--json"]),
        (["notebooks"], ["run", "lint", "refresh"]),
        (["notebooks", "run"], ["[names]", "--profile", "--parameter", "-p", "--output"]),
        (["notebooks", "lint"], ["[folder]", "--profile"]),
        (["book"], ["--profile"]),
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


def test_reference_passes_on_the_exit_code_of_the_checker(tmp_path):
    assert call("reference", str(tmp_path)).exit_code == 1  # nothing to compare
