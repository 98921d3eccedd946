"""What loading a real engine sets up before torch comes in."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from d3serve.model.engine import DecisionEngine
from d3serve.settings import Settings
from d3serve.worker.engines import load_engine

LOADED = """
from d3serve.errors import D3ServeError
from d3serve.settings import Settings
from d3serve.worker.engines import load_engine
try:
    load_engine(Settings(model={folder!r}))
except D3ServeError:
    pass
import torch
from d3serve.kernels.matrix import sum_rows_alike
sum_rows_alike()
"""


def said(folder, then):
    """What a process prints that has tried to load an engine; stderr is where torch would warn from C++."""
    program = LOADED.format(folder=str(folder)) + then
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ended.stdout, ended.stderr


def test_the_order_of_sums_is_chosen_before_torch_would_warn_of_it(tmp_path):
    """Chosen later, torch warns where no filter of Python's warnings sees it."""
    assert said(tmp_path, "print(torch.backends.cuda.preferred_blas_library().name)") == ("Cublaslt\n", "")


def test_the_folder_of_states_and_how_long_they_stay_reach_the_engine(monkeypatch, tmp_path):
    asked = {}

    def load(_model, **options):
        asked.update(options)
        return SimpleNamespace(warm_up=lambda: None)

    monkeypatch.setattr(DecisionEngine, "load", load)
    monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", "1")  # which `load_engine` sets
    load_engine(Settings(state_cache_dir=tmp_path, result_ttl_s=120))
    assert (asked["state_cache_dir"], asked["state_ttl_s"]) == (tmp_path, 120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_order_of_sums_is_chosen_without_a_word_at_a_product(tmp_path):
    product = "x = torch.ones(32, 32, device='cuda', dtype=torch.bfloat16); print((x @ x).sum().item())"
    assert said(tmp_path, product) == ("32768.0\n", "")
