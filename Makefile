# Two commands matter: `make demo` and `make test`. Each works first on a fresh clone, whatever its folder is called.
# Before a merge, `make check` runs all tests.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Tests start many processes; without byte code on disk each of them would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

# The environment holds absolute paths, so its stamps carry the folder's name: a renamed clone installs anew.
HERE := $(subst /,_,$(subst $() ,_,$(CURDIR)))
DEMO := $(VENV)/demo.$(HERE)
DEV := $(VENV)/dev.$(HERE)
BENCH := $(VENV)/bench.$(HERE)
# Where pytest lets tests find their helpers, joined by colons.
TESTS := $(subst $() ,:,$(strip $(patsubst %/,%,$(sort $(dir $(wildcard tests/*.py tests/*/*.py tests/*/*/*.py))))))

.PHONY: help demo test check durations messages package services test-versions data-libraries cuda wheels tools audit lock lint types docs pictures ops parity semantics pretrained matrix bench bench-cuda kill recover nodes sweeps chaos deadlocks memory flips schedules faults soak format clean

help:
	@echo "make demo     train a small model on two ranks and say where the results are"
	@echo "make test     lint, format, types, the quick tests and some of the slow ones"
	@echo "make check    all tests (JOBS=2 at a time)"
	@echo "make durations  run all tests, and write which are slow"
	@echo "make messages  run the tests of errors, and write the messages they get to tests/messages.txt"
	@echo "make package  build the source distribution and the wheel, and train with them in an empty environment"
	@echo "make test-versions  run the core of the suite with the oldest and the newest torch (VERSIONS='2.11.0 2.15.0')"
	@echo "make data-libraries  run the tests of MosaicML streaming, litdata and torchdata in an environment of their own"
	@echo "make cuda     run the tests on the CUDA devices of this machine, emulated ones without; 10 minutes, no network"
	@echo "make wheels   download what such a machine lacks (WHEELS='--python 3.12 deepspeed hjson')"
	@echo "make services  run the tests that start servers of MLflow and W&B, and a Ray cluster"
	@echo "make audit    compare the environment with constraints.txt, and its files with their recorded hashes"
	@echo "make lock     write requirements.lock anew, from pyproject.toml and constraints.txt"
	@echo "make docs     build the site of the documentation in build/site; no network"
	@echo "make pictures  draw the pictures of the README again, from a run of examples/digits.py"
	@echo "make ops      build what DeepSpeed compiles, once on a machine: 3 minutes on two cores"
	@echo "make bench    measure beside the raw loop and other libraries; ARGS=--write puts it into the docs (ARGS='--only step --quick')"
	@echo "make bench-cuda  measure on one GPU beside plain torch, other libraries and DeepSpeed: 8 minutes, no network"
	@echo "make parity   every strategy, precision, window and clipping beside plain torch; writes the docs' table"
	@echo "make semantics what programs do to weights, gradients and modules, under every strategy; writes the docs' table"
	@echo "make pretrained a model of the size of GPT-2 from and to folders of transformers, under each strategy"
	@echo "make matrix   save under every strategy, resume under every other; writes the docs' table; 15 minutes"
	@echo "make kill     kill runs at random instants and see that they resume bit for bit (TRIALS=100 for each strategy, number of ranks and victim)"
	@echo "make recover  kill ranks at random instants: restarted from memory, they must end bit for bit (TRIALS=20)"
	@echo "make nodes    lose nodes of a launch at random instants: a spare takes over bit for bit, or fewer ranks go on (TRIALS=20)"
	@echo "make sweeps   kill a sweep at random instants and see that it finds what an undisturbed one finds (ARGS='--trials 20 --kills 3')"
	@echo "make chaos    disturb runs in every way a machine knows (TRIALS=20 for each strategy and fault)"
	@echo "make deadlocks  run fits with uneven data and signals at random points: no rank may wait forever (TRIALS=200)"
	@echo "make soak     kill a rank every 30 s for 10 minutes, and see how much of the time is trained"
	@echo "make memory     let a rank run out of memory at random points: the losses must stay the same (TRIALS=200)"
	@echo "make schedules  several faults in one run, also while it recovers, copies or saves (TRIALS=200 schedules)"
	@echo "make flips    flip single bits under verify_every: each must be found and named, and none saved (TRIALS=100 for each strategy)"
	@echo "make faults   plant an exception at every place where a run may fail, and see that it ends within 2 s"
	@echo "make lint | types | format | clean"

