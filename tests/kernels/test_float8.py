"""FP8 products: rows quantized as the plain definition does, and on a GPU the product itself."""

import pytest
import torch

from d3serve.kernels import float8, reference
from d3serve.kernels.matrix import LARGEST, Float8Matrix, quantize_rows


def drawn(rows, columns, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(device)


def assert_quantized(ours, wanted):
    """Equal but where two divisions round differently, by one step of the format at most.

    Triton's interpreter rounds ties up and loses the carry to a power of two, so it is held to less.
    """
    ours, wanted = ours.float(), wanted.float()
    mantissa = torch.frexp(wanted).mantissa.abs()
    counted = torch.ones_like(wanted, dtype=torch.bool) if ours.is_cuda else mantissa != 0.5
    assert ((ours - wanted).abs() <= wanted.abs() / 8)[counted].all()
    assert (ours == wanted)[counted].float().mean() > (0.999 if ours.is_cuda else 0.95)


@pytest.mark.parametrize("columns", [16, 100, 2048, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_rows_equal_the_definition(columns, dtype, device):
    x = drawn(5, columns, device).to(dtype)
    x[1] = 0
    x[2] *= 1e4
    values, scale = float8.quantize_activations(x)
    wanted, wanted_scale = quantize_rows(x)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    assert_quantized(values, wanted)
    assert values.float().abs().max() <= LARGEST


def test_rows_of_a_wider_tensor(device):
    wide = drawn(4, 96, device)
    values, scale = float8.quantize_activations(wide[:, :64])
    wanted, wanted_scale = quantize_rows(wide[:, :64].contiguous())
    assert_quantized(values, wanted)
    assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (32, 40)])
def test_sizes_that_tensor_cores_do_not_take(rows, columns, device):
    weight = Float8Matrix(*quantize_rows(drawn(rows, columns, device)))
    with pytest.raises(ValueError, match="cannot multiply"):
        float8.float8_linear(drawn(3, columns, device).bfloat16(), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("tokens", [1, 17, 250, 4096])
def test_the_product_equals_the_reference(tokens):
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(512, 1024, device, seed=1)))
    x = drawn(tokens, 1024, device, seed=2).bfloat16()
    ours, wanted = float8.float8_linear(x, weight), reference.float8_linear(x, weight)
    assert (ours.float() - wanted.float()).norm() / wanted.float().norm() < 4e-3  # one BF16 rounding
