"""Where kernels run, what fresh memory holds, and how Triton's interpreter multiplies where bits are compared."""

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


@pytest.fixture
def ordered_products(monkeypatch):
    """Products whose sums run over k in order, whatever row an element stands in: what a GPU's products do.

    The interpreter multiplies with numpy, so with whatever BLAS the machine has, and many round an element
    otherwise when its row stands elsewhere in the matrix. Equal bits are then nothing that a kernel can give.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_, a, b, d, *_options):
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., None, k, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
