# jturnip. From a fresh clone, `make demo` and `make test` set up an environment of their own
# and run; when it is up to date they only run. `make help` lists everything.
#
#   PYTHON=python3.12   the Python to set up with: 3.11 or newer
#   VENV=.venv          where the environment goes
#   JAX='jax==0.11.2'   which jax to install; by default the newest that this Python takes
#   ARGS='-k planner'   more arguments for what is run

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
EXTRAS ?= demo,test
CUDA ?= cuda13
ARGS ?=

bin := $(VENV)/bin
# The environment has jturnip, from this checkout, and what its demo needs; what its tests
# need too.
demo := $(VENV)/.demo
ready := $(VENV)/.ready
# The same, and the tools of `make check`.
tools := $(VENV)/.tools
# What builds the documentation, which needs nothing of the above.
site := $(VENV)/.site
sources := $(wildcard xla_ext/*.cc xla_ext/*.h) xla_ext/CMakeLists.txt
gpu_target := build/gpu
# Measures even if a test fails, and then fails.
on_gpu = $(1) -m pytest -m gpu tests/test_native.py; tests=$$?; $(1) -m benchmarks.gpu $(ARGS) && exit $$tests
sees_gpu := -c 'import sys, jax; sys.exit(jax.default_backend() != "gpu")' 2>/dev/null

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-slow check docs bench gpu bazel clean

help:
	@echo 'make demo    train a small Llama under jax.jit and in a quarter of its memory'
	@echo 'make test    run the tests but the slowest'
	@echo 'make test-slow  run those'
	@echo 'make check   lint, format, types, import layers'
	@echo 'make docs    build the documentation as a site, in build/site'
	@echo 'make bench   measure on the CPU; writes docs/benchmarks.md'
	@echo 'make gpu     measure on the GPU; writes benchmarks/results/'
	@echo 'make bazel   build the C++ with Bazel instead, and try it'
	@echo 'make setup   only set up $(VENV)'
	@echo 'make clean   remove what the others made'

setup: $(ready)

demo: $(demo)
	$(bin)/jturnip demo $(ARGS)

# On all cores, or eight: neighbours together, so that what compiles the same is mostly in
# one process. Says what took longest.
test: $(ready)
	$(bin)/python -m pytest -n auto --maxprocesses=8 --dist worksteal --durations=10 $(ARGS)

# What needs the longest to compile, and is like what `make test` runs.
test-slow: $(ready)
	$(MAKE) --no-print-directory test ARGS='-m slow $(ARGS)'

# All four, whatever each finds.
check: $(tools)
	@failed=; \
	for tool in 'ruff check' 'ruff format --check --diff --quiet' \
	    'pyright --pythonpath $(bin)/python' 'lint-imports'; do \
	  echo "$$tool"; $(bin)/$$tool || failed="$$failed $${tool%% *}"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# Fails on a link that leads nowhere, and on a page that is not in the navigation.
docs: $(site)
	$(bin)/mkdocs build --strict $(ARGS)

bench: $(ready)
	$(bin)/python -m benchmarks.cpu $(ARGS)

# Where PYTHON already has a jax that sees the GPU, that one is used, offline and without
# changing it: jturnip goes to a folder of its own, built for that jaxlib. Else an
# environment is set up with jax's CUDA packages.
gpu:
	@if $(PYTHON) $(sees_gpu); then $(MAKE) --no-print-directory gpu-here; \
	else $(MAKE) --no-print-directory gpu-venv; fi

.PHONY: gpu-here gpu-venv
gpu-here:
	rm -rf $(gpu_target)
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index \
	  --target $(gpu_target) .
	export PYTHONSAFEPATH=1 PYTHONPATH=$(gpu_target):. ; $(call on_gpu,$(PYTHON))

gpu-venv:
	@test -e /proc/driver/nvidia/version || command -v nvidia-smi >/dev/null || { \
	  echo 'make gpu needs an NVIDIA GPU and its driver; this machine shows neither.'; \
	  exit 1; }
	$(MAKE) --no-print-directory setup VENV=$(VENV)-$(CUDA) EXTRAS=$(EXTRAS),$(CUDA)
	@$(VENV)-$(CUDA)/bin/python $(sees_gpu) || { \
	  echo 'jax[$(CUDA)] does not see the GPU: see $(VENV)-$(CUDA)/bin/jturnip doctor.'; \
	  echo 'Where the driver is older, try CUDA=cuda12.'; exit 1; }
	$(call on_gpu,$(VENV)-$(CUDA)/bin/python)

# In an environment without jturnip, so that what is tried is what Bazel built.
bazel: $(VENV)-bazel/.ready
	@command -v bazel >/dev/null || { \
	  echo 'make bazel needs bazel; Debian has it as bazel-bootstrap.'; exit 1; }
	PYTHON_BIN_PATH='$(abspath $(VENV)-bazel/bin/python)' xla_ext/bazel_build.sh

$(VENV)-bazel/.ready:
	@$(PYTHON) -m venv $(VENV)-bazel
	@$(VENV)-bazel/bin/python -m pip install --quiet --disable-pip-version-check \
	  '$(JAX)' nanobind
	@touch $@

clean:
	rm -rf .venv* build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf *.egg-info jturnip/native/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python files are used from the checkout, so that an edit needs no set-up; the C++ is built
# by pip, and again when it changes. set_up installs what the extras $(1) name.
install = $(bin)/python -m pip install --quiet --disable-pip-version-check
define require_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'jturnip needs Python 3.11 or newer, and $(PYTHON) is not. Name one that is:'; \
	  echo '  make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
endef
define set_up
	$(require_python)
	@for compiler in "$$CXX" c++ g++ clang++; do \
	  command -v "$$compiler" >/dev/null && exit 0; done; \
	  echo 'jturnip builds a small C++ extension, and no C++ compiler is on the PATH.'; \
	  echo 'Install one (Debian, Ubuntu: apt install g++), or name it: CXX=...'; exit 1
	@echo 'Setting up $(VENV): once, and when pyproject.toml or xla_ext changes.'
	@echo '  1 of 3: an environment, by $(PYTHON)'
	@test -x $(bin)/pip || $(PYTHON) -m venv $(VENV)
	@echo '  2 of 3: $(JAX); downloads some 100 MB where it is not there'
	@$(install) '$(JAX)'
	@echo '  3 of 3: jturnip with its C++, and what its $(1) need; a minute or two'
	@$(install) --editable '.[$(1)]' '$(JAX)'
	@touch $@
endef

$(demo): pyproject.toml $(sources)
	$(call set_up,demo)

$(ready): pyproject.toml $(sources)
	$(call set_up,$(EXTRAS))
	@touch $(demo)

# pip cannot install an extra alone: what the extra $(1) names is read from pyproject.toml.
install_extra = $(bin)/python -c 'import tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"]["$(1)"], sep="\n")' | $(install) -r /dev/stdin

$(tools): $(ready)
	@$(call install_extra,check)
	@touch $@

$(site): pyproject.toml
	$(require_python)
	@test -x $(bin)/pip || $(PYTHON) -m venv $(VENV)
	@$(call install_extra,docs)
	@touch $@
