# Everything runs in .venv/, which `make setup` builds from constraints.txt.
#
# torch is installed first and alone, so that no other package picks its build. On PyPI plain torch is a CUDA build of
# several GB; to get the CPU one, name an index of CPU wheels:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup
# xgrammar comes last and without its dependencies: what it needs is in [dev], but for 1 GB of triton, which it does not
# use on a CPU.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PROTOS := $(wildcard protos/flashmesh/v1/*.proto)
ARGS ?=

.PHONY: help setup up test soak golden protos format lint types bench kernels-compile config-reference wheel check clean

help: ## Show this help.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv/ and install everything (a second call does nothing).

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("flashmesh needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps xgrammar
	@touch $@

up: setup ## Start a whole mesh on this machine, answer a prompt, stay up until Ctrl-C.
	@exec $(BIN)/flashmesh up --config config/local.toml $(ARGS)

test: setup ## Run the whole suite (ARGS="-k word" selects).
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

soak: setup ## Kill decode workers at random tokens, many times over (SEEDS=20).
	FLASHMESH_SEEDS=$(or $(SEEDS),20) $(BIN)/python -m pytest tests/integration/test_mesh_engines.py -k killed $(ARGS)

golden: setup ## Run the tests against the golden vectors only.
	$(BIN)/python -m pytest tests/golden $(ARGS)

protos: setup ## Generate flashmesh/v1/ from protos/.
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. --pyi_out=. $(PROTOS)

config-reference: setup ## Write the tables of docs/running.md from the configuration classes.
	$(BIN)/python tools/config_reference.py

format: setup ## Format the code.
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

lint: setup ## Check format and lint.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: wheel ## Type-check what ships: a fresh wheel, unpacked (mypy cannot see the tree's mapping).
	$(BIN)/python -m zipfile -e build/wheel/flashmesh-*.whl build/unpacked
	cd build/unpacked && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p flashmesh

bench: setup ## Run every benchmark (ARGS="--json FILE" keeps the figures).
	$(BIN)/flashmesh bench all $(ARGS)

kernels-compile: setup ## Build every GPU kernel for Hopper; needs nvcc, no GPU (ARGS="dense" selects).
	$(BIN)/python -m flashmesh.kernels.tilelang.compile $(ARGS)

wheel: setup ## Build the wheel into build/wheel/.
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .

check: lint types test ## All that must pass before a merge.

clean: ## Remove what the build made; .venv/ stays.
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
