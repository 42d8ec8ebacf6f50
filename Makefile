# The only commands: `make demo`, `make test`, `make check`, `make soak`, `make docs`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Packages that read the files which `export` and `launch` write; tests skip what is not installed.
LAUNCHERS := accelerate deepspeed hjson einops msgpack py-cpuinfo \
	kubernetes-validate jsonschema jsonschema-specifications referencing rpds-py attrs importlib_resources

.PHONY: demo test check soak docs env clean

demo: $(STAMP)
	$(BIN)/meshwright demo

# Hundreds of processes import the same files: bytecode is kept, also where the environment forbids it.
WITH_BYTECODE := PYTHONDONTWRITEBYTECODE=

# Two processes, each with its own pool of ranks. A file stays on one process, and files run in the order of
# the folders: tests/equivalence, whose files take longest, starts first, and short unit tests end the run.
test: $(STAMP)
	$(WITH_BYTECODE) $(BIN)/python -m compileall -q src
	$(WITH_BYTECODE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not soak" \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder

# Ends with the table of faults. Fewer trials: MESHWRIGHT_TEST_TRIALS=100 make soak.
soak: $(STAMP)
	$(WITH_BYTECODE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "soak or fault or hypothesis" \
		--hypothesis-profile soak

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/codespell src docs tests bench examples recipes .github README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md

# build/site/index.html: opens without a server and without a network.
docs: $(STAMP)
	$(BIN)/python docs/site.py

env: $(STAMP)

# torch first and by exact pin: a range would pull the CUDA build and gigabytes with it.
# accelerate and deepspeed apart: transformers behaves differently where it finds them.
# timm and torchvision apart: torchvision is built for CUDA, and transformers stumbles over it beside a CPU build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade \
		--target $(VENV)/vision timm torchvision
	-DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--upgrade --no-build-isolation --target $(VENV)/launchers $(LAUNCHERS)
	touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache .hypothesis
