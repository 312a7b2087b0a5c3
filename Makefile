# Two commands do everything on a fresh machine with Python 3.11 or later: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint docs clean

demo: $(VENV)/installed
	$(BIN)/aidgn demo

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/installed lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site
