#!/usr/bin/env bash
# All checks, called by `make test` with .venv/bin first on the PATH. Stops at the first that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/_build/test
rm -rf "$work" && mkdir -p "$work"
trap 'echo "make test: FAILED in step \"$current\" after $SECONDS s" >&2' ERR

step() {
    current=$1
    echo "[$1] ($SECONDS s so far)"
}

step "1/6 lint: ruff"
ruff check --quiet .
ruff format --check --quiet . || { echo "not formatted: run .venv/bin/ruff format" >&2; false; }

step "2/6 types: mypy"
mypy

step "3/6 environment.yml agrees with pyproject.toml"
make --no-print-directory conda-file FILE="$work/environment.yml"
diff -u environment.yml "$work/environment.yml" || { echo "run: make environment" >&2; false; }

step "4/6 unit tests: pytest"
pytest -q -n 2

step "5/6 notebooks: fit to publish, and run at profile smoke"
sparselib notebooks lint
# One thread for each of two kernels, here and below, so that both see the same arithmetic.
export OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 SPARSELIB_RESULTS="$work/data/results"
sparselib notebooks run --profile smoke --output "$work"

step "6/6 notebooks: run again, the same outputs"
pytest -q --nbval --nbval-current-env -n 2 --dist loadfile -p no:cacheprovider "$work/notebooks"

echo "make test: all checks passed in $((SECONDS / 60)) min $((SECONDS % 60)) s."
echo "The notebooks as run at profile smoke are in _build/test/notebooks; \`make book\` builds the book."
