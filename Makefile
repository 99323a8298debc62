# `make demo` and `make test` go from a fresh clone to the result.
PYTHON    ?= python3
VENV      ?= .venv
PIP_FLAGS ?=
JOBS      ?= 3
DEMO      ?= slides,train,viewer
EXTRAS    ?= dev,docs,zarr,slides,train,encoders,viewer,ray,insight,export,dicom,anndata
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
PIP       := -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
CLEAN     := build/check-dist
PAGE      := $(shell find page -type f -not -path '*/node_modules/*')
LOWEST    ?= $(addprefix tests/,core data storage nn network subsets models lrp methods slides encoders heatmaps \
             training evaluate insights runs viewer cli)
PINS      ?=
STORES    := spatialdata==0.7.3 spatialdata-plot==0.4.0 ome-zarr==0.15.0
MINUTES   ?= 10
SEED      := $(or $(SEED),$(shell date +%s))
PYTEST    := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
COVER     := --cov --cov-report=term $(if $(COVERAGE),--cov-fail-under=$(COVERAGE))

.PHONY: help demo style types lint pytest test test-full fuzz coverage test-stores test-lowest bench docs dist check-dist bundle release clean

help:
	@echo "make demo        install, then go from digit slides to evidence and a report"
	@echo "make test        lint, types, import layers, tests with doctests; the same inputs each time"
	@echo "make test LOCKED=1  the same, every package but torch by its hash (Linux on x86-64, Python 3.11)"
	@echo "make test-full   the same with all fuzzed inputs and kills, random examples (SEED=1 repeats them), coverage"
	@echo "make fuzz        damaged inputs for MINUTES=10, going on where the last call stopped; build/fuzz has the counts"
	@echo "make coverage    the tests with a report of the lines they miss (COVERAGE=95 makes a lower share an error)"
	@echo "make test-stores exports in Zarr, read and drawn by their own libraries in an environment of their own"
	@echo "make test-lowest the tests of nearly every room, with the lowest versions that pyproject.toml allows"
	@echo "make lint        ruff, mypy, import layers, spelling"
	@echo "make bench       measure speed and memory (ratios within one run)"
	@echo "make docs        build the documentation into site/; warnings are errors"
	@echo "make dist        build sdist and wheel into dist/"
	@echo "make bundle      dist, and a tar of wheels, checksums and a Containerfile for machines without internet"
	@echo "make release     test-full, dist, the bundle, its bill of materials (CycloneDX), and the proof that the wheel can be built again"
	@echo "make check-dist  install the wheel in a clean environment; xmil doctor and xmil demo --quick must pass"

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(PAGE)
	$(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(BIN)/python $(PIP) --no-deps -c constraints.txt torch)
	$(if $(LOCKED),$(BIN)/python $(PIP) --no-deps --require-hashes -r hashes.txt)
	$(BIN)/python $(PIP) -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

# What the demonstration needs, and no more; a full installation has it too.
$(VENV)/.demo: pyproject.toml constraints.txt hatch_build.py $(PAGE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt -e ".[$(DEMO)]"
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.demo)
	$(BIN)/xmil demo --out demo-out

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks README.md CHANGELOG.md CONTRIBUTING.md

types: $(STAMP)
	$(BIN)/mypy

lint: style types

pytest: $(STAMP)
	$(PYTEST)

# mypy takes a minute of one core: it runs beside the tests.
test: style
	$(MAKE) --jobs 2 types pytest

test-full: lint
	@echo "random examples of seed $(SEED)"
	$(PYTEST) --full --hypothesis-seed=$(SEED) $(COVER)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --inputs 100000000 --seconds $$((60 * $(MINUTES))) --ledger build/fuzz --keep build/fuzz/faults

coverage: $(STAMP)
	$(PYTEST) $(COVER)

# spatialdata needs an older pandas than the pinned one, so that it has an environment of its own.
$(VENV)-stores/.installed:
	$(PYTHON) -m venv $(VENV)-stores
	$(VENV)-stores/bin/python $(PIP) $(STORES)
	touch $@

test-stores: $(STAMP) $(VENV)-stores/.installed
	XMIL_STORES_PYTHON=$(VENV)-stores/bin/python $(BIN)/pytest tests/heatmaps/test_stores.py

# torch and torchvision are those of constraints.txt; PINS="torch==2.11.0 torchvision==0.26.0" tries others.
$(VENV)-lowest/.installed: pyproject.toml constraints.txt release/lowest.py
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m release.lowest $(PINS) > $(VENV)-lowest/pins.txt
	$(VENV)-lowest/bin/python $(PIP) -r $(VENV)-lowest/pins.txt
	XMIL_SKIP_PAGE=1 $(VENV)-lowest/bin/python $(PIP) --no-deps -e .
	$(VENV)-lowest/bin/python -m pip check
	touch $@

test-lowest: $(VENV)-lowest/.installed
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n $(JOBS) --dist loadscope $(LOWEST)

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build

bundle: dist
	$(BIN)/python -m release.bundle -- $(PIP_FLAGS)

release: test-full bundle
	$(BIN)/python -m release.bill --out dist/xmil.cdx.json
	$(BIN)/python -m release.twice

# The wheel as a stranger gets it: no sources in sight, the extras that the demonstration needs.
check-dist: dist
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)/venv
	$(CLEAN)/venv/bin/python $(PIP) -c constraints.txt "$$(ls dist/*.whl)[slides,train,viewer]"
	cd $(CLEAN) && venv/bin/xmil doctor && venv/bin/xmil demo --quick --out demo-out

clean:
	rm -rf $(VENV) $(VENV)-stores $(VENV)-lowest build dist site .coverage htmlcov demo-out .pytest_cache .mypy_cache .ruff_cache
