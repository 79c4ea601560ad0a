"""Where the repository's files lie. Everything is found from here, never from the current directory."""

from __future__ import annotations

import os
from pathlib import Path


def repository() -> Path:
    """The root of the repository that this package is part of.

    Errors: FileNotFoundError if the package was installed without the repository (notebooks, corpora, book).
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file() or not (root / "data").is_dir():
        raise FileNotFoundError(
            f"sparselib is installed without its repository (looked in {root}). Notebooks, corpora and the book "
            "are only in a clone: clone the repository and run `make setup`, or `pip install -e .` in it."
        )
    return root


def notebooks_dir() -> Path:
    """The committed notebooks, NN_name.ipynb."""
    return repository() / "notebooks"


def corpora_dir() -> Path:
    """The texts, with their licences and checksums."""
    return repository() / "data" / "corpora"


def results_dir() -> Path:
    """Where tables are written: $SPARSELIB_RESULTS, or data/results of the repository."""
    chosen = os.environ.get("SPARSELIB_RESULTS")
    return Path(chosen).resolve() if chosen else repository() / "data" / "results"


def runs_dir() -> Path:
    """Where recorded trainings lie: $SPARSELIB_RUNS, or data/runs of the repository."""
    chosen = os.environ.get("SPARSELIB_RUNS")
    return Path(chosen).resolve() if chosen else repository() / "data" / "runs"
