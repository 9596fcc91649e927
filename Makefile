# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REPORTS := reports

.DEFAULT_GOAL := help
.PHONY: help setup lock demo examples test lint unit kernels engine restart server test-kits ranks soak \
	state-machine bench-attention bench-kernels bench-spans bench-quality bench-serving gpu-check docs clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make the virtual environment, install the lock file and this package, prepare the model

$(READY): requirements/lock.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/lock.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/python -m kvcmas_sgl.prepare_model
	touch $@

lock: ## Compile requirements/lock.txt from pyproject.toml
	$(BIN)/uv pip compile --quiet --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
		--extra examples --extra model --extra test pyproject.toml --output-file requirements/lock.txt

demo: setup ## The main job on a real model and real text, beside stock SGLang (reports/demo.html); IMAGES=1: pictures
	$(BIN)/python -m kvcmas_sgl.demo --reports $(REPORTS) $(if $(IMAGES),--images)

examples: setup ## Five multi-agent programs, LangGraph and AutoGen among them (reports/examples.json)
	$(BIN)/python -m examples --reports $(REPORTS)

test: setup lint ## Everything that can be checked here
	# Small tensors: each of these is as fast on one core. What runs a model wants all of them.
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs=2 --output-sync=line unit kernels
	$(MAKE) --no-print-directory engine restart server

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	# mypy wants the rooms under the package they are imported from.
	rm -rf build/typing && mkdir -p build/typing/kvcmas_sgl
	ln -s $(CURDIR)/kvcmas_sgl/* $(CURDIR)/radix_ext $(CURDIR)/triton_kernels $(CURDIR)/frontend build/typing/kvcmas_sgl/
	ln -s $(CURDIR)/examples build/typing/
	cd build/typing && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml kvcmas_sgl examples

unit: setup ## Tests of tensors, formats and tree rules
	$(BIN)/pytest tests/unit tests/tree

kernels: setup ## Tests of the GPU kernels without a GPU: Triton interprets in one process and compiles in another
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/interpreted
	$(BIN)/pytest tests/kernels/compiled
	$(BIN)/pytest tests/kernels/test_flashinfer.py

engine: setup ## Tests on SGLang's in-process engine
	$(BIN)/pytest tests/engine

restart: setup ## Tests of engines and servers that end, and of what the next one knows
	$(BIN)/pytest tests/restart

server: setup ## Tests over HTTP, on one server
	$(BIN)/pytest tests/server
	$(BIN)/pytest tests/images

test-kits: setup ## SGLang's own test kits against our cache, with plain and agent traffic (docs/kits.md); 15 minutes
	$(BIN)/pytest tests/kits

ranks: setup ## Tensor parallelism: two ranks on the CPU decide alike, and answer as one
	$(BIN)/pytest -rP tests/ranks

soak: setup ## One server under mixed load, faults, aborts and flushes, MINUTES of it (reports/soak.html)
	$(BIN)/python -m benchmarks.soak --reports $(REPORTS) --minutes $(or $(MINUTES),20)

state-machine: setup ## Random interleavings of everything that happens to the cache, STEPS of them, from SEED on
	$(BIN)/python -m tests.tree --steps $(or $(STEPS),100000) --seed $(or $(SEED),0)

bench-attention: setup ## CPU attention backend against torch_native (reports/cpu_attention.json)
	$(BIN)/python benchmarks/cpu_attention.py

bench-kernels: setup ## Correction op against a plain copy, reuse and learning against dense (reports/kernels.json); QUICK=1
	$(BIN)/python -m benchmarks.kernels --reports $(REPORTS) $(if $(QUICK),--quick)
	$(BIN)/python -m benchmarks.reuse_path --reports $(REPORTS)

bench-spans: setup ## Several spans a prompt, agents at once: throughput against stock SGLang (reports/spans.json)
	$(BIN)/python -m benchmarks.spans --reports $(REPORTS)

bench-quality: setup ## Every reuse method on the same multi-agent prompts (reports/quality.html); QUICK=1 takes minutes
	$(BIN)/python -m benchmarks.quality --reports $(REPORTS) $(if $(QUICK),--quick)
	$(BIN)/python -m benchmarks.quality.budget --reports $(REPORTS) $(if $(QUICK),--quick)

docs: setup ## API reference from the docstrings (build/api/index.html)
	$(BIN)/python docs/api_reference.py --to build/api

bench-serving: setup ## Real arrivals on real servers against stock SGLang (reports/serving.html); QUICK=1 takes 15 minutes
	$(BIN)/python -m benchmarks.serving --reports $(REPORTS) $(if $(QUICK),--quick)

gpu-check: setup ## What needs a GPU: correctness and time of the correction op, serving (reports/gpu_check.json)
	$(BIN)/python -m benchmarks.gpu_check --reports $(REPORTS)

clean: ## Remove the virtual environment, reports and caches
	rm -rf $(VENV) build $(REPORTS) .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
