# Every target installs what it needs on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-full lint check format docs paper build matrix clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("onefold needs Python 3.11 or newer; set PYTHON=... to one") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# laplace-torch is installed without its dependencies: it lists torchvision, which it does not need. torchrl lists an
# older tensordict; only a guide uses it.
# The pinned torch is installed first, because the resolver may choose one with gigabytes of CUDA packages.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.core
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps laplace-torch backpack-for-pytorch curvlinops-for-pytorch torchrl
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.core
	$(PIP) -e ".[docs]"
	@touch $@

demo: $(VENV)/.core  ## a detector on a small classifier of digits; writes out/demo/index.html
	$(BIN)/onefold demo --out out/demo

test: $(VENV)/.dev  ## the tests of CI
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-full: $(VENV)/.dev  ## all tests, with the slow ones
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

check: lint test  ## lint and tests

format: $(VENV)/.dev  ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## the site in out/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --site-dir out/site

paper: $(VENV)/.core  ## rebuild all published tables and figures; fails if one differs
	$(BIN)/python benchmarks/paper.py

build: $(VENV)/.dev  ## a wheel and an sdist in dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

matrix: $(BIN)/python  ## tests on Python 3.11 and 3.12 with lowest and newest dependencies; gigabytes, an hour or more
	$(BIN)/python tools/matrix.py $(MATRIX)

clean:  ## remove everything that the targets make
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
