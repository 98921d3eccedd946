"""Where kernels run, and what fresh memory holds."""

import pytest
import torch


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, so that an element which a kernel forgets to write fails its test."""

    def poison(allocate):
        def poisoned(*args, **kwargs):
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
