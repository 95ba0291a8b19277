# Targets for people and for .ci/run.  Python is the distribution's: it has the libraries.
PYTHON := /usr/bin/python3
TESTS  ?= tests
LINT   := .lint/bin

.PHONY: help setup demo test lint types format bench system-test vm-test deb deb-trixie deb-check clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: ## install the Debian packages that are missing
	@.ci/setup

demo: setup ## the agent on a private bus: discovery, a lease, a stranger, a fault; about half a minute
	@$(PYTHON) examples/demo.py

test: setup ## run the tests; TESTS=path chooses some
	$(PYTHON) -m pytest $(TESTS)

lint: .lint/ready ## ruff: rules and format
	$(LINT)/ruff check .
	$(LINT)/ruff format --check .

types: .lint/ready ## mypy, strict
	$(LINT)/mypy --python-executable $(PYTHON)

format: .lint/ready ## put the sources into ruff's format
	$(LINT)/ruff check --fix .
	$(LINT)/ruff format .

bench: setup ## measure latency, uevent to signal, memory, idle CPU against the aims
	@$(PYTHON) bench/run.py

system-test: TESTS := tests/system
system-test: setup ## the package under a real systemd, in containers; as root; TESTS=path chooses some
	@.ci/setup-system
	$(PYTHON) -m pytest $(TESTS)

vm-test: TESTS := tests/vm
vm-test: setup ## the package on a real kernel with real hotplug, in a virtual machine; as root; TESTS=path chooses some
	@.ci/setup-vm
	$(PYTHON) -m pytest $(TESTS)

deb: ## build the Debian package into dist/, with lintian's report
	@.ci/setup-deb
	@.ci/deb

deb-trixie: ## the same in a Debian 13 of its own, into dist/trixie/
	@.ci/setup-deb
	@.ci/deb trixie

deb-check: ## install the package of dist/ in a Debian of its own, use, remove and purge it; SUITE=trixie
	@.ci/setup-deb
	@.ci/deb-check $(SUITE)

clean: ## remove what the other targets made
	rm -rf build dist .lint .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.lint/ready: .ci/requirements-lint.txt | setup
	$(PYTHON) -m venv .lint
	$(LINT)/pip install --quiet --disable-pip-version-check --requirement .ci/requirements-lint.txt
	touch $@
