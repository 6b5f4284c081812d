VENV   := .venv
PYTHON := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# Data sets beside the checkout are used when they are there; the library itself knows no such path.
ifneq ($(wildcard ../shared/data),)
export FEDBILEVEL_DATA ?= $(abspath ../shared/data)
endif

.PHONY: install demo test lint format bench soak notebooks docs package lock verify-lock clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	# Only a data file of lifelines is read, and lifelines itself would need pandas below 3.
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps 'lifelines>=0.30'
	touch $@

demo: install
	rm -rf runs/demo
	$(VENV)/bin/fedbilevel demo --out runs/demo
	$(VENV)/bin/fedbilevel compare digits --seeds 3 --out runs/demo/methods

test: lint
	$(PYTHON) -m pytest --numprocesses auto --dist loadgroup

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: install
	$(PYTHON) -m benchmarks

# For example `make soak MINUTES=45 SEED=1`.
MINUTES ?= 10
SEED    ?=
soak: install
	$(PYTHON) -m soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Executes docs/notebooks where they changed; the site shows them with their outputs.
notebooks: install
	$(PYTHON) tools/notebooks.py

docs: notebooks
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build  # with --quiet, warnings would not fail it

# Wheel and sdist, tried out in a new environment without this repository.
package: install
	$(PYTHON) tools/package.py

# Pins what is installed here, with hashes; `make install` takes the newest versions that fit.
lock: install
	$(PYTHON) tools/supply_chain.py lock
	$(PYTHON) tools/supply_chain.py sbom

verify-lock: install
	$(PYTHON) tools/supply_chain.py check
	$(PYTHON) -m pip install --quiet --dry-run --no-deps --ignore-installed --only-binary=:all: \
	    --require-hashes --requirement requirements.lock

clean:
	rm -rf $(VENV) runs build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis bench*.json
