# Every target sets up .venv by itself; the second time that costs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_OUT ?= runs/demo
WORKERS ?= 2

.PHONY: help setup demo lab frontier netlab test test-long test-compiler test-mpi test-full test-oldest test-python test-tritons test-ptx test-ecosystem docs dist lint format hooks bench peers gpu-check gpu-speed gpu-defaults gpu-all clean

help:
	@echo "make demo       train a byte-level transformer with AdamW and 1-bit Adam on 2 processes"
	@echo "make lab        search rates and train the lab's tasks, uncompressed and ours (4 core-hours; can be stopped and goes on)"
	@echo "make frontier   quality over bytes of whole runs: ours and what others compress with (10 core-hours; can be stopped and goes on)"
	@echo "make netlab     whole runs and steps by network rate, against DDP, int8, PowerSGD and the planner (root, iproute2; 40 minutes)"
	@echo "make test       run the test suite (5 minutes on 2 cores)"
	@echo "make test-long   those that make test leaves out because they take seconds: whole grids, whole programs (10 minutes)"
	@echo "make test-compiler   those tests that need a C compiler or chromium, or do more with one; make test has them too"
	@echo "make test-mpi   those tests that need Open MPI (apt-get install openmpi-bin), with mpi4py, which it installs"
	@echo "make test-full  run all tests, the long ones included"
	@echo "make test-oldest  some of each kind with the oldest torch and triton that are claimed (4 minutes, after gigabytes)"
	@echo "make test-python OTHER=python3.12  a few of each kind on another Python (2 minutes, after the downloads)"
	@echo "make test-tritons  compile what whole steps launch with the oldest and the newest Triton (minutes; no GPU is needed)"
	@echo "make test-ptx   execute what whole steps launch as the PTX that Triton compiles, on an emulator (minutes; needs a C++ compiler)"
	@echo "make test-ecosystem  with transformers' Trainer, accelerate and Lightning, which it installs (minutes)"
	@echo "make docs       build the documentation site, build/docs/index.html (Sphinx, which it installs; a minute)"
	@echo "make dist       sdist and wheel, in dist/, for a release"
	@echo "make lint       ruff, mypy, and import-linter: who may import whom"
	@echo "make hooks      let git look at each commit with the same tools (pre-commit)"
	@echo "make bench      benchmarks on this machine's CPU (minutes); OUT=folder keeps the numbers"
	@echo "make peers      DeepSpeed's own optimizers for the benchmarks, into a folder that can be carried"
	@echo "make gpu-check  does it work on this machine's CUDA GPU: every optimizer, graphs, NCCL, a compiled step, tests; with"
	@echo "                \$$(PYTHON)'s own torch and triton; OUT=folder for the report; under 4.5 minutes, whatever happens"
	@echo "make gpu-speed  and how fast: whole steps against fused AdamW; also under 4.5 minutes"
	@echo "make gpu-defaults  and by default: 50 steps in a row; also under 4.5 minutes"
	@echo "make gpu-all    check and speed, every kernel, more sizes, the largest tensors; 20 minutes at most"
	@echo "make clean      remove .venv and all that was built"

# torch comes first and pinned: an unpinned one would pull gigabytes of CUDA on a CPU machine.
# Without mpi4py: it needs an MPI library, and there are programs that fail where it finds none.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch and triton into $(VENV): minutes, the first time"
	$(BIN)/python -m pip install --constraint constraints.txt "setuptools>=77" wheel torch triton
	@echo "installing fusedonebit and what its commands and tests need"
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable \
		".[train,lab,dev]"
	@touch $@

setup: $(READY)

demo: $(READY)
	$(BIN)/fusedonebit train --nproc 2 --compare adamw,onebit-adam --out $(DEMO_OUT)

lab: $(READY)
	$(BIN)/python -m benchmarks.lab

frontier: $(READY)
	$(BIN)/python -m benchmarks.frontier

netlab: $(READY)
	$(BIN)/python -m benchmarks.netlab

# Two workers unless told otherwise (WORKERS=4): most tests are one process of one thread.
test: $(READY)
	@echo "running about 5,000 tests on $(WORKERS) processes: some 5 minutes on 2; first both import torch and collect them"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-long: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --long

test-compiler: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "kernels or needs_compiler or needs_browser"

$(VENV)/.mpi: $(READY)
	@echo "installing mpi4py"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[mpi]"
	@touch $@

# The ranks of one world serve all these tests: one worker.
test-mpi: $(VENV)/.mpi
	$(BIN)/python -m pytest -m needs_mpi

OLDEST_TRITON = $(shell sed -n 's/^triton==//p' constraints-oldest.txt)
# Those that promise a time, or share MPI ranks, have the machine to themselves.
test-full: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --full -m "not alone and not needs_mpi"
	$(BIN)/python -m pytest --full -m "alone or needs_mpi"
	@if command -v c++ >/dev/null; then $(MAKE) --no-print-directory test-ptx PTX="--triton $(OLDEST_TRITON)"; \
		else echo "NO C++ COMPILER: what the oldest Triton compiles was not executed"; fi

