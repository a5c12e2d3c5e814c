# The one-command path. Logic lives in ci/; every target first makes the environment it needs.
#
#   make serve                  serve SmolLM2 through the plugin, ask it a question, go on until Ctrl-C
#   MODEL=gemma make smoke      the same with Gemma 3, stop after the answer; the exit status tells

PYTHON ?= python3
VENV ?= $(CURDIR)/.venv
MODEL ?= smollm2
PORT ?= 8000
ARGS ?=
N ?= 20000
SEED ?=
MINUTES ?= 20
COVERAGE ?=
export VENV

IN_VENV = $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env models serve smoke test test-fast coverage fuzz soak lint accuracy bench clean

help: ## show this list
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-11s %s\n", $$1, $$2 }'
	@echo "Variables (now): MODEL=$(MODEL) (smollm2, gemma or a folder)  PORT=$(PORT)  DEVICE=$(or $(DEVICE),detected) (cpu or gpu)"
	@echo "                 PYTHON=$(PYTHON)  VENV=$(VENV)"
	@echo "                 ARGS=$(ARGS) (for serve and smoke: passed to vllm serve; for test: to pytest)"

env: ## make the Python environment: vLLM for this machine's GPU, or its CPU build
	@$(PYTHON) -m ci.env

models: env ## prepare both demo models in the cache folder
	@$(IN_VENV) -m ci.models smollm2 gemma

serve: env ## serve MODEL on PORT, ask it one question, keep serving until Ctrl-C
	@$(IN_VENV) -m ci.serve --model "$(MODEL)" --port "$(PORT)" -- $(ARGS)

smoke: env ## the same, but stop after the answer; fails unless the plugin served it
	@$(IN_VENV) -m ci.serve --model "$(MODEL)" --port "$(PORT)" --once -- $(ARGS)

test: env models ## all tests, those that start vLLM included
	@$(IN_VENV) -m ci.tests $(if $(COVERAGE),--coverage) $(ARGS)

test-fast: env ## the tests that start no engine, on all cores
	@$(IN_VENV) -m ci.tests --without-engines $(ARGS)

coverage: env ## the same, and which lines of metadata/ and kernels/ they reach; fails below 95 %
	@$(IN_VENV) -m ci.tests --without-engines --coverage $(ARGS)

# All three, whatever each finds.
lint: env ## ruff, its formatter, and mypy on an installed wheel
	@failed=0; for check in "ruff check ." "ruff format --check ." ci.typecheck; do \
		$(IN_VENV) -m $$check || failed=1; \
	done; exit $$failed

accuracy: env models ## lm_eval on our own tasks, this plugin against vLLM's own CPU backend, on both models
	@$(IN_VENV) -m ci.accuracy $(ARGS)

fuzz: env ## draw N whole steps at random (20000; SEED= repeats a run) and hold each against fp64
	@$(IN_VENV) -m ci.fuzz --examples $(N) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: env models ## a real server under a mixed load for MINUTES (20): same tokens as alone, no error, flat memory
	@$(IN_VENV) -m ci.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: env models ## throughput of this plugin against vLLM's own CPU backend
	@$(IN_VENV) -m ci.bench $(ARGS)

clean: ## remove the environment in .venv and build outputs (prepared models stay in the cache folder)
	rm -rf .venv .venv.lock build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
