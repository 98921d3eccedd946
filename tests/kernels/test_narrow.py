"""The product with a narrow weight against the plain one; and that its sums have one order for any number of rows."""

import pytest
import torch

from d3serve.kernels import narrow, reference

ERROR = 4e-3  # one rounding to BF16
DTYPE = (
    torch.bfloat16 if torch.cuda.is_available() else torch.float16
)  # of which the interpreter has products


def drawn(rows, columns, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(device, DTYPE)


@pytest.mark.parametrize("rows", [6, 96])
@pytest.mark.parametrize("tokens", [0, 1, 17, 40])
@pytest.mark.parametrize("columns", [16, 200, 320])
def test_the_product_equals_the_plain_one(tokens, rows, columns, device):
    """Rows of x and of what is written stand in wider tensors."""
    x, weight = drawn(tokens, columns + 8, device, 1)[:, :columns], drawn(rows, columns, device, 2)
    wide = torch.full((tokens, rows + 5), 7.0, dtype=DTYPE, device=device)
    narrow.narrow_linear(x, weight, wide[:, 3:-2])
    wanted = reference.narrow_linear(x.float(), weight.float(), torch.zeros(tokens, rows, device=device))
    assert (wide[:, [0, 1, 2, -2, -1]] == 7).all()
    assert (wide[:, 3:-2].float() - wanted).norm() <= ERROR * wanted.norm()


@pytest.mark.usefixtures("ordered_products")
def test_a_row_has_the_same_bits_in_small_passes_and_in_large_ones(device, monkeypatch):
    """Large passes take wider tiles, and fewer columns at a time."""
    columns = 5120 if device.type == "cuda" else 200
    x, weight = drawn(300, columns, device, 1), drawn(96, columns, device, 2)
    few = narrow.narrow_linear(x, weight, torch.empty(300, 96, dtype=x.dtype, device=device))
    monkeypatch.setattr(narrow, "MANY_ROWS", 0)
    many = narrow.narrow_linear(x, weight, torch.empty(300, 96, dtype=x.dtype, device=device))
    assert torch.equal(few, many)
    one = narrow.narrow_linear(x[299:], weight, torch.empty(1, 96, dtype=x.dtype, device=device))
    assert torch.equal(one, few[299:])