demo: $(DEMO)
	$(PY) examples/digits.py --strategy ddp --devices 2

# The type checker and the compilers of DeepSpeed's Adam and of the emulated devices run beside the tests; what they have
# to say comes after them. The last line says which tests were left out: see tests/tiers.py.
JOBS ?= 2
PYTEST = $(PY) -m pytest -n $(JOBS) --dist worksteal
QUICK := $(VENV)/left-out.txt
test: tools lint
	@$(LINKED)
	@rm -f $(QUICK); \
	$(CHECK_TYPES) > $(VENV)/types.log 2>&1 & types=$$!; \
	$(COMPILE) > $(VENV)/compilers.log 2>&1 & compilers=$$!; \
	trap 'kill $$types $$compilers 2> /dev/null' INT TERM; \
	$(PYTEST) --tier quick --left-out $(QUICK) $(ARGS); status=$$?; \
	wait $$types || status=1; wait $$compilers || cat $(VENV)/compilers.log; \
	cat $(VENV)/types.log; \
	test ! -f $(QUICK) || cat $(QUICK); exit $$status
COMPILE = { $(PY) -m phalanx.strategies.deepspeed.ops cpu_adam && $(PY) tests/emulated_cuda/emulation_build.py; }

# Without libaio the tests of NVMe are left out, and the last line says so; with COMPLETE=1 that is an error. TIER=rest
# runs what `make test` leaves out. Slow tests wait for processes, limits and disks a third of the time, so that three at
# a time take less than two do on two cores.
TIER ?= all
check: JOBS = 3
check: tools ops
	@$(HAS_LIBAIO) || selected='not nvme'; \
	$(PYTEST) --tier $(TIER) --durations 30 --durations-min 5 -m "$$selected" $(ARGS); status=$$?; \
	test -z "$$selected" || echo "$(LEFT_OUT)"; exit $$status

durations: tools ops
	$(PYTEST) --write-durations $(ARGS)

# After a change to the sentence of an error: see tests/messages.py. ARGS=tests/framework/data runs a part.
messages: tools
	$(PYTEST) --write-messages $(ARGS)

HAS_LIBAIO := ! PYTHON='$(PYTHON)' .ci/tools missing | grep -qx libaio-dev
LEFT_OUT := Left out: the tests of NVMe offload, as libaio-dev is missing. As root: apt-get install libaio-dev
tools:
	@PYTHON='$(PYTHON)' .ci/tools install
	@test -z "$(COMPLETE)" || $(HAS_LIBAIO) || { echo "$(LEFT_OUT)"; exit 1; }

# Not part of `make test`: the local service of W&B sometimes drops its connection, and Ray takes long to start.
services: $(DEV)
	PHALANX_TEST_SERVICES=1 $(PY) -m pytest tests/loggers/test_remote_loggers.py tests/cli/test_launch_ray.py $(ARGS)

