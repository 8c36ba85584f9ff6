# Everything runs in .venv. `make setup` creates it; the other targets call it first, which is instant once it is done.

PYTHON ?= python3   # creates .venv; any of 3.11, 3.12
TORCH_INDEX ?=      # index for PyTorch; empty: its CPU index if reachable
JOBS ?= 2           # test workers
ARGS ?=             # passed through: make test ARGS="-k softmax"

VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-versions test-browser lint bench bench-programs traffic conformance-ops conformance-special conformance-models conformance-clients conformance-onnx fuzz orders recipes gpu-bundle test-gpu bench-gpu clean conformance-cuda faults endurance

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv, install everything, build the native runtime (PYTHON=, TORCH_INDEX=)
	@TORCH_INDEX="$(strip $(TORCH_INDEX))" $(PYTHON) scripts/setup.py

demo: setup ## the demonstration (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.demo $(ARGS)

lint: setup ## ruff and mypy
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

test: lint ## lint, then all tests (JOBS=, ARGS=)
	$(VENV_PYTHON) -m pytest -n $(strip $(JOBS)) --dist worksteal --durations=10 --durations-min=1 $(ARGS)

test-browser: setup ## the long notebook, and the widget clicked through in JupyterLab and Chromium (ARGS=)
	$(VENV_PYTHON) -m pytest --wide -k interactive tests/examples/test_notebooks.py
	$(VENV_PYTHON) scripts/browser.py $(ARGS)

bench: setup ## time training steps against PyTorch (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.train $(ARGS)

traffic: setup ## count the bytes of training steps against eager PyTorch (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.traffic $(ARGS)

conformance-cuda: setup ## all CUDA kernels, in the emulator and through nvcc
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -q --wide tests/codegen/cuda $(ARGS)

conformance-ops: setup ## PyTorch's own operator samples through the compiler (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.conformance $(ARGS)

conformance-special: setup ## NaN, infinities and the extremes of each type through the compiler (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.conformance_special $(ARGS)

conformance-models: setup ## whole models, through three training steps (ARGS="bert --timeout 300")
	@$(VENV_PYTHON) -m benchmarks.conformance_models $(ARGS)

conformance-clients: setup ## Trainer, Lightning, timm and others, each in an environment of its own (ARGS="timm_models --update")
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m benchmarks.clients $(ARGS)

conformance-onnx: setup ## the official ONNX cases through the compiler (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.onnx cases $(ARGS)

test-versions: setup ## the tests under each Python and PyTorch that is admitted (ARGS="--only 3.12 --all")
	@$(VENV_PYTHON) scripts/versions.py $(ARGS)

fuzz: setup ## random models against PyTorch and float64 (ARGS="--models 50 --seed 0")
	@$(VENV_PYTHON) -m benchmarks.fuzz $(ARGS)

recipes: setup ## training loops: optimizers, schedulers, averages, checkpoints, changes midway (ARGS="midway")
	@$(VENV_PYTHON) -m benchmarks.recipes $(ARGS)

bench-programs: setup ## imperative programs against eager PyTorch and torch.compile (ARGS="counter --update")
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m benchmarks.programs $(ARGS)

orders: setup ## every prefix and 200 random orders of the passes on the twelve networks (ARGS=)
	@$(VENV_PYTHON) -m benchmarks.orders $(ARGS)

faults: setup ## training through kill -9, full disks, foreign caches, hanging compilers (ARGS="--kills 20")
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m benchmarks.faults $(ARGS)

endurance: setup ## many steps, models, shapes and threads in one process: memory and losses (ARGS=)
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m benchmarks.endurance $(ARGS)

GPU_PYTHON ?= $(if $(wildcard $(VENV_PYTHON)),$(VENV_PYTHON),$(PYTHON))

gpu-bundle: ## wheels to take to a machine with a GPU and no network, into gpu_bundle/
	@$(GPU_PYTHON) scripts/gpu.py bundle $(ARGS)

test-gpu: ## tests on a CUDA device (GPU_PYTHON=, a Python with PyTorch; ARGS=)
	@$(GPU_PYTHON) scripts/gpu.py test $(ARGS)

bench-gpu: ## measurements on a CUDA device (GPU_PYTHON=, ARGS="--only kernels")
	@$(GPU_PYTHON) scripts/gpu.py bench $(ARGS)

clean: ## remove build and test artifacts; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .dacecache _dacegraphs
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
