# The same targets for people and for CI. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-all check fix bench bench-all docs clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: .venv/.installed ## Train a policy in minutes, evaluate it and write a report; run again to resume
	@$(BIN)/slipstream train preset=quick name=demo resume=auto

test: .venv/.installed .venv/.moto ## Run the tests
	$(BIN)/python -m pytest -n auto --dist loadfile

test-all: .venv/.installed .venv/.moto ## Run all tests, including the long ones
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow or not slow"

check: .venv/.installed ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: .venv/.installed ## Apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.style

BENCHES := codecs checkpoint objects rollout replay datasets train processes

bench: .venv/.bench ## Run short benchmarks and update docs/benchmarks.md
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py --quick --write docs/benchmarks.md || exit 1; done
	$(BIN)/python bench/readme.py

bench-all: .venv/.bench ## Run the full benchmarks; takes most of an hour
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py --write docs/benchmarks.md || exit 1; done
	$(BIN)/python bench/readme.py

docs: .venv/.docs ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## Delete everything that these targets created
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where the system's Python has no ensurepip, the outer pip installs into the virtual environment.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slipstream needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Creating .venv"
	@$(PYTHON) -m venv .venv > /dev/null 2>&1 || $(PYTHON) -m venv --without-pip .venv

PIP_INSTALL = $(shell [ -x $(BIN)/pip ] && echo $(BIN)/python -m pip || echo $(PYTHON) -m pip --python $(BIN)/python) \
	install -qq --disable-pip-version-check

MOTO_PIP_INSTALL = $(shell [ -x $(BIN)/pip ] && echo $(BIN)/python || echo $(PYTHON)) -m pip --python .venv/moto/bin/python \
	install -qq --disable-pip-version-check

.venv/.installed: requirements.txt pyproject.toml | .venv/bin/python
	@echo "Installing into .venv; this takes a few minutes the first time"
	@$(PIP_INSTALL) -r requirements.txt
	@$(PIP_INSTALL) --no-deps --editable .
	@touch $@

# An S3 server for the tests of object stores. It needs another antlr4 than Hydra, so it has a separate environment.
.venv/.moto: | .venv/.installed
	@echo "Installing an S3 server for the tests"
	@$(BIN)/python -m venv --without-pip .venv/moto
	@$(MOTO_PIP_INSTALL) 'moto[server]>=5.1' || echo "moto cannot be installed; tests that need an S3 server are skipped"
	@touch $@

.venv/.bench .venv/.docs: .venv/.%: pyproject.toml | .venv/.installed
	@echo "Installing the dependencies of 'make $*'"
	@$(PIP_INSTALL) --editable '.[$*]'
	@# robomimic without its simulator dependencies, which would have to be compiled
	@[ $* != bench ] || $(PIP_INSTALL) --no-deps robomimic || echo "robomimic cannot be installed; its benchmarks are skipped"
	@touch $@
