## make demo    the sample job, whole, with the accuracy of its answers
## make test    the test suite (make test-slow, make test-nightly: all of it, with more cases)
## make docs    the documentation as a site, in build/site
## make reference  docs/reference/commands.md, made again from the options
## make plotly  the charts' library in batchgen/report/plotly, built again (needs node)
## make lint    ruff, mypy, import-linter
## make clean   away with .venv and everything made here
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := build/demo
# Test processes: one for each core that this process may use, and no more than eight (each imports torch).
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))')
# Bytecode is written even where PYTHONDONTWRITEBYTECODE is set: tests start many processes that import the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# Empty: the newest versions that pyproject.toml allows.
CONSTRAINTS ?= -c constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) $(PIP_ARGS)

define SHOW_ROWS
import itertools, json, sys
for line in itertools.islice(open(sys.argv[1], encoding="utf-8"), 6):
    row = json.loads(line)
    end = " ".join(row["prompt"].split("\n\n")[-1].split())
    print(f"  {row['id']:<14} {end[-84:]:<84} {(row['text'] or '')[:40]!r}")
endef
export SHOW_ROWS

.PHONY: help install dev demo test test-slow test-nightly docs reference plotly lint format dist clean

help:
	@sed -n 's/^## //p' Makefile

# Everything is installed once into .venv, at the versions of constraints.txt.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchgen needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# What only tests of `make test-slow` need.
$(VENV)/.installed-slow: $(VENV)/.installed-dev
	$(PIP_INSTALL) -e '.[dev,ray,lm-eval,slow-tests]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	@mkdir -p $(DEMO)
	$(BIN)/batchgen run sample_data/prompts.jsonl --model sample_data/model -o $(DEMO)/completions.jsonl --overwrite
	@echo; echo "the first rows of $(DEMO)/completions.jsonl, and the end of their prompts:"; $(BIN)/python -c "$$SHOW_ROWS" $(DEMO)/completions.jsonl; echo
	$(BIN)/python sample_data/check_answers.py $(DEMO)/completions.jsonl

test: $(VENV)/.installed-dev
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-slow
	BATCHGEN_TESTS=full $(PYTEST) -m "not nightly and not gpu and not network" $(PYTEST_ARGS)

test-nightly: $(VENV)/.installed-slow
	BATCHGEN_TESTS=full $(PYTEST) -m "not gpu and not network" $(PYTEST_ARGS)

reference: $(VENV)/.installed
	$(BIN)/python docs/make_command_reference.py > docs/reference/commands.md

plotly:
	npm install --prefix build/plotly --ignore-scripts --no-audit --no-fund plotly.js@4.1.1 esbuild@0.25.0
	NODE_MODULES=build/plotly/node_modules node batchgen/report/plotly/build.mjs

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/.installed-dev
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
