# Each target sets up what it needs, also on a clean clone; nothing has to be run first.

PYTHON ?= python3
PORT ?= 3000
BIN := .venv/bin
INSTALLED := .venv/installed
TRACES := $(CURDIR)/traces.jsonl

export BENTOML_DO_NOT_TRACK := True
export HF_HUB_OFFLINE := 1

.PHONY: help serve test lint bench soak bento clean

help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

serve: export BENTOML_CONFIG_OVERRIDES ?= {"services": {"SentenceEmbedder": {"tracing": {"sample_rate": 1.0, "excluded_urls": "livez,readyz,healthz,metrics"}}}}
serve: $(INSTALLED) ## the example service on http://localhost:3000 (PORT=...), compiled and traced
	@if [ -n "$$OTEL_EXPORTER_OTLP_ENDPOINT" ]; then \
		export OTEL_TRACES_EXPORTER=otlp; \
		echo "Traces go to $$OTEL_EXPORTER_OTLP_ENDPOINT"; \
	else \
		export OTEL_TRACES_EXPORTER=bentoml_compile_file BENTOML_COMPILE_TRACE_FILE=$(TRACES); \
		echo "Traces go to ./traces.jsonl: see them as a tree with  $(BIN)/bentoml-compile trace traces.jsonl"; \
	fi; \
	exec $(BIN)/bentoml serve --port $(PORT)

test: $(INSTALLED) ## all tests, in two processes, the slowest last
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## boots of the example service, and of two models by torch's other ways (half an hour)
	$(BIN)/python -m benchmarks.boot

soak: $(INSTALLED) ## the long-running tests
	$(BIN)/python -m pytest tests -m soak

bento: $(INSTALLED) ## build the example as a Bento
	$(BIN)/bentoml build

clean: ## remove what the targets above made, except the virtual environment
	rm -rf build dist plugin/*.egg-info .pytest_cache .ruff_cache .mypy_cache traces.jsonl
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The stamp is newer than what it was made from, and goes away with the environment.
$(INSTALLED): pyproject.toml constraints.txt requirements.txt
	@echo "Installing what is needed into .venv; this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' torch==2.13.0
	touch $@
