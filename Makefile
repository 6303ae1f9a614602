# The commands of README.md and CONTRIBUTING.md. PYTHON picks the interpreter that .venv is made from.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := outrider protos actors gateway cluster workshop bench examples tests

.PHONY: install serve test test-all test-services test-others test-processors lint style types dead protos bench

install: .venv/installed

.venv/installed: pyproject.toml outrider/engine/kernels/cpu/functions.cpp
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]'
	touch $@

serve: install
	$(BIN)/serve run cluster.app

lint: style types dead

style: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: install
	$(BIN)/mypy

dead: install
	$(BIN)/vulture

# For two cores. Tests that start a service wait a good part of their time, and only one service runs at once, so
# they share one process; the others have two.
test: style dead
	$(MAKE) -j2 test-services test-others types SELECT="-m 'not slow'"

test-all: style dead
	$(MAKE) -j2 test-services test-others types
	$(MAKE) test-processors

test-services: install
	$(BIN)/python -m pytest $(SELECT) tests/cluster

test-others: install
	$(BIN)/python -m pytest $(SELECT) -n 2 --dist loadfile --ignore tests/cluster

# A big machine stands for smaller ones: one with AVX2 alone, and one with neither AVX2 nor compiled functions.
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
AS_OLDER := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41

test-processors: install
	$(AS_AVX2) $(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile tests/engine
	$(AS_OLDER) $(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile tests/engine

protos: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

bench: install
	$(BIN)/python -m bench
