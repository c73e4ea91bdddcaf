# Every target sets up what it needs from nothing and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-full check format docs build matrix clean help
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("onefold needs Python 3.11 or newer; set PYTHON=... to one") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# laplace-torch comes without its dependencies: it lists torchvision, which it does not need.
# The pinned torch comes first and alone: left to the resolver, it may bring gigabytes of CUDA packages.
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.core
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps laplace-torch backpack-for-pytorch curvlinops-for-pytorch
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.core
	$(PIP) -e ".[docs]"
	@touch $@

demo: $(VENV)/.core  ## fit on embedded data, print a table, write out/demo/index.html
	$(BIN)/onefold demo --out out/demo

test: $(VENV)/.dev  ## what CI runs
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-full: $(VENV)/.dev  ## adds the long and the heavy
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(MAKE) test

format: $(VENV)/.dev  ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs  ## the site, in out/site; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --site-dir out/site

build: $(VENV)/.dev  ## a wheel and an sdist, in dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

matrix: $(BIN)/python  ## Python 3.11 and 3.12, lowest and newest dependencies: what runs here; gigabytes, an hour or more
	$(BIN)/python tools/matrix.py $(MATRIX)

clean:  ## remove what the targets made
	rm -rf $(VENV) out dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
