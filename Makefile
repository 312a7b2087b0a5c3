# Two commands do everything on a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest

.PHONY: demo test test-all test-oldest test-attack coverage lint hooks docs dist clean

demo: $(VENV)/installed
	$(BIN)/aidgn demo
	@echo "The command is $(BIN)/aidgn; after '. $(BIN)/activate' it is aidgn."

test: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/installed-dev lint
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(MAKE) test-oldest

# The oldest versions that pyproject.toml allows, on the oldest Python.
test-oldest: $(OLDEST)/installed
	AIDGN_TEST_OLDEST=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

# Attacks on files, processes and servers; writes how many were tried and survived into the documentation.
test-attack: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m attack --attacks=docs/reliability.md

# Open htmlcov/index.html to see which lines no test reaches.
coverage: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=term --cov-report=html

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy

# The same checks before every commit.
hooks: $(VENV)/installed-dev
	$(BIN)/pre-commit install

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The wheel and the source archive, checked and installed in a new environment.
dist: $(VENV)/installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv dist/check
	dist/check/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	dist/check/bin/aidgn --version

# What a user needs; PyTorch is large, so that this takes minutes the first time.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[onnx,serve]"
	touch $@

$(VENV)/installed-dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(VENV)/installed $@

# uv has a small environment, so that the large one for development is not needed.
$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)-uv
	$(OLDEST)-uv/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.13"
	$(OLDEST)-uv/bin/uv venv --quiet --allow-existing --python 3.11 $(OLDEST)
	$(OLDEST)-uv/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(OLDEST)-uv build dist site htmlcov .coverage
