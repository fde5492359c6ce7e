# The verbs of the project.  Each target is thin: it calls one program, which has --help.
.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
PY := $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/patches:$(CURDIR)/kernel:$(CURDIR)/kernel/python:$(CURDIR)/eval:$(CURDIR)/deploy

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

# The project's own environment, made anew when its lock file changes.
$(VENV)/.ready: requirements/dev.txt
	@command -v python3 >/dev/null || { echo "error: there is no python3 on PATH; apt-get install python3 python3-venv" >&2; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 is older than 3.11" >&2; exit 1; }
	python3 -m venv --clear $(VENV) || { echo "error: python3 -m venv failed; apt-get install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.txt
	@touch $@

.PHONY: venv
venv: $(VENV)/.ready ## Make the project's own environment (.venv) from its lock file

.PHONY: build
build: venv ## Build a release into dist/ (VALIDATION=1 adds sm_80 and sm_90 code)
	@$(PY) -m v100_build build $(if $(VALIDATION),--validation)

.PHONY: verify
verify: venv ## Re-hash a release (RELEASE=dist/...) and name what differs
	@$(PY) -m v100_build verify $(RELEASE)

.PHONY: test
test: venv ## Run the tests that need no GPU (under 30 minutes on two cores, cold)
	@$(PY) -m pytest -q tests --ignore=tests/deploy

.PHONY: lint
lint: venv ## Check formatting and lint: Python, shell, C++/CUDA, YAML
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@git ls-files -z '*.sh' .ci/run | xargs -0 -r $(VENV)/bin/shellcheck
	@git ls-files -z '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -0 -r $(VENV)/bin/clang-format --dry-run -Werror
	@git ls-files -z '*.yml' '*.yaml' | xargs -0 -r $(VENV)/bin/yamllint --strict

.PHONY: format
format: venv ## Rewrite the sources in the project's format
	@$(PY) -m ruff check --fix -q . ; $(PY) -m ruff format .
	@git ls-files -z '*.cu' '*.cuh' '*.cpp' '*.h' | xargs -0 -r $(VENV)/bin/clang-format -i

.PHONY: lock
lock: venv ## Write the lock files anew from requirements/*.in (needs uv on PATH)
	@for name in dev serve-cpu serve-cuda; do \
	  flags="--generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header --python-version 3.11"; \
	  case $$name in dev) flags="$$flags --universal";; serve-cpu) flags="$$flags --no-deps";; serve-cuda) flags="$$flags --exclude-newer 2026-04-28";; esac; \
	  uv pip compile -q $$flags requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done
