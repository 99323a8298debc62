# `make demo` and `make test` go from a fresh clone to the result.
PYTHON    ?= python3
VENV      ?= .venv
PIP_FLAGS ?=
EXTRAS    ?= dev,zarr,slides,train,encoders,viewer,ray
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed

.PHONY: help demo test lint bench clean

help:
	@echo "make demo    install, then explain bags of digits and draw the result"
	@echo "make test    lint, types, import layers, tests with doctests and coverage"
	@echo "make lint    the first three of these"
	@echo "make bench   measure speed and memory (ratios within one run)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

demo: $(STAMP)
	$(BIN)/xmil demo --out demo-out

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks README.md CHANGELOG.md CONTRIBUTING.md

test: lint
	$(BIN)/pytest --cov --cov-report=term

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .coverage htmlcov demo-out .pytest_cache .mypy_cache .ruff_cache
