"""What loading a real engine sets up before torch comes in."""

import subprocess
import sys

import pytest
import torch

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_order_of_sums_is_chosen_without_a_word_at_a_product(tmp_path):
    product = "x = torch.ones(32, 32, device='cuda', dtype=torch.bfloat16); print((x @ x).sum().item())"
    assert said(tmp_path, product) == ("32768.0\n", "")
