# `make demo` and `make test` do all of their own set-up; the rest assumes nothing either.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types imports pytest test-slow test-gpu docs notebooks site bench bench-gpu sanitize clean

demo: $(READY)
	$(BIN)/buttress demo

test: lint types imports pytest

lint: $(READY)
	$(BIN)/ruff format --check src tests examples benchmarks docs
	$(BIN)/ruff check src tests examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

pytest: $(READY)
	$(BIN)/pytest -m "not slow and not gpu"

test-slow: $(READY)
	$(BIN)/pytest -m slow

docs: $(READY)
	$(BIN)/python docs/generate.py --figures

# Checks every architecture of the compatibility matrix again, and writes its record and its page.
compatibility: $(READY)
	$(BIN)/python docs/generate.py --compatibility

notebooks: $(READY)
	$(BIN)/python docs/generate.py --notebooks

# Warnings are errors; nothing is fetched, and the pages open from the file system: docs/_build/html/index.html
site: $(READY)
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/gpt2.py

sanitize: $(READY)
	compute-sanitizer --error-exitcode 1 $(BIN)/pytest -n 0 tests/ops/fused/test_kernels.py -k "any_number_of_tokens or piece_by_piece"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "buttress needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: with it in place nothing below looks for another build of it.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build
