# `make demo` and `make test` do all of their own set-up; the rest assumes nothing either.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types imports pytest test-slow test-gpu test-versions test-lowest test-newest docs compatibility notebooks site bench bench-gpu trial-gpu sanitize fuzz mutants dist clean

demo: $(READY)
	$(BIN)/buttress demo

test: lint types imports pytest

lint: $(READY)
	$(BIN)/ruff format --check src tests fuzz mutants examples benchmarks docs
	$(BIN)/ruff check src tests fuzz mutants examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

pytest: $(READY)
	$(BIN)/pytest -m "not slow and not gpu"

test-slow: $(READY)
	$(BIN)/pytest -m slow

# At most 20 minutes; `make fuzz AREA=plans SEED=1`, and `make fuzz AREA=plans CASE=123` to repeat one case.
fuzz: $(READY)
	$(BIN)/python -m fuzz $(AREA) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

# About 40 minutes on two cores; `make mutants AREA=core`. What has an outcome in results/mutants.csv is not repeated.
mutants: $(READY)
	$(BIN)/python -m mutants $(AREA)

# The lowest versions that pyproject.toml allows and the newest that pip finds, each in an environment of its own.
VERSIONED_TESTS := tests/integrations tests/surgery tests/compression tests/nn tests/optim tests/costs \
	tests/compatibility tests/test_docs_compatibility.py

test-versions: test-lowest test-newest

test-lowest test-newest: test-%: .venv-%/.ready
	.venv-$*/bin/pytest -m "not slow and not gpu" $(VERSIONED_TESTS)

.venv-lowest/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet packaging
	cd docs && ../.venv-lowest/bin/python -m generation.versions torch transformers timm > ../.venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet -c .venv-lowest/constraints.txt torch torchvision
	.venv-lowest/bin/python -m pip install --quiet -c .venv-lowest/constraints.txt -e '.[dev]'
	touch $@

.venv-newest/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade torch torchvision
	.venv-newest/bin/python -m pip install --quiet --upgrade -e '.[dev]'
	touch $@

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

# Says why tests were skipped: without cuda-core, those of the on-chip kernels are. Compiling takes most of the time.
test-gpu: $(READY)
	$(BIN)/pytest -m gpu -rs -n 8 --dist load

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/gpt2.py
	$(BIN)/python benchmarks/step.py

# The on-chip kernels with many launch options, next to the Triton kernels, and the bandwidth between multiprocessors.
trial-gpu: $(READY)
	$(BIN)/python benchmarks/on_chip.py
	$(BIN)/python benchmarks/cluster_bandwidth.py

sanitize: $(READY)
	compute-sanitizer --error-exitcode 1 $(BIN)/pytest -n 0 tests/ops/fused/test_kernels.py -k "any_number_of_tokens or piece_by_piece"
	for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/pytest -n 0 tests/ops/fused/test_on_chip_gpu.py -k "(any_number_of_tokens and not 32768) or 520" \
			|| exit 1; \
	done

# Builds the wheel and the sdist, checks their metadata, and runs the demo from the wheel in an empty environment,
# outside the checkout.
dist: $(READY)
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt torch numpy
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[lab]"
	folder=$$(mktemp -d) && cd $$folder && $(CURDIR)/.venv-dist/bin/buttress --version \
		&& $(CURDIR)/.venv-dist/bin/buttress demo && rm -r $$folder
	rm -rf .venv-dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "buttress needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: with it in place nothing below looks for another build of it.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-dist .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build
