# The commands of the README. PYTHON picks the interpreter that .venv is made from.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := decoding protos telemetry engine actors gateway cluster client models bench tests

.PHONY: install serve test test-all lint protos bench

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

# Tests that start a service wait more than they compute: they have a process of their own beside the others.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test: lint
	$(PYTEST) -m 'not slow'

test-all: lint
	$(PYTEST)

protos: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

bench: install
	$(BIN)/python -m bench
