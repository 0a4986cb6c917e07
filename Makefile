# Everything a person runs. Each target sets up what it needs on a fresh Debian 12 machine (root, Python 3.11, Go).
.DEFAULT_GOAL := help
SHELL := /bin/sh
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: help setup test test-sglang fuzz check fmt e2e e2e-sglang demo clean-demo cluster-up cluster-down tools crds sglang-env bench bench-quick

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

.venv/.ready: pyproject.toml constraints.txt hack/setup.sh hack/requirements.txt transfer/pdtransfer/staging/_rows.c
	@hack/setup.sh

setup: .venv/.ready ## Virtual environment in .venv, packages in the cache

tools: ## Kubernetes, etcd, CoreDNS, Helm and kubectl, built once into the cache
	@python3 -m e2e.cluster build-tools

test: setup ## Levels 1-3: pure, fakes, real NIXL and a real kube-apiserver (no containers)
	@python3 -m e2e.cluster build-tools --only etcd,kube-apiserver,kubectl,helm
	$(PY) -m pytest tests

test-sglang: setup sglang-env ## The SGLang backend and the rules against the installed SGLang on the CPU, real servers too
	@hack/sglang/test.sh $(ARGS)

SECONDS ?= 600
fuzz: setup ## Every decoder on odd inputs for SECONDS=600: no crash, no hang, no memory without bound
	@nice $(PY) tests/fuzz/fuzz_run.py --seconds $(SECONDS)

check: setup ## Format, lint, types, import contracts, CRD drift, chart lint
	@hack/check.sh

fmt: setup ## Format the code
	$(PY) -m ruff format . && $(PY) -m ruff check --fix .

crds: setup ## Generate crds/ and the chart's CRD from the pydantic models
	$(PY) -m pdoperator.api.crd

sglang-env: ## SGLang 0.5.23 for a CPU, in the cache (7 GB): for the two suites with it, and the benchmark's rival
	@hack/sglang/setup.sh

bench: setup ## KV transfer beside raw NIXL, SGLang's classes (where sglang-env was made) and memcpy (long)
	@$(PY) tests/bench

bench-quick: setup ## The same with fewer cells, about three minutes
	@$(PY) tests/bench --quick

cluster-up: setup ## Embedded Kubernetes: two nodes, images loaded; prints the kubeconfig's path
	@$(PY) -m e2e.up

cluster-down: ## Remove the embedded Kubernetes without a trace
	@python3 -m e2e.cluster down

e2e: setup ## Level 4: the real thing on the embedded cluster (or KUBECONFIG)
	$(PY) -m pytest e2e/suite

e2e-sglang: setup sglang-env ## Level 4 with real SGLang on the CPU in the pods (7 GB once)
	$(PY) -m pytest e2e/suite_sglang

demo: setup ## From nothing to verified KV transfer and equal tokens, in front of your eyes
	@$(PY) -m e2e.demo

clean-demo: ## Remove everything that `make demo` made
	@if [ -x $(PY) ]; then $(PY) -m e2e.demo --clean; else python3 -m e2e.cluster down; fi
