# `make demo` and `make test` need Python 3.11 or newer, git and make; everything else they install into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# one thread a process: torch's own threads gain little on small models, and tests run side by side
export OMP_NUM_THREADS ?= 1
# uv leaves it to Python to keep compiled modules: without them, an import of torch takes 3.0 s instead of 1.6
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-deploy test-docker test-gpu newest oldest faults smoke-all check format docs dist lock licences bench bench-deploy bench-gpu bench-kernels bench-quick mutants matrix clean

demo: $(VENV)/installed
	$(BIN)/fedbn-flwr compare --methods fedavg,fedavg+gn,fixbn,fedbn,fedtan,fedtan:carry=true,centralized \
		--model small-cnn --local-steps 1 --rounds 200 --results-dir results/demo

# as many processes as cores: a third one only imports and collects once more; hypothesis draws the same examples in
# each run, and others in `make test-all`
test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-seed=0

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# with the newest Flower and torch in the environment; PRE=--pre takes what is not released yet
newest: $(VENV)/installed
	$(BIN)/pip install --upgrade $(PRE) flwr torch torchvision
	$(BIN)/pip list | grep -E "^(flwr|torch|torchvision) " | tee newest.txt
	$(MAKE) test

# with the oldest torch that pyproject.toml allows
oldest: $(VENV)/installed
	$(BIN)/pip install torch==2.6.0 torchvision==0.21.0
	$(MAKE) test

# the compose file's services as plain processes, without Docker
test-deploy: $(VENV)/installed
	$(BIN)/python -m pytest -s -rs tests/deployment/test_loopback_run.py

# the image, the compose file and what they let through, with real containers: needs Docker with Compose, and root
test-docker: $(VENV)/installed
	FEDBN_TEST_DOCKER=1 $(BIN)/python -m pytest -s -rs -n 0 tests/deployment/test_docker.py

# on a machine with a GPU, in ten minutes: what tests show without one, and what they cannot
test-gpu: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu

# kills and cuts real processes, and shows what becomes of the run: about 25 minutes
faults: $(VENV)/installed
	$(BIN)/python -m pytest -s -rs tests/deployment/test_faults.py

# every table and figure of the papers in small, one after another; what is finished is not run again
smoke-all: $(VENV)/installed
	set -e; for name in $$($(BIN)/fedbn-flwr recipes --json | $(BIN)/python -c \
		"import json, sys; print(*(row['name'] for row in json.load(sys.stdin)))"); \
	do $(BIN)/fedbn-flwr reproduce $$name --smoke --side-by-side 2; done

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_floors.py

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# writes pages from the code, and the site into the folder `site`
docs: $(VENV)/installed
	$(BIN)/python docs/make_options.py
	$(BIN)/python docs/make_projects.py
	$(BIN)/python docs/make_wire.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_results.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# a source distribution and a wheel in `dist`, checked as a package index would
dist: $(VENV)/installed
	$(BIN)/python -m uv tool run --from build pyproject-build --installer uv .
	$(BIN)/python -m uv tool run twine check --strict dist/*

# the versions in the image, which the Dockerfile installs
lock: $(VENV)/installed
	echo hatchling | $(BIN)/python -m uv pip compile --quiet --python-version 3.11 --no-header --no-annotate \
		--no-emit-index-url --upgrade --extra cli --extra models --extra data --extra tensorboard --extra timm \
		--output-file image.lock pyproject.toml -

# the licence of each package of the environment
licences: $(VENV)/installed
	$(BIN)/python -m uv tool run pip-licenses --from=mixed --python=$(BIN)/python

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.bench

bench-quick: $(VENV)/installed
	$(BIN)/python -m benchmarks.bench --quick

# on a machine with a GPU: five minutes, and the rows for docs/benchmarks.md in results/gpu/bench.md
bench-gpu: $(VENV)/installed
	$(BIN)/python -m benchmarks.bench --gpu

# kernels, copies and waits of steps and rounds, on the simulated accelerator of the tests: three minutes
bench-kernels: $(VENV)/installed
	$(BIN)/python -W ignore -m benchmarks.kernels

# rounds of real processes on the loopback, behind relays that delay; messages take minutes a round
bench-deploy: $(VENV)/installed
	$(BIN)/python -m benchmarks.deploy

# changes files in a copy, one line at a time, and lists the changes that no test notices:
# make mutants FILES="strategies/fedbs.py" TESTS="tests/strategies/test_fedbs.py"
TESTS ?= tests
mutants: $(VENV)/installed
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --editable ".[mutants]"
	rm -rf build/mutants && mkdir -p build/mutants && git ls-files -z | xargs -0 cp --parents -t build/mutants
	printf '%s = [%s]\n' only_mutate "$$(printf '"%s", ' $(FILES))" \
		pytest_add_cli_args_test_selection "$$(printf '"%s", ' $(TESTS))" >> build/mutants/pyproject.toml
	cd build/mutants && $(abspath $(BIN))/mutmut run && $(abspath $(BIN))/mutmut results

# the plug-in part of the wheel, without extras, under other versions of Python and Flower: make matrix CELLS="3.13:1.38.0"
CELLS ?= 3.11:1.22.0 3.11:1.30.0 3.11:1.35.0 3.11:1.38.0 3.11:1.41.0 3.11:1.42.0 3.12:1.22.0 3.12:1.38.0 3.12:1.41.0 3.12:1.42.0 3.13:1.22.0 3.13:1.38.0 3.13:1.41.0 3.13:1.42.0 3.14:1.35.0 3.14:1.38.0 3.14:1.41.0 3.14:1.42.0 3.15:1.38.0 3.15:1.42.0
matrix: $(VENV)/installed
	$(BIN)/python -m tests.matrix $(CELLS)

# uv resolves and unpacks several times faster than pip; where it cannot be had, pip does the same
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv \
		&& $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --editable ".[dev]" \
		|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