# The core of the suite with the oldest and the newest torch that pyproject.toml allows, each in an environment of its
# own without DeepSpeed, Lightning and Accelerate. Several gigabytes each, as there are no other builds for most versions.
VERSIONS ?= 2.11.0 2.15.0
CORE := core data fabric loop metrics parallel rehearsal resume state
MESHES := fsdp pipeline context expert
WITHOUT := zero or deepspeed or lightning or accelerate or names_of_wrappers or released_with_the_trainer
test-versions: tools
	@for version in $(VERSIONS); do \
	    python="$(VENV)/torch-$$version/bin/python"; echo "torch $$version"; \
	    test -x "$$python" || $(PYTHON) -m venv "$(VENV)/torch-$$version" || exit 1; \
	    "$$python" -m pip install --quiet --disable-pip-version-check "torch==$$version" -e '.[examples,hf]' datasets schedulefree webdataset \
	        pytest pytest-timeout pytest-xdist || exit 1; \
	    "$$python" -m pytest -n $(JOBS) --dist worksteal -k 'not ($(WITHOUT))' $(ARGS) \
	        $(CORE:%=tests/framework/%) $(wildcard $(MESHES:%=tests/strategies/test_%*.py)) || exit 1; \
	done

# Data libraries that need other versions of numpy and transformers than the rest, in an environment of their own: with
# torch's version of constraints.txt, and without most of their dependencies, which are clients of clouds, and torchvision,
# whose builds in the package index are for CUDA. What they import comes after them.
DATA_LIBRARIES := mosaicml-streaming==0.13.0 litdata==0.2.76 torchdata==0.11.0
DATA_LIBRARIES_IMPORT := 'numpy<2.2' 'transformers<5' datasets boto3 brotli catalogue python-snappy zstd
data-libraries: tools
	@python="$(VENV)/data-libraries/bin/python"; \
	test -x "$$python" || $(PYTHON) -m venv "$(VENV)/data-libraries" || exit 1; \
	"$$python" -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -e . \
	    $(DATA_LIBRARIES_IMPORT) pytest pytest-timeout || exit 1; \
	"$$python" -m pip install --quiet --disable-pip-version-check --no-deps $(DATA_LIBRARIES) || exit 1; \
	"$$python" -m pytest tests/framework/data/test_data_libraries.py $(ARGS)

# With the machine's own python and packages, as its torch fits its driver; with those of the environment where `make` has
# built one. Packages that are missing come from the folder of `make wheels`, if there is one.
# ARGS='--seconds 300 -k memory'
CUDA_PYTHON := $(if $(wildcard $(DEV)),$(PY),$(PYTHON))
cuda:
	$(CUDA_PYTHON) tests/cuda/run_cuda_tests.py $(ARGS)

# Needs the network, and any Python.
wheels:
	$(PYTHON) .ci/wheels.py $(WHEELS)

# What pip has installed; no network is needed.
audit: $(DEV)
	$(PY) .ci/audit.py

# Needs the network.
lock: $(DEV)
	$(PY) .ci/lock.py $(VENV)/bin/uv

# In an environment of its own, with the Python of PYTHON.
package:
	$(PYTHON) .ci/package.py

lint: $(DEV)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

# A type checker takes a package's name from its folder and refuses one such as `phalanx-main`. Seen through a link
# called `phalanx`, a clone under any name is the package. One call for all: a second one would load torch's types again.
LINK := $(VENV)/types/phalanx
LINKED := mkdir -p $(VENV)/types && ln -sfn "$(CURDIR)" $(LINK)
PARTS := __init__.py __main__.py checkpoint.py $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
CHECK_TYPES = MYPYPATH=$(VENV)/types:$(TESTS) $(PY) -m mypy $(PARTS:%=$(LINK)/%) $(wildcard tests examples benchmarks docs/site)
types: $(DEV)
	@$(LINKED)
	$(CHECK_TYPES)

# Broken links, missing anchors and pages outside of the navigation are errors. The variable silences an advertisement.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

pictures: $(DEV)
	$(PY) docs/site/pictures.py

# Needs g++, Python's headers and, for NVMe, libaio-dev.
ops: $(DEV)
	@$(HAS_LIBAIO) || without='--without async_io'; \
	$(PY) -m phalanx.strategies.deepspeed.ops $$without

bench: $(BENCH)
	$(PY) -m benchmarks $(ARGS)

# As `make cuda`. ARGS='--only 350m --seconds 120', or ARGS='--device cpu --tiny' to try the code without a GPU
bench-cuda:
	$(CUDA_PYTHON) tests/cuda/offline.py -m benchmarks.cuda $(ARGS)

