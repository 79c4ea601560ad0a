"""What a newcomer installs: the lock, the set-up and its messages, a light package that finds its files."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sparselib
from sparselib import paths

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]


@pytest.fixture
def setup_venv(tmp_path, monkeypatch):
    """tools/setup_venv.py as a module that runs this Python's pip and writes its log to a temporary folder."""
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    return module


def test_the_lock_is_exact_and_names_no_place():
    for line in LOCK:
        (specifier,) = Requirement(line).specifier
        assert specifier.operator == "==" and "+" not in specifier.version
        assert Requirement(line).url is None


def test_the_lock_satisfies_pyproject():
    locked = {Requirement(line).name: next(iter(Requirement(line).specifier)).version for line in LOCK}
    extras = PROJECT["optional-dependencies"]
    for text in PROJECT["dependencies"] + extras["book"] + extras["test"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(locked[wanted.name.lower()]), text


def test_version_and_command_are_installed():
    assert importlib.metadata.version("sparselib") == sparselib.__version__ == PROJECT["version"]
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="sparselib")
    assert script.value == "sparselib.cli:app"


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, sparselib; print(*{'torch', 'numpy', 'pandas', 'numba'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSELIB_RESULTS", raising=False)
    assert paths.repository() == ROOT
    assert paths.notebooks_dir() == ROOT / "notebooks"
    assert paths.corpora_dir() == ROOT / "data" / "corpora"
    assert paths.results_dir() == ROOT / "data" / "results"
    monkeypatch.setenv("SPARSELIB_RESULTS", "elsewhere")
    assert paths.results_dir() == tmp_path / "elsewhere"


def test_a_package_without_its_repository_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages" / "sparselib" / "paths.py"))
    with pytest.raises(FileNotFoundError, match="clone the repository"):
        paths.repository()


@pytest.mark.parametrize("index", ["http://127.0.0.1:9/simple", "http://no-such-host.invalid/simple"])
def test_no_network_is_told_in_words(setup_venv, monkeypatch, index):
    """A real pip, and a package index on a port where nobody listens, or without an address."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index)
    with pytest.raises(SystemExit, match="no network.*while asking for one small package") as stop:
        setup_venv.pip(setup_venv.PROBING, "download", "six==1.17.0", "--no-deps", "--retries", "1", "--no-cache-dir")
    assert "Traceback" not in str(stop.value)


def test_other_failures_of_pip_are_not_called_a_missing_network(setup_venv):
    with pytest.raises(SystemExit, match="installing:\nERROR: No matching distribution"):
        setup_venv.explain(
            "installing", "Collecting async-timeout\nERROR: No matching distribution found for nothing\n"
        )


@pytest.mark.parametrize(
    ("python", "message"), [("exit 1", "Python 3.11 or newer is needed"), (None, "no .* on the PATH")]
)
def test_an_old_or_missing_python_is_told_in_words(tmp_path, python, message):
    program = tmp_path / "python3"
    if python:
        program.write_text(f"#!/bin/sh\n{python}\n")
        program.chmod(0o755)
    run = subprocess.run(["make", "-C", ROOT, "python", f"PYTHON={program}"], capture_output=True, text=True)
    assert run.returncode != 0
    assert re.search(message, run.stderr)


def test_help_lists_every_target():
    run = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True)
    for target in ("setup", "book", "test", "lab", "refresh", "lock", "environment", "clean"):
        assert f"\n  {target} " in run.stdout