# Where an index has no CPU build of it, torch brings its CUDA libraries: 5 GB.
OLDEST := .venv-oldest
OLDEST_PYTHON ?= $(firstword $(foreach name,python3.10 $(PYTHON),$(shell $(name) -c "import sys; print(sys.executable)" 2>/dev/null)))
$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	@test -x $(OLDEST)/bin/python || { echo "making $(OLDEST)"; $(OLDEST_PYTHON) -m venv $(OLDEST); }
	@echo "installing the oldest torch and triton into $(OLDEST): minutes, the first time"
	$(OLDEST)/bin/python -m pip install --constraint constraints-oldest.txt "setuptools>=77" wheel torch triton
	$(OLDEST)/bin/python -m pip install --constraint constraints-oldest.txt --no-build-isolation --editable ".[lab]" \
		hypothesis numpy pytest pytest-timeout pytest-xdist
	@touch $@

# Every optimizer, on its own and beside its paper; kernels beside eager; checkpoints; the wire.
OLDEST_TESTS := like_torch hooks reference every_op kernel_steps lion checkpoint checkpoint_of_others dcp
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OLDEST_TESTS:%=tests/test_%.py) tests/wire/test_collectives.py

# What depends on the interpreter: names, hooks, pickles, collectives on real ranks.
OTHER ?= python3.12
OTHER_VENV = .venv-$(shell $(OTHER) -c "import platform; print(platform.python_version())" 2>/dev/null)
OTHER_TESTS := exports like_torch hooks checkpoint_of_others dcp
.venv-3.%/.ready: pyproject.toml constraints.txt
	@test -x $(@D)/bin/python || { echo "making $(@D)"; $(OTHER) -m venv $(@D); }
	@echo "installing torch and triton into $(@D): minutes, the first time"
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt "setuptools>=77" wheel torch triton
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[lab]" \
		hypothesis numpy pytest pytest-timeout pytest-xdist
	@touch $@

.PHONY: test-python-here
test-python:
	@test "$(OTHER_VENV)" != .venv- || { echo "OTHER=$(OTHER) is no Python here"; exit 1; }
	@$(MAKE) --no-print-directory test-python-here
test-python-here: $(OTHER_VENV)/.ready
	$(OTHER_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OTHER_TESTS:%=tests/test_%.py) tests/wire/test_collectives.py

test-tritons: $(READY)
	$(BIN)/python -m benchmarks.tritons

# PTX="--triton 3.6.0 --keys 100" passes options. Steps are recorded as if kernels were interpreted; none is.
test-ptx: $(READY)
	PYTHONPATH=.:tests:tests/ptx TRITON_INTERPRET=1 $(BIN)/python -W ignore tests/ptx/ptx_steps.py $(PTX)

# torch stays the pinned one; no model or data set is downloaded.
$(VENV)/.ecosystem: $(READY)
	@echo "installing transformers, accelerate, lightning, bitsandbytes and torchao: a minute, the first time"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[ecosystem]"
	@touch $@

test-ecosystem: $(VENV)/.ecosystem
	$(BIN)/python -m pytest -n $(WORKERS) tests/ecosystem

$(VENV)/.docs: $(READY)
	@echo "installing Sphinx and its theme"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	@touch $@

# What Sphinx reads, docs/conf.py first writes. A link or a name that leads nowhere is a warning, and so an error.
docs: $(VENV)/.docs
	@rm -rf build/docs build/docs-source && mkdir -p build/docs-source
	$(BIN)/python -m sphinx -W --keep-going -q -c docs build/docs-source build/docs
	@echo "build/docs/index.html"

# The wheel is made of the sdist: so that lacks nothing. Nothing is downloaded.
dist: $(READY)
	@echo "building sdist and wheel"
	@rm -rf dist
	@$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist dist/*.tar.gz
	@ls -l dist

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p fusedonebit -p benchmarks.lab
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(READY)
	$(BIN)/pre-commit install

bench: $(READY)
	$(BIN)/python -m benchmarks --device cpu --out $(or $(OUT),runs/bench)

# Its ops are not built. --no-deps: its own requirements would bring another torch; its import asks for these.
PEERS := benchmarks/peers
peers: $(READY)
	@echo "installing DeepSpeed into $(PEERS)"
	rm -rf $(PEERS)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --target $(PEERS) --no-deps --no-build-isolation deepspeed==0.19.6
	$(BIN)/python -m pip install --quiet --target $(PEERS) einops hjson msgpack psutil py-cpuinfo pydantic tqdm

# No venv, no network and nothing installed: $(PYTHON) has torch, triton and pytest.
gpu-check gpu-speed gpu-defaults gpu-all: gpu-%:
	$(PYTHON) -m benchmarks.gpu $* --out $(or $(OUT),benchmarks/results/gpu) $(GPU_OPTIONS)

clean:
	rm -rf $(VENV) $(OLDEST) .venv-3.* build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
