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
	touch $@

demo: setup  ## the whole loop on this machine; options: make demo DEMO="--seed 3 --keep"
	$(BIN)/driftwatch demo $(DEMO)

test: setup services
	$(BIN)/pytest $(TEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/pytest tests/benchmarks --override-ini testpaths=tests/benchmarks -s

services:  # PostgreSQL and promtool, which the tests run for real
	@.ci/services
