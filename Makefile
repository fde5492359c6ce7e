# The verbs of the project.  Each target is thin: it calls one program, which has --help.
.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
PY := $(VENV)/bin/python
export PYTHONPATH := $(CURDIR)/patches:$(CURDIR)/kernel:$(CURDIR)/kernel/python:$(CURDIR)/eval:$(CURDIR)/deploy

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

# An environment, made anew when its lock file changes.  One make at a time: a second one waits, and
# finds it ready.
define make_venv
	@command -v python3 >/dev/null || { echo "error: there is no python3 on PATH; apt-get install python3 python3-venv" >&2; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 is older than 3.11" >&2; exit 1; }
	@mkdir -p build && exec 9> build/venv.lock && flock 9 && if [ $@ -nt $< ]; then exit 0; fi && \
	echo "making $(@D) from $<" && \
	{ python3 -m venv --clear $(@D) || { echo "error: python3 -m venv failed; apt-get install python3-venv" >&2; exit 1; }; } && \
	$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $< && \
	tr : '\n' <<< "$$PYTHONPATH" > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-v100.pth" && \
	touch $@
endef

# The project's own, with this checkout's packages on its path (`python -m v100_gate` works in it).
$(VENV)/.ready: requirements/dev.txt
	$(make_venv)

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
	@$(PY) -m pytest -q tests --ignore=tests/deploy/hosts

.PHONY: demo
demo: venv ## Build, serve on CPU and gate the patched vLLM against its control (STARTS=2: twice)
	@$(PY) -m v100_gate demo --starts $(or $(STARTS),1)

.PHONY: gate gate-check
gate: venv ## Run what a pull request has to show here, write docs/evidence/merge-gate.json (PARTS=)
	@$(PY) -m v100_gate merge $(PARTS)
gate-check: venv ## Say whether the committed merge-gate.json stands for this tree
	@$(PY) -m v100_gate merge-check

.PHONY: evidence-check
evidence-check: venv ## Say whether the committed GPU evidence belongs to this tree
	@$(PY) -m v100_operator verify docs/evidence && $(PY) -m server_proof.verify docs/evidence

.PHONY: test-upstream
test-upstream: venv ## Run upstream's own CPU tests on the stock and the patched tree (slow)
	@$(PY) tests/patches/upstream/run.py

.PHONY: sm70-test
sm70-test: venv ## Run the sm_70 machine code of every kernel in the emulator, and the emulator's tests
	@$(PY) -m pytest -q -m "sm70 or not slow" tests/sm70sim && $(PY) -m pytest -q -m sm70 tests/kernel

.PHONY: v100-model
v100-model: venv ## Model the benchmark shapes on a V100: table, JSON, plot in results/v100-model/
	@$(PY) -m sm70sim model

.PHONY: v100-validate
v100-validate: venv ## Compare the cycle model with published V100 figures
	@$(PY) -m sm70sim validate

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
	@for name in dev deploy serve-cpu serve-cuda; do \
	  flags="--generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header --python-version 3.11"; \
	  case $$name in dev|deploy) flags="$$flags --universal";; serve-cpu) flags="$$flags --no-deps";; serve-cuda) flags="$$flags --exclude-newer 2026-04-28";; esac; \
	  uv pip compile -q $$flags requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done

# Deployment: Ansible in an environment of its own.
DEPLOY_VENV := build/venv-deploy
ANSIBLE = ANSIBLE_CONFIG=$(CURDIR)/deploy/ansible.cfg $(DEPLOY_VENV)/bin/ansible-playbook -i $(INVENTORY)
RELEASE_VARS = -e release_dir=$(abspath $(RELEASE)) $(if $(WHEELHOUSE),-e release_wheelhouse=$(abspath $(WHEELHOUSE)))

$(DEPLOY_VENV)/.ready: requirements/deploy.txt
	$(make_venv)

.PHONY: inventory-args release-args hosts-args
inventory-args:
	@test -n "$(INVENTORY)" || { echo "error: say INVENTORY=FILE (start from deploy/inventory/example.yml)" >&2; exit 1; }
	@test -e "$(INVENTORY)" || { echo "error: there is no inventory $(INVENTORY)" >&2; exit 1; }
release-args:
	@test -f "$(RELEASE)/manifest.json" || { echo "error: say RELEASE=FOLDER, one that make build wrote" >&2; exit 1; }
# Ansible itself takes an inventory without hosts for a success.
hosts-args: inventory-args $(DEPLOY_VENV)/.ready
	@graph=$$(ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED=true $(DEPLOY_VENV)/bin/ansible-inventory -i $(INVENTORY) --graph v100_nodes 2>&1) && \
	grep -q -- '--[^@]' <<< "$$graph" || { echo "$$graph" >&2; echo "error: $(INVENTORY) has no host in the group v100_nodes" >&2; exit 1; }

.PHONY: wheelhouse
wheelhouse: release-args $(DEPLOY_VENV)/.ready ## Fetch the wheels of a release's lock file (RELEASE=) into dist/wheelhouse
	$(DEPLOY_VENV)/bin/pip download --require-hashes --no-deps -r $(RELEASE)/serve-cuda.txt -d dist/wheelhouse

.PHONY: preflight
preflight: inventory-args release-args hosts-args ## Check nodes and profiles against a release (INVENTORY=, RELEASE=, WHEELHOUSE=)
	@$(ANSIBLE) deploy/playbooks/preflight.yml $(RELEASE_VARS) $(ARGS)

.PHONY: deploy
deploy: inventory-args release-args hosts-args ## Roll a release out: canary, gate, automatic return (INVENTORY=, RELEASE=, WHEELHOUSE=)
	@$(ANSIBLE) deploy/playbooks/site.yml $(RELEASE_VARS) $(ARGS)

.PHONY: gate-nodes rollback drain status
gate-nodes: hosts-args ## Gate what runs on the nodes (INVENTORY=)
	@$(ANSIBLE) deploy/playbooks/gate.yml $(ARGS)
rollback: hosts-args ## Return the nodes to the release before (INVENTORY=, ARGS="--limit NODE")
	@$(ANSIBLE) deploy/playbooks/rollback.yml $(ARGS)
drain: hosts-args ## Take nodes out without losing a request (INVENTORY=, ARGS="--limit NODE"; -e v100_back=true)
	@$(ANSIBLE) deploy/playbooks/drain.yml $(ARGS)
status: hosts-args ## Show release, hashes, routes, KV budget and last gate of the nodes (INVENTORY=)
	@$(ANSIBLE) deploy/playbooks/status.yml $(ARGS)

.PHONY: test-deploy
test-deploy: venv $(DEPLOY_VENV)/.ready ## Deploy onto booted systemd hosts (root; under 15 minutes)
	@tests/deploy/run.sh $(DEPLOY_VENV) $(ARGS)
