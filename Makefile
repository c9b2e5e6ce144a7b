# Everything runs from a fresh clone: each target first makes what it needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint bench services
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(shell command -v $(PYTHON) || command -v python3) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[shadow,postgres,demo,dev]'
	$(BIN)/pip install --quiet --no-deps specforge==0.2.0  # its readers of settings and rows need no GPU
	touch $@

demo: setup  ## the whole loop on this machine; options: make demo DEMO="--seed 3 --keep"
	$(BIN)/driftwatch demo $(DEMO)

test: setup services
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile $(TEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/pytest tests/benchmarks --override-ini testpaths=tests/benchmarks -s

services:  # what the tests start for real: PostgreSQL, Prometheus, Alertmanager, Chromium, kubectl
	@.ci/services
