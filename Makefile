# Every target sets up what it needs: `make demo` on a fresh checkout is enough.

PYTHON ?= python3
RUN := .venv/bin/python
export JOBS ?= 2
# Compiled modules are kept: tests start many processes, and each would compile them again.
unexport PYTHONDONTWRITEBYTECODE
AT_ONCE := --numprocesses=$$(($(JOBS) + 1)) --dist=worksteal
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest $(AT_ONCE)
# What the front ends need, on top of .venv: torchmetrics imports transformers wherever that is
# installed, which takes seconds in every process.
FRONT_ENDS := .versions/front-ends
FRONT_END_EXAMPLES := 11_fabric.py 12_hugging_face_lora.py ray_train.py
FRONT_END_TESTS := tests/integrations tests/docs/test_other_libraries.py \
    $(FRONT_END_EXAMPLES:%="tests/test_examples.py::test_an_example_shows_what_it_claims[%]")

.DEFAULT_GOAL := help
.PHONY: help setup demo check docs explore test test-faults test-front-ends soak test-versions

help: ## Show this list
	@echo "Targets of lightning-loco (make PYTHON=python3.12 ... chooses the Python of .venv,"
	@echo "make JOBS=4 ... for that many cores):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.installed ## Make .venv and install the project with the tested versions into it

demo: .venv/.installed ## Train a small GPT with GASLoC on a ring of 4 CPU workers
	$(RUN) train.py experiment=demo

explore: .venv/.installed ## Try orders of events drawn from SEED for SECONDS (600), until a property breaks
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(RUN) -m tests.exploration --jobs $(JOBS) --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

# One more at once than there are cores: for much of their time tests wait for each other's processes.
test: .venv/.installed ## Run the tests of one process and of the pool of four, and the doctests
	$(PYTEST) -m "not process and not recovery and not soak" --durations=10

test-faults: .venv/.installed ## Run the tests of faults and recovery: kills, signals, checkpoints, launchers, elastic members
	OMP_NUM_THREADS=1 $(RUN) -m tests.harness.rerun $(AT_ONCE) -m "(process or recovery) and not soak" --durations=10

test-front-ends: $(FRONT_ENDS)/.installed ## Run the tests and examples of Fabric, Hugging Face and Ray
	OMP_NUM_THREADS=1 $(FRONT_ENDS)/bin/python -m pytest $(AT_ONCE) --durations=10 \
	    $(or $(TESTS),$(FRONT_END_TESTS))

soak: .venv/.installed ## Run what takes too long for every change (an hour and more), test-front-ends and test-versions
	$(PYTEST) --full -m soak --durations=10
	OMP_NUM_THREADS=1 $(RUN) -m tests.exploration --jobs $(JOBS) --seconds 3600 --record
	$(MAKE) test-front-ends
	$(MAKE) test-versions

test-versions: .venv/.installed ## Run what depends on them with other versions of Lightning and Python
	OMP_NUM_THREADS=1 $(RUN) -m tests.harness.versions $(if $(INSTALL),--install) --only "$(ONLY)" $(TESTS)

check: .venv/.installed ## Lint, check the formatting, the layers of imports and the types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	.venv/bin/lint-imports --no-cache
	$(RUN) -m mypy

docs: .venv/.installed ## Build the documentation into build/site; broken links are errors
	$(RUN) docs/write_pages.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Done again only when the requirements change.
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
	    echo "There is no '$(PYTHON)' here. Install Python 3.10 or newer, or name one:" \
	         "make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "lightning-loco needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	         "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(FRONT_ENDS)/.installed: .venv/.installed
	$(RUN) -m venv --without-pip $(FRONT_ENDS)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	    $(RUN) -c "$$site" > "$$($(FRONT_ENDS)/bin/python -c "$$site")/venv.pth"
	@# Most modules are never imported: those that are get compiled then.
	$(RUN) -m pip --python $(FRONT_ENDS) install --disable-pip-version-check --no-compile \
	    -c constraints.txt -e ".[front-ends]"
	@touch $@
