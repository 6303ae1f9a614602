# The commands of the README. PYTHON picks the interpreter that .venv is made from.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := decoding protos telemetry engine actors gateway cluster client models bench tests

.PHONY: install serve test test-all test-services test-others lint protos bench

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]'
	touch $@

serve: install
	$(BIN)/serve run cluster.app

lint: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

# Tests that start a service wait more than they compute: they run beside the others. Their models are so small
# that threads would only wait for each other.
test: lint
	$(MAKE) -j2 test-services test-others SELECT="-m 'not slow'"

test-all: lint
	$(MAKE) -j2 test-services test-others

test-services:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SELECT) tests/cluster

test-others:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SELECT) --ignore tests/cluster

protos: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

bench: install
	$(BIN)/python -m bench
