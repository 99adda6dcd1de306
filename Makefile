# Needs Python 3.11 or later, make and a C compiler. Everything else goes into .venv, beside this file.
PYTHON ?= python3
# The versions of Triton that `make test-stacks` tests, oldest first; constraints.txt pins one of them.
STACKS := 3.6.0 3.7.1 3.8.0 3.9.0
# What goes with one: the interpreter of triton 3.6 takes no later numpy.
BESIDE_3.6.0 := numpy==2.3.5
# Test processes at a time: one more than two cores, as tests wait too. Each holds a copy of torch.
JOBS ?= 3

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help tune test test-quick test-gpu test-stacks lint typecheck browser pictures docs clean

help:
	@echo "make tune       measure this machine's GPU on a few problems and remember the best configs"
	@echo "make test       lint, type check and all tests, compiled and interpreted (of tests/gpu only where there is a GPU)"
	@echo "make test-quick the tests of what changed since the last commit, or of ROOM=tuner; slow ones are left out"
	@echo "make test-gpu   the tests that need a GPU, with results in gpu-tests*.xml; SHARD=1/2 for a part, PY=python3 for"
	@echo "                an interpreter of your own, ARGS for pytest"
	@echo "make test-stacks  what depends on Triton, interpreted and compiled ahead, on triton $(STACKS)"
	@echo "make lint       ruff: rules and format"
	@echo "make typecheck  mypy"
	@echo "make browser    headless Chromium for the tests of pages, if there is none (they skip without it)"
	@echo "make pictures   draw the pictures, and write the figures of the pages, from what is committed"
	@echo "make docs       the documents as a site, in site/; dead links fail"
	@echo "make clean      remove caches and build outputs; $(VENV) and remembered results stay"
	@echo "Variables: PYTHON=$(PYTHON) (creates $(VENV)), JOBS=$(JOBS) (test processes at a time)"

# setuptools comes first and is used without build isolation, so that the build is pinned like the rest.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing tritile and its pinned dependencies into $(VENV) (a few minutes the first time)"
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	    $(PYTHON) -c 'import sys; sys.exit("tritile needs Python 3.11 or later: make PYTHON=..." if sys.version_info < (3, 11) else 0)' \
	    && $(PYTHON) -m venv --clear $(VENV); }
	$(PY) -m pip install --quiet -c constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[tuning,test,lint]"
	@touch $@

tune: $(INSTALLED)
	$(PY) tuning/autotune.py --quick

# Kernels are compiled in the first command and interpreted in the second; tests/conftest.py says which test is whose.
# Each process starts with its own files, so that a file's fixtures are made once; then idle ones take over others' tests.
test: lint typecheck
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not stacks"
	TRITON_INTERPRET=1 $(PY) -m pytest -n $(JOBS) --dist worksteal -m "not stacks"

# Status 5: none of these files is of this process.
test-quick: $(INSTALLED)
	@files="$$($(PY) tests/quick.py $(ROOM))"; [ -z "$$files" ] && exit; \
	for how in "" TRITON_INTERPRET=1; do \
	    env $$how $(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not stacks and not slow" $$files || [ $$? = 5 ] || exit 1; \
	done

# Each Triton beside the pinned rest: in a folder that comes first on Python's path.
STACK_TESTS := tests/kernels $(addprefix tests/unit/test_,autotune.py decorated.py explain.py forms.py grouped.py \
    launch.py like_triton.py private_names.py quantize.py recalled.py source.py table.py traced.py versions.py)

test-stacks: $(STACKS:%=test-stack-%)

test-stack-%: $(VENV)/triton-%/.installed
	@echo "triton $*:"
	PYTHONPATH=$(abspath $(VENV)/triton-$*) $(PY) -m pytest -n $(JOBS) $(STACK_TESTS)
	TRITON_INTERPRET=1 PYTHONPATH=$(abspath $(VENV)/triton-$*) $(PY) -m pytest -n $(JOBS) $(STACK_TESTS)

$(VENV)/triton-%/.installed: $(INSTALLED)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) triton==$* $(BESIDE_$*)
	@touch $@

# As many processes as there are cores, which compile most of the time; what is marked serial runs alone, after them.
GPU_TESTS = -m pytest tests/gpu $(if $(SHARD),--shard $(SHARD)) $(ARGS) -m
GPU_JOBS ?= $(shell nproc)

# On a machine without network an interpreter that has torch, triton and pytest will do: make test-gpu PY=python3.
test-gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(INSTALLED))
	status=0; \
	$(PY) $(GPU_TESTS) "gpu and not serial" -n $(GPU_JOBS) --dist worksteal --junitxml=gpu-tests.xml || status=1; \
	$(PY) $(GPU_TESTS) "gpu and serial" --junitxml=gpu-tests-serial.xml || status=1; \
	exit $$status

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: $(INSTALLED)
	$(PY) -m mypy

# As root on a machine with apt its package; else a build of playwright's own, beside its other files.
browser: $(INSTALLED)
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null \
	    || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	    || $(PY) -m playwright install chromium

pictures: $(INSTALLED)
	$(PY) tuning/picture.py 300x200x150 --dtype float32 --config "tile BLOCK_M=64 BLOCK_N=64" --target nvidia-h200 \
	    --tile 19 --step 5 --output tuning/pictures/tiling.svg
	$(PY) tuning/figures.py

$(VENV)/.installed-docs: $(INSTALLED)
	$(PY) -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[docs]"
	@touch $@

# NO_MKDOCS_2_WARNING: the theme else tells of another release of mkdocs, at each build.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .triton
	find tritile tests tuning -name __pycache__ -type d -prune -exec rm -rf {} +
