# One entry for every task. `make` alone explains itself.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export PYTHONSAFEPATH := 1

PY := .venv/bin/python
OPERATOR_PY := .venv-operator/bin/python
PYTEST := $(PY) -m pytest
BOOTSTRAP := python3 tools/bootstrap.py
SOURCES := engine/src operator/src tools tests

##@ Use it
.PHONY: demo demo-load demo-down
demo: ## from nothing to a chat answer: cluster, operator by Helm, the example, one question
	@$(BOOTSTRAP) --cluster
	@$(PY) -m kvpilot_tools.demo up

demo-load: ## drive load at the demo and watch replicas, cap and decisions
	@$(PY) -m kvpilot_tools.demo load

demo-down: ## leave nothing of the demo behind
	@$(PY) -m kvpilot_tools.demo down

##@ Check it
.PHONY: test test-fast test-engine fuzz test-operator test-files test-cluster lint
test: setup-all ## every test, the ones on the local cluster included (root on Linux)
	@$(MAKE) --no-print-directory test-files test-engine test-operator test-cluster
	@echo "make test: everything passed"

test-fast: setup-operator ## what needs neither cluster nor image
	@$(PYTEST) tests/contract tests/chart tests/tools tests/engine -q -m "not cluster and not apiserver and not model"
	@$(OPERATOR_PY) -m pytest tests/operator -q -m "not cluster and not apiserver"
	@echo "make test-fast: everything passed"

test-files: setup-operator ## contracts, chart rendering, tools
	@$(PYTEST) tests/contract tests/chart tests/tools

test-engine: setup ## the engine, the real small model included
	@$(PYTEST) tests/engine

fuzz: setup ## thousands of requests generated from /openapi.json, four minutes; EXAMPLES=1000 for each operation, SEED=4
	@KVPILOT_FUZZ_EXAMPLES=$(or $(EXAMPLES),1000) KVPILOT_FUZZ_SEED=$(or $(SEED),4) $(PYTEST) tests/engine/server/test_openapi_fuzz.py

test-operator: setup-all ## the operator against the real API server, in an environment without torch
	@$(OPERATOR_PY) -m pytest tests/operator

test-cluster: setup-all ## the whole path on the local cluster
	@$(PYTEST) tests/cluster

lint: setup-all ## format, lint, types, import contracts, layout, chart, generated files
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy engine/src operator/src tools/src tests
	@.venv/bin/lint-imports --no-cache
	@$(PYTEST) -q tests/contract/test_layout.py tests/contract/test_generated_files.py
	@$(PY) -m kvpilot_tools.chart lint
	@echo "make lint: clean"

##@ Change it
.PHONY: fmt generate images
fmt: setup ## format and fix what can be fixed
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

generate: setup ## write the generated files: chart CRD copy, chart README, flag table
	@$(PY) -m kvpilot_tools.generate
	@echo "make generate: written"

images: setup-all ## build both images with buildah or docker
	@$(PY) -m kvpilot_tools.images

##@ Measure it
.PHONY: bench-peers bench-engine bench-ttft bench-server bench-scheduling
bench-peers: setup ## llama.cpp, vLLM and transformers for bench-engine, into the user's cache, once
	@$(PY) -m kvpilot_tools.bench.peers $(ARGS)

bench-engine: setup ## against every peer that is set up, about 25 minutes; ARGS=--quick; writes build/bench/engine.json
	@$(PY) -m kvpilot_tools.bench.engine $(ARGS)

bench-ttft: setup ## 21 streams at once on our engine; writes build/bench/ttft.json and ttft.png
	@$(PY) -m kvpilot_tools.bench.ttft $(ARGS)

bench-server: setup ## processor time of the server itself per streamed token; writes build/bench/server-overhead.json
	@$(PY) -m kvpilot_tools.bench.server_overhead

bench-scheduling: setup ## the scheduler without a model: cost of a step by batch, queue, cache size; writes build/bench/scheduling.json
	@$(PY) -m kvpilot_tools.bench.scheduling $(ARGS)

##@ Set up
.PHONY: setup setup-operator setup-all clean help
setup: ## the virtual environment
	@$(BOOTSTRAP)

setup-operator: ## and the operator's own, without torch
	@$(BOOTSTRAP) --operator

setup-all: ## and the local cluster's binaries
	@$(BOOTSTRAP) --operator --cluster

clean: ## remove what was built here (caches of the user stay)
	@rm -rf build .venv .venv-operator
	@echo "make clean: removed build and the environments"

help: ## this text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)
