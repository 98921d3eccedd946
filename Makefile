# Two commands need nothing but Python 3.11+, make and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := .demo

# Three processes for two cores: a quarter of the tests' time is spent waiting for processes, leases and deadlines.
JOBS   ?= 3

# Without a GPU their products go through numpy: they must hold with a BLAS that is not this machine's own.
WITH_PRODUCTS := $(addprefix tests/kernels/test_,prefix_bidir.py gated_delta.py packed_pass.py)

.PHONY: demo test test-faults test-hostile test-gpu lint format docs clean

demo: $(VENV)/.demo  ## everything at once: broker, API, worker, one real job
	$(BIN)/d3serve demo --data-dir $(DEMO)/data

test: $(VENV)/.dev $(if $(T),,lint)  ## lint, types and all tests but those of the three targets below; T="tests/store -k lease": those alone
ifdef T
	$(BIN)/python -m pytest -m "not gpu and not faults and not hostile" $(T)
else
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not faults and not hostile"
	OPENBLAS_CORETYPE=Haswell $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu" $(WITH_PRODUCTS)
endif

test-faults: $(VENV)/.dev  ## the long fault injections: real processes killed for real
	$(BIN)/python -m pytest -m faults

test-hostile: $(VENV)/.dev  ## long attacks on a real API: odd bodies, odd bytes, many connections
	$(BIN)/python -m pytest -s -m hostile

test-gpu: $(VENV)/.gpu  ## what needs an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## regenerate docs/settings.md, and the table of cards in docs/operations.md
	$(BIN)/python tools/write_settings_doc.py
	PYTHONPATH=tests $(BIN)/python tools/write_cards_doc.py

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) tools/install.py $(VENV) ".[worker,embedded,media]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) tools/install.py $(VENV) ".[dev]"
	touch $@ $(VENV)/.demo

$(VENV)/.gpu: pyproject.toml constraints.txt constraints-gpu.txt
	$(PYTHON) tools/install.py $(VENV) ".[dev,gpu]" --gpu
	touch $@ $(VENV)/.dev $(VENV)/.demo