parity: $(DEV)
	$(PY) tests/parity_table.py --write docs/choosing-a-strategy.md

# What programs do to weights, gradients and modules, beside plain torch. ARGS='--strategy fsdp --action clamp --ranks 2'
# tries some cells, and ARGS='--strategy my_package.strategies:MyStrategy' a strategy that is not part of phalanx.
semantics: ops
	$(PY) tests/semantics.py $(or $(ARGS),--write docs/semantics.md)

# A model of the size of GPT-2, from and to the folders of transformers. ARGS='--strategies fsdp,zero3 --layers 2'
pretrained: $(DEV)
	$(PY) tests/pretrained_table.py $(ARGS)

matrix: $(DEV)
	$(PY) tests/resume_matrix.py --write docs/resume-matrix.md $(ARGS)
	$(PY) tests/mesh_matrix.py --write docs/resume-matrix.md

# SIGKILL at random instants, the same command again, and the result must be that of the run nobody killed.
# ARGS='--strategies ddp,zero3 --ranks 3 --saving asynchronous --seed 7'
TRIALS ?= 20
kill: $(DEV)
	$(PY) tests/chaos.py --faults kill-rank,kill-all,kill-launcher --ranks 2,3 --saving both --trials $(TRIALS) \
	    --strategies 'single,ddp,fsdp,pipeline,zero2,zero3,fsdp tp=2,pipeline pp=2 dp_shard=2' $(ARGS)

# ARGS='--strategies "ddp,fsdp tp=2" --ranks 3 --snapshots auto --seed 7'
recover: $(DEV)
	$(PY) tests/recovery_trials.py --trials $(TRIALS) $(ARGS)

# Needs root for the hosts, which are network namespaces. ARGS='--kinds spare --strategies fsdp --seed 7'
nodes: $(DEV)
	$(PY) tests/node_trials.py --trials $(TRIALS) $(ARGS)

sweeps: $(DEV)
	$(PY) tests/sweep_trials.py $(ARGS)

# ARGS='--strategies ddp --faults stop,full,damage --seed 7'
chaos: $(DEV)
	$(PY) tests/chaos.py --trials $(TRIALS) $(ARGS)

# ARGS='--strategies fsdp,zero3 --seed 1000'
deadlocks: $(DEV)
	$(PY) tests/deadlock_trials.py --trials $(TRIALS) $(ARGS)

# ARGS='--seed 1000'
memory: $(DEV)
	$(PY) tests/memory_trials.py --trials $(TRIALS) $(ARGS)

# ARGS='--strategies ddp,zero3 --seed 1000'
schedules: $(DEV)
	$(PY) tests/schedule_trials.py --schedules $(TRIALS) $(ARGS)

# Single bits are flipped in fits that verify their steps. ARGS='--strategies ddp --places weights --seed 7'
flips: $(DEV)
	$(PY) tests/flip_trials.py --trials $(TRIALS) $(ARGS)

# ARGS='--minutes 10 --every 30 --strategy fsdp'
soak: $(DEV)
	$(PY) tests/soak.py $(ARGS)

# ARGS='--strategies fsdp --sites training_step,worker'
faults: $(DEV)
	$(PY) tests/fault_trials.py $(ARGS)

format: $(DEV)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# An environment that `make demo` or an older lock has left is completed or replaced.
SOURCES_OF_ENVIRONMENT := pyproject.toml setup.py constraints.txt requirements.lock
$(DEMO): $(SOURCES_OF_ENVIRONMENT)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "phalanx needs Python 3.10 or newer; set PYTHON=")'
	@$(PYTHON) .ci/install.py --clear $(VENV) examples
	@touch $@

$(DEV): $(DEMO)
	@$(PYTHON) .ci/install.py $(VENV) dev
	@touch $@

$(BENCH): $(DEV)
	@$(PYTHON) .ci/install.py $(VENV) dev bench
	@touch $@
