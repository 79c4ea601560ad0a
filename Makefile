# On a machine with Python 3.11+, make and git, every target below does all the set-up it needs.
#
# Variables, given as `make book PROFILE=smoke`:
#   PROFILE      size of every experiment: smoke (seconds), laptop (the default), paper (GPUs and hub data)
#   PYTHON       the Python that makes .venv, if `python3` is older than 3.11
#   TORCH_INDEX  address of one more package index, to choose the build of torch. PyTorch's installation page
#                gives one for CPU and one for each CUDA version. Without it pip takes the build that its own
#                settings offer: on Linux the CUDA build unless a CPU build is on offer, elsewhere the CPU build.
#   TORCH        requirement in place of the locked torch, such as TORCH='torch==2.13.0+cpu'; needed, too, to
#                change the build of torch in a .venv that has one

PROFILE ?= laptop
PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
LOCK_TORCH ?= torch==2.13.0  # what `make lock` takes: the lock names one version and no build

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up

.DEFAULT_GOAL := help
.PHONY: help setup book test lab refresh peers lock environment clean python conda-file FORCE

help:  ## this list
	@echo "usage: make TARGET [PROFILE=smoke|laptop|paper]"
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  \1\t/' | expand -t 16

setup: $(STAMP)  ## make .venv and install the locked packages (the other targets call it)
	@echo "Ready: $(BIN)/python"

book: $(STAMP)  ## run the notebooks and build the book into _build/html
	@$(BIN)/sparselib book --profile $(PROFILE)

test: $(STAMP)  ## lint, types, unit tests, notebook checks
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/test.sh

lab: $(STAMP)  ## JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir=notebooks

refresh: $(STAMP)  ## run the notebooks and write them and data/results back into the repository
	@$(BIN)/sparselib notebooks refresh

peers: $(STAMP)  ## install what notebook 07 compares with; llama.cpp is compiled, which takes ten minutes
	@$(BIN)/python -m pip install -e '.[peers]'

lock: python  ## requirements.lock: the newest versions that fit pyproject.toml
	@$(PYTHON) tools/lock.py '$(strip $(LOCK_TORCH))'

environment: $(STAMP)  ## environment.yml (conda, Binder) from pyproject.toml
	@$(MAKE) --no-print-directory conda-file FILE=environment.yml
	@echo "environment.yml written"

conda-file:
	@$(BIN)/pyproject2conda yaml --extra book --extra test --name sparselib --channel conda-forge \
	  --python-include infer --req '-e .' --custom-command 'make environment' --output $(FILE)

clean:  ## remove the built book and caches (.venv stays)
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

python:
	@command -v '$(PYTHON)' >/dev/null || { echo "Python is missing: no '$(PYTHON)' on the PATH. \
	Install Python 3.11 or newer, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; \
	'$(PYTHON)' is `$(PYTHON) -V 2>&1`. Name a newer one: make setup PYTHON=python3.12" >&2; exit 1; }

# A torch named on the command line is installed even when the set-up is otherwise done.
ifneq ($(TORCH)$(TORCH_INDEX),)
$(STAMP): FORCE
endif

$(STAMP): requirements.lock pyproject.toml
	@$(MAKE) --no-print-directory python
	@$(PYTHON) tools/setup_venv.py '$(TORCH)' '$(TORCH_INDEX)'
	@touch $@

FORCE:
