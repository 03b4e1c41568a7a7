# `make demo`, `make test` and `make docs` do all of their set-up from a fresh clone, in .venv, and take seconds when repeated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
TRITON := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist load  # nothing here waits
OLDEST_TRITON := build/triton/3.6.0
# What the installed package depends on. Modules are read from src/ and need no installation, but for new packages.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/* native/*/*) $(shell find src/thinwire -name __init__.py)

.PHONY: help setup demo test test-all test-triton test-streams test-oldest-triton test-gpu bench-gpu sanitize docs lint wheel clean

help:
	@echo "make demo    train four ways on handwritten digits: one table, one figure, under three minutes"
	@echo "make test    run the tests of the library and the command line"
	@echo "make test-all   run all tests: also whole runs of several processes, trainers, notebook, package of a method, pages of the guide, launchers, GPU script, network lab"
	@echo "make test-triton   hold the GPU kernels to the reference in an interpreter, and compile them; needs no GPU"
	@echo "make test-streams   train on a simulated GPU, which checks that streams wait for each other; needs no GPU"
	@echo "make test-oldest-triton   hold the machine code that the oldest supported Triton makes to the same"
	@echo "make test-gpu   run the tests that need a GPU"
	@echo "make bench-gpu  measure codecs and training steps on a GPU"
	@echo "make sanitize   run the C++ kernels under ThreadSanitizer, AddressSanitizer and UBSan, on damaged payloads too"
	@echo "make docs    build the docs site into site/, and fail on any warning"
	@echo "make lint    check style and types"
	@echo "make wheel   build a wheel into dist/, and test it in an environment of its own"
	@echo "make clean   remove everything that was built or written"

setup: $(READY)

# What the demo needs. `pip` prints what it does: PyTorch takes a while.
$(DEMO): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "thinwire needs Python 3.10 or later: make PYTHON=python3.x" >&2; exit 1; }
	@command -v $${CXX:-c++} > /dev/null || echo "thinwire: no C++ compiler, so codecs are slow and elastic runs refused; install one" \
		"(Debian: apt install g++; macOS: xcode-select --install), then: make clean demo" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	began=$$(date +%s); $(BIN)/python -m pip install --upgrade-strategy only-if-needed -c constraints.txt -e '.[train]' \
		&& echo "installed in $$(($$(date +%s) - began)) seconds"
	@touch $@

# Beside it what developers need. The package itself is not built again. The tests import few of these modules, and Python compiles
# a module when it is first imported.
$(READY): $(DEMO)
	$(BIN)/python -m pip install --no-compile --upgrade-strategy only-if-needed -c constraints.txt 'thinwire[train,dev,docs]'
	@touch $@

demo: $(DEMO)
	$(BIN)/thinwire demo

# The tests start many processes; each would compile the modules again if byte code could not be kept.
test: $(READY)
	$(PYTEST) -m 'not integration'

# Six processes keep two cores busy: whole runs wait, for each other and for time limits.
test-all: $(READY)
	$(PYTEST) -n 6

# Triton's interpreter must be chosen before Triton is imported, so each part is a run of its own. The conformance suite would
# take it too long. The second and third compile all launches for the real types of their arguments: the interpreter takes what
# the compiler refuses. The last compiles to machine code.
TRITON_CHECKS := $(filter-out %/check_compiled.py,$(wildcard tests/kernels/triton/check_*.py))
LAUNCHES := $(TRITON) -p helpers.compile_launches -W ignore $(TRITON_CHECKS) tests/gpu/check_codecs.py
test-triton: $(READY) $(OLDEST_TRITON)
	TRITON_INTERPRET=1 PYTHONPATH=tests $(TRITON) -p helpers.simulated_gpu -W ignore::RuntimeWarning $(TRITON_CHECKS) \
		tests/gpu/check_interpreted.py tests/gpu/check_simulated.py::test_random_compositions \
		tests/gpu/check_codecs.py -k 'not conformance'
	PYTHONPATH=tests $(LAUNCHES)
	PYTHONPATH=$(OLDEST_TRITON):tests $(LAUNCHES)
	$(TRITON) tests/kernels/triton/check_compiled.py

test-streams: $(READY)
	PYTHONPATH=tests $(TRITON) -p helpers.simulated_gpu -W ignore tests/gpu/check_training.py tests/gpu/check_simulated.py

# The oldest Triton that is supported, beside the one that PyTorch brings.
$(OLDEST_TRITON): | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(notdir $@)

test-oldest-triton: $(READY) $(OLDEST_TRITON)
	PYTHONPATH=$(OLDEST_TRITON) $(TRITON) tests/kernels/triton/check_compiled.py

# On a GPU nothing is installed: the system's Python has PyTorch.
test-gpu:
	@$(PYTHON) scripts/gpu.py kernels codecs training sanitizer

bench-gpu:
	@$(PYTHON) scripts/gpu.py overhead speed study

sanitize:
	scripts/sanitize.sh

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m nanobind.stubgen -q -m thinwire.kernels._native -o src/thinwire/kernels/_native.pyi
	$(BIN)/python -m nanobind.stubgen -q -m thinwire.comm.tcp._engine -o src/thinwire/comm/tcp/_engine.pyi
	$(BIN)/mypy

wheel: $(READY)
	rm -rf dist build/wheel-env
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt dist/thinwire-*.whl pytest pytest-xdist hypothesis
	build/wheel-env/bin/python scripts/try_wheel.py

clean:
	rm -rf $(VENV) .cache build demo dist runs site
