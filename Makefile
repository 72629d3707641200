# Everything a newcomer needs. Wants Python 3.11 or newer and nothing else; all that is installed lands in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

MODEL ?= demo
WORKERS ?= 2
PORT ?= 8000
ARGS ?=

CODE := api benchmarks comm deploy elastic tests worker

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format types imports check bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is what makes the second run quick: pip runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml setup.py constraints.txt worker/kernels/gemm.cpp
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "moeray needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(STAMP)  ## Make .venv and install (again only if what is to be installed changed)

serve: setup  ## Serve the demo model with two workers (MODEL=, WORKERS=, PORT=, ARGS="--api-key ...")
	@$(BIN)/moeray serve $(MODEL) --workers $(WORKERS) --port $(PORT) $(ARGS)

test: setup  ## Run all tests (ARGS="-k name -x")
	$(BIN)/python -m tests.run $(ARGS)

lint: setup  ## Style and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: setup  ## Repair what can be repaired by machine
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: setup  ## Static types, strict
	$(BIN)/mypy

imports: setup  ## Imports go one way: deploy -> api -> worker, elastic -> comm
	PYTHONPATH=src $(BIN)/lint-imports

check: lint types imports test  ## All of the above

bench: setup  ## Measure a running server (ARGS="--concurrency 8 ...", see benchmarks/)
	$(BIN)/python benchmarks/serve.py $(ARGS)

clean:  ## Remove caches and the virtual environment
	rm -rf $(VENV) build dist worker/kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
