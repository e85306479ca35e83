# Each target makes the environment (.venv) if it is not there, and reuses it if it is.
.DEFAULT_GOAL := help
.PHONY: help env demo tiny-model test test-full matrix gpu-check lint format lock reference docs

PY := .venv/bin/python
# One process a core; torch's own threads would only fight over them.
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

# Tests start some hundred processes that import Megatron: 9 s each with compiled modules on disk, 23 s without.
export PYTHONDONTWRITEBYTECODE :=

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

env: ## create or update .venv from requirements/cpu.txt
	@scripts/setup_env.sh

demo: env ## convert, fine-tune, export and generate on handwritten digits
	CUDA_VISIBLE_DEVICES= $(PY) examples/digits/demo.py $(DEMO_ARGS)

tiny-model: env ## make the demo's tiny model only, in out/digits/hf
	$(PY) examples/digits/demo.py --model-only $(DEMO_ARGS)

# On the CPU, also where there is a GPU; `make gpu-check` runs what needs one.
test: lint ## lint, then all tests but slow ones
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

test-full: ## lint, then all tests
	$(MAKE) test PYTEST_ARGS="--slow all $(PYTEST_ARGS)"

matrix: env ## train in every parallel layout, write the errors to benchmarks/results/parity*.md (an hour)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m tests.parity.matrix --write-table benchmarks/results/parity.md
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m tests.parity.matrix --models qwen3_5 --write-table benchmarks/results/parity_qwen3_5.md

gpu-check: env ## on a machine with a GPU: tests that need one, then speed and memory (docs/performance.md#check-a-gpu)
	$(PY) -m pytest -m gpu tests/gpu
	$(PY) -m benchmarks.gpu

lint: env ## ruff, private names of other packages, pyright, import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) scripts/private_names.py
	$(PY) -m pyright
	.venv/bin/lint-imports

format: env ## put every Python file into ruff's form
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock: env ## resolve requirements/cpu.in into requirements/cpu.txt, docs.in into docs.txt
	scripts/lock.sh

reference: env ## generate the tables of docs/settings.md
	$(PY) -m scripts.docs_site.reference

docs: ## the documentation as a site, in site/ (own environment, .venv-docs)
	scripts/build_docs.sh
