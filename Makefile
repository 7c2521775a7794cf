# `make help` lists what there is. Everything is set up on first use and reused afterwards.
#   PYTHON=python3.12   the interpreter .venv is made from (3.11 to 3.14)
#   ARGS="..."          handed to the demo or to pytest
#   JOBS=2              test processes; as many as cores, at most 4

PYTHON ?=
ARGS ?=
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -gt 4 ] && echo 4 || echo $$n)

BIN := .venv/bin
CPP = $(shell find ffi -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-latest cuda demo test test-quick test-cuda bench test-kernels test-gpu bench-gpu writers check sanitize format doctor wheel smoke docs clean

help:  ## list the targets
	@sed -n 's/^#   /  /p' Makefile; echo
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup:  ## .venv: the oldest supported JAX, extras, tools, and the built library
	@python=$$(tools/find-python main $(PYTHON)) && \
	  $$python tools/environment.py .venv --constraints tools/constraints-oldest.txt

setup-latest: setup  ## .venv-latest: the newest JAX, where there is a Python 3.12 or newer
	@if python=$$(tools/find-python latest); then \
	  $$python tools/environment.py .venv-latest --headers .venv; \
	else echo "==> no working Python 3.12 or newer: the newest JAX is left out"; fi

cuda:  ## setup with the kernels for NVIDIA GPUs; needs no GPU, and stays on from then on
	@JAXFP8_CUDA=1 $(MAKE) --no-print-directory setup-latest

demo: setup  ## quantize a real sentence encoder, rewrite it and compare; ARGS="--help" for more
	@$(BIN)/python examples/minilm_demo.py $(ARGS)

# ARGS may name a part of the suite with no test for one of the runs (5), not for all of them.
test: setup-latest  ## the suite on the oldest JAX, then a part of it on the newest
	@echo "==> about 25 minutes on two cores; make test-quick takes five"
	@ran=0; failed=0; \
	note() { case $$1 in 0) ran=1;; 5) ;; *) failed=1;; esac; }; \
	$(call suite,.venv,--old-emitters); note $$?; \
	$(call suite,.venv,-m same_bits); note $$?; \
	if [ -x .venv-latest/bin/pytest ]; then \
	  $(call suite,.venv-latest,--one-case --share 6 -m "not gpu and not any_jax and not slow"); note $$?; \
	fi; [ $$ran = 1 ] && [ $$failed = 0 ]

test-quick: setup  ## one case of every other test, on the oldest JAX, in five minutes
	@$(call suite,.venv,--old-emitters --one-case --share 2 -m "not gpu and not slow")

test-cuda: cuda  ## the tests that need the library for GPUs, and no GPU
	@$(call suite,.venv,--require-cuda-library -m "cuda_library and not gpu")

suite = { $(1)/bin/python tools/show_versions.py; $(1)/bin/pytest -n $(JOBS) $(2) $(ARGS); }

check: setup  ## format, lint, types, import contracts, and tables beside their data
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/lint-imports
	$(BIN)/python tools/measurement_tables.py --check
	$(BIN)/python tools/relative_words.py

test-kernels: setup  ## every CPU kernel that runs here against float64, in C++, as the library has it
	@$(call checks,cpu,build/checks,$(LIBRARY),--target native_kernels native_quantize,-R native)

sanitize: setup  ## test-kernels, and all CPU kernels under ASan and UBSan; both libraries fuzzed; threads under TSan
	@$(call checks,cpu,build/checks,$(LIBRARY),,)
	@$(call checks,cuda,build/checks-cuda,-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python,,)

LIBRARY = -DJAXFP8_CPU_ARCHIVE=$(CURDIR)/build/cmake/cpu/libjaxfp8_cpu_static.a
checks = $(BIN)/cmake -G Ninja -S ffi/tests/$(1) -B $(2) $(3) \
	-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null && $(BIN)/cmake --build $(2) $(4) && \
	$(BIN)/ctest --test-dir $(2) -j $(JOBS) --verbose $(5)

format: setup  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

doctor: setup  ## what is installed, what runs, and the command that mends the rest
	@$(BIN)/python -m jaxfp8 doctor

wheel: setup  ## dist/*.whl, for every Python 3 on this platform; with CUDA after `make cuda`
	@$(BIN)/python tools/wheel.py build

smoke: wheel  ## install the wheel into a bare environment without compilers, and try it
	@$(BIN)/python tools/wheel.py try

bench: setup  ## how fast the kernels are here, beside XLA and others; ARGS="--help" for more
	@$(BIN)/python -m jaxfp8 bench $(ARGS)

test-gpu:  ## the tests that need a GPU, with the python3 and the JAX that the machine has
	@python3 tools/gpu.py test $(ARGS)

bench-gpu:  ## the figures of docs/measured_h200.md, on this machine's GPU
	@python3 tools/gpu.py bench $(ARGS)

writers: setup  ## read files that other programs write, and compare; installs them into build/writers
	@[ -x build/writers/bin/pip ] || $(BIN)/python -m venv build/writers
	build/writers/bin/pip install --quiet -r tests/writers/requirements.txt
	rm -rf build/writers/files && build/writers/bin/python tests/writers/write.py build/writers/files
	$(BIN)/pytest -q tests/writers/compare.py

docs: setup  ## build/docs/index.html: guides and reference as one site; a warning is an error
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/docs
	$(BIN)/python tools/relative_words.py docs README.md

clean:  ## remove all that was built, the environments too
	rm -rf .venv .venv-latest build dist .pytest_cache .mypy_cache .ruff_cache
	rm -rf .import_linter_cache .hypothesis
