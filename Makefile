# Every target sets up what it needs in virtual environments inside the checkout, so a fresh
# clone, Python 3.10 or newer and make are enough. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# Else the checkout, or another project, could be imported in place of what is installed.
unexport PYTHONPATH

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WHEEL_VENV := $(VENV)-wheel
OLDEST_VENV := $(VENV)-oldest

# A new version makes a new stamp, since an editable install keeps the version it was made with.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' sb3_per/__init__.py)
INSTALLED := $(VENV)/.installed-$(VERSION)
BENCH_INSTALLED := $(VENV)/.bench-$(VERSION)

# Errors only: a normal installation prints nothing.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-input

# One thread a worker: the models in the tests are too small for more.
PYTEST_FLAGS ?= --numprocesses=auto --maxprocesses=4
export OMP_NUM_THREADS ?= 1
FAST := -m "not slow" $(PYTEST_FLAGS)

# The lower bounds in pyproject.toml (a test compares them), then what goes with them. The other
# packages keep their pins; torch too, for the size of its older releases.
OLDEST := filelock==3.13 gymnasium==0.29.1 jinja2==3.1 joblib==1.4 matplotlib==3.7 numba==0.59 \
	numpy==1.24.1 pandas==2.0 pyarrow==14 pyyaml==6.0 rich==13 sb3-contrib==2.7 scipy==1.11 \
	stable-baselines3==2.7 tensorboard==2.18 tqdm==4.64 tyro==0.9.1 contourpy==1.1 llvmlite==0.42

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) --version || echo 'not there')." \
		"Name another one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; } >&2
@$(PYTHON) -m venv $(1)
endef

.PHONY: help install format lint type test test-all test-oldest bench demo wheel wheel-test \
	commit-checks constraints clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv: the package (editable), its extras and the tools, pinned

$(INSTALLED): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	@echo "Installing into $(VENV) (about two minutes the first time)"
	@rm -f $(VENV)/.installed-*
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

format: $(INSTALLED) ## Format the code and apply ruff's safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(INSTALLED) ## Check style and formatting; fails on any finding
	$(BIN)/ruff check
	$(BIN)/ruff format --check

type: $(INSTALLED) ## Check types with mypy --strict
	$(BIN)/mypy

test: $(INSTALLED) ## Run the fast tests
	$(BIN)/pytest $(FAST)

test-all: $(INSTALLED) ## Run all tests, the statistical and learning runs too
	$(BIN)/pytest $(PYTEST_FLAGS)

# Old releases use what newer ones of their own dependencies deprecate: such warnings, and only
# those, don't fail here.
test-oldest: ## Run the fast tests on the oldest dependencies allowed (Python 3.10 or 3.11)
	$(call make_venv,$(OLDEST_VENV))
	@$(OLDEST_VENV)/bin/python $(PIP_INSTALL) $(OLDEST) -e '.[tests]' \
		-c <(grep -vFf <(printf '%s\n' $(OLDEST) | sed 's/==.*/==/') constraints.txt)
	$(OLDEST_VENV)/bin/pytest $(FAST) -W default::DeprecationWarning \
		-W default::PendingDeprecationWarning -W default::FutureWarning

$(BENCH_INSTALLED): $(INSTALLED)
	@rm -f $(VENV)/.bench-*
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,bench]'
	@touch $@

bench: $(BENCH_INSTALLED) ## Time everything against its peers; WRITE=--write renews docs/performance.md
	$(BIN)/python -m benchmarks.run $(WRITE)

demo: $(INSTALLED) ## Compare uniform and prioritized replay on a small budget (a few minutes)
	@rm -rf demo
	$(BIN)/sb3-per compare --quick --output demo

wheel: $(INSTALLED) ## Build the wheel into dist/
	@rm -rf dist
	$(BIN)/python -m build --no-isolation --wheel

# The tests run from a copy without the sources of the wheel, so that only the wheel can be
# imported; what is not in it (the studies, say) is found in the copy.
wheel-test: wheel ## Run the fast tests against the wheel in an environment of its own
	@rm -rf $(WHEEL_VENV)
	$(call make_venv,$(WHEEL_VENV))
	@$(WHEEL_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt "$$(echo dist/*.whl)[tests]"
	@pytest="$$(realpath $(WHEEL_VENV))/bin/pytest"; copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; \
	tar -c --exclude='./.[!.]*' --exclude=./sb3_per --exclude=./envs . | tar -x -C "$$copy"; \
	cd "$$copy"; set -x; PYTHONPATH="$$copy" "$$pytest" $(FAST)

commit-checks: format lint type test ## What to run before a commit

constraints: ## Renew constraints.txt; torch keeps its version (needs uv)
	pins=$$(uv pip compile --quiet --universal --python-version 3.10 --extra dev --extra bench --extra dask --upgrade \
		--no-header --no-annotate -c <(grep '^torch==' constraints.txt) pyproject.toml); \
	{ sed '/^$$/q' constraints.txt; grep -vE '^(cuda|nvidia|triton)' <<< "$$pins"; } > constraints.new; \
	mv constraints.new constraints.txt

clean: ## Remove environments, builds and caches
	rm -rf $(VENV) $(WHEEL_VENV) $(OLDEST_VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
