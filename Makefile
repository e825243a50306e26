# The same targets for people and for CI. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-all check fix bench bench-all docs docs-serve clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: .venv/.installed ## Train a policy in minutes, evaluate it and write a report; run again to resume
	@$(BIN)/slipstream train preset=quick name=demo resume=auto
	@echo
	@echo "Next steps:"
	@echo "  . .venv/bin/activate                      # puts slipstream on the PATH of this shell"
	@echo "  slipstream report runs/demo --open        # watch the flights"
	@echo "  slipstream eval runs/demo --shield        # evaluate in other conditions"
	@echo "  slipstream train resume=demo max_frame_num=3.2e6    # train for longer"
	@echo "  tensorboard --logdir runs                 # curves"
	@echo "  wandb sync runs/demo/wandb/offline-run-*  # upload to Weights & Biases"

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

BENCHES := codecs checkpoint objects rollout replay datasets train processes remote

bench: .venv/.bench ## Run short benchmarks and update docs/benchmarks.md
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py --quick --write docs/benchmarks.md || exit 1; done
	@# needs root and network namespaces
	-$(BIN)/python bench/remote_link.py --quick --write docs/benchmarks.md
	$(BIN)/python bench/readme.py

bench-all: .venv/.bench ## Run the full benchmarks; takes most of an hour
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py --write docs/benchmarks.md || exit 1; done
	-$(BIN)/python bench/remote_link.py --write docs/benchmarks.md
	$(BIN)/python bench/readme.py

docs: .venv/.docs ## Build the documentation into site/; open site/index.html
	$(BIN)/mkdocs build --strict

docs-serve: .venv/.docs ## Show the documentation at 127.0.0.1:8000, rebuilt when a page changes
	$(BIN)/mkdocs serve

clean: ## Delete everything that these targets created
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Where the system's Python has no ensurepip, the outer pip installs into the virtual environment.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "slipstream needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Creating .venv"
	@$(PYTHON) -m venv .venv > /dev/null 2>&1 || $(PYTHON) -m venv --without-pip .venv

# More options for pip, such as PIP_ARGS=--no-cache-dir or PIP_ARGS='--index-url URL'.
PIP_ARGS ?=
PIP_INSTALL = $(shell [ -x $(BIN)/pip ] && echo $(BIN)/python -m pip || echo $(PYTHON) -m pip --python $(BIN)/python) \
	install --disable-pip-version-check $(PIP_ARGS)

# Links the torch that $(PYTHON) has, if it is 2.5 or newer, and what it depends on, into .venv/torch. Prints its version.
# Links to everything would hide programs such as ruff from pip, which .venv/bin must contain.
define LINK_TORCH
import os, re, sys
from importlib.metadata import distributions
from pathlib import Path

folder = Path(".venv/torch").absolute()
installed = {re.sub("[-_.]+", "-", one.name).lower(): one for one in reversed(list(distributions())) if one.files}
version = installed["torch"].version.partition("+")[0] if "torch" in installed else "0.0"
if sys.prefix == os.path.realpath(".venv") or tuple(map(int, version.split(".")[:2])) < (2, 5):
    sys.exit()
names = ["torch"]
for name in names:
    for file in installed[name].files:
        link = folder / file.parts[0]
        if file.parts[0] not in ("..", "__pycache__") and not link.is_symlink():
            folder.mkdir(exist_ok=True)
            link.symlink_to(Path(installed[name].locate_file(file.parts[0])).absolute())
    for text in installed[name].requires or []:
        needed = re.sub("[-_.]+", "-", re.match(r"[\w.-]+", text)[0]).lower()
        if needed in installed and needed not in names and "extra ==" not in text:
            names.append(needed)
for packages in Path(".venv/lib").glob("python*/site-packages"):
    (packages / "installed_torch.pth").write_text(f"{folder}\n")
print(version)
endef
export LINK_TORCH

MOTO_PIP_INSTALL = $(shell [ -x $(BIN)/pip ] && echo $(BIN)/python || echo $(PYTHON)) -m pip --python .venv/moto/bin/python \
	install -qq --disable-pip-version-check

.venv/.installed: requirements.txt pyproject.toml | .venv/bin/python
	@set -e; \
	torch=$$($(PYTHON) -c "$$LINK_TORCH"); \
	cp requirements.txt .venv/requirements.txt; \
	if [ -n "$$torch" ]; then \
		echo "Using the installed torch $$torch"; \
		sed "s/^torch==.*/torch==$$torch/" requirements.txt > .venv/requirements.txt; \
		echo "Installing into .venv; the first time, this downloads up to 0.4 GB"; \
	else \
		echo "Installing into .venv; the first time, this downloads about 0.6 GB if pip finds a torch for CPUs only."; \
		echo "The torch of the default index has CUDA on Linux, which is 3 GB more: without a GPU, choose the index of the"; \
		echo "CPU builds (pytorch.org lists it) with make PIP_ARGS='--extra-index-url URL', or install torch beforehand."; \
	fi
	@$(PIP_INSTALL) -r .venv/requirements.txt
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
