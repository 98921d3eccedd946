"""FP8 products: rows quantized as the plain definition does, and on a GPU the product itself."""

import pytest
import torch

from d3serve.kernels import float8, fused, reference
from d3serve.kernels.matrix import (
    LARGEST,
    Float8Matrix,
    Float8Rows,
    StackedMatrix,
    quantize_rows,
    sum_rows_alike,
)
from d3serve.kernels.operations import linear

PRODUCT_ERROR = 4e-3  # one rounding to BF16, and tensor cores that sum with fewer bits than FP32


def needs_a_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")(test))


def error(ours, wanted):
    """The relative error of a product."""
    return float((ours.float() - wanted.float()).norm() / wanted.float().norm())


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
    step = (wanted.abs() / 8).clamp(min=2**-9)  # the least that a subnormal moves
    assert ((ours - wanted).abs() <= step)[counted].all()
    assert (ours == wanted)[counted].float().mean() > (0.999 if ours.is_cuda else 0.95)


@pytest.mark.parametrize("columns", [16, 100, 2048, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_rows_equal_the_definition(columns, dtype, device):
    x = drawn(5, columns, device).to(dtype)
    x[1] = 0
    x[2] *= 1e4
    rows = float8.quantize_activations(x)
    values, scale = rows.values, rows.scale
    wanted, wanted_scale = quantize_rows(x)
    assert rows.dtype == dtype
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    assert_quantized(values, wanted)
    assert values.float().abs().max() <= LARGEST


def test_rows_of_a_wider_tensor(device):
    wide = drawn(4, 96, device)
    assert_rows(float8.quantize_activations(wide[:, :64]), wide[:, :64].contiguous())


def assert_rows(ours, wanted):
    """Our quantized rows against the definition on `wanted`."""
    values, scale = quantize_rows(wanted)
    assert ours.dtype == wanted.dtype
    torch.testing.assert_close(ours.scale, scale, rtol=1e-5, atol=0)
    assert_quantized(ours.values, values)


@pytest.mark.parametrize("columns", [16, 80, 5120])
@pytest.mark.parametrize("first", [True, False])
def test_normed_rows_quantized_on_the_way_equal_the_definition(columns, first, device):
    x, weight = drawn(5, columns, device).bfloat16(), drawn(1, columns, device, seed=1)[0]
    residual = None if first else drawn(5, columns, device, seed=2).bfloat16()
    ours, stream = fused.add_rms_norm(x, residual, weight, 1e-6, float8=True)
    wanted, wanted_stream = fused.add_rms_norm(x, residual, weight, 1e-6)
    assert_rows(ours, wanted)
    assert torch.equal(stream, wanted_stream)
    assert ours.plain is None


@pytest.mark.parametrize("columns", [16, 80, 5120])
def test_normed_rows_for_both_kinds_of_weights_are_those_for_each(columns, device):
    x, weight = drawn(5, columns, device).bfloat16(), drawn(1, columns, device, seed=1)[0]
    for norm in (fused.add_rms_norm, reference.add_rms_norm):
        residual = drawn(5, columns, device, seed=2)
        ours, _ = norm(x, residual.clone(), weight, 1e-6, float8=True, both=True)
        assert torch.equal(ours.plain, norm(x, residual.clone(), weight, 1e-6)[0])
        eight = norm(x, residual.clone(), weight, 1e-6, float8=True)[0]
        assert torch.equal(ours.values.view(torch.uint8), eight.values.view(torch.uint8))
        assert torch.equal(ours.scale, eight.scale)
        assert torch.equal(ours[1:3].plain, ours.plain[1:3])


def stacked(device, rows=(64, 6), columns=32):
    """An FP8 matrix above a plain one, as the inputs of a linear layer can be."""
    first, second = (drawn(count, columns, device, seed=seed).bfloat16() for seed, count in enumerate(rows))
    return StackedMatrix((Float8Matrix(*quantize_rows(first)), second))


def test_each_part_of_a_stack_reads_the_rows_of_its_kind(device):
    weight, x = stacked(device), drawn(5, 32, device, seed=2).bfloat16()
    eight, plain = weight.parts
    both = Float8Rows(*quantize_rows(x), x.dtype, x)
    wanted = torch.cat((linear(x, eight), linear(x, plain)), dim=1)
    assert weight.shape == (70, 32)
    assert weight.nbytes == eight.nbytes + plain.nbytes
    assert torch.equal(linear(both, weight[60:]), wanted[:, 60:])
    for rows in (x, both):
        assert torch.equal(linear(rows, weight), wanted)
        out = torch.full((5, 72), 7.0, dtype=x.dtype, device=device)
        linear(rows, weight, out[:, 1:71])
        assert torch.equal(out[:, 1:71], wanted)
        assert (out[:, [0, 71]] == 7).all()
    with pytest.raises(ValueError, match="plain weight"):
        linear(Float8Rows(*quantize_rows(x), x.dtype), weight)


@pytest.mark.parametrize("inner", [1, 16, 80, 512, 1056, 17_408])
def test_activated_rows_quantized_on_the_way_equal_the_definition(inner, device):
    wide = drawn(5, 2 * inner + 16, device).bfloat16()
    wide[3] = 0
    assert_rows(fused.silu_mul(wide[:, : 2 * inner], float8=True), fused.silu_mul(wide[:, : 2 * inner]))


def test_the_reference_quantizes_the_same_rows():
    cpu = torch.device("cpu")
    x, weight = drawn(5, 32, cpu).bfloat16(), drawn(1, 32, cpu, seed=1)[0]
    assert_rows(
        reference.add_rms_norm(x, x, weight, 1e-6, float8=True)[0],
        reference.add_rms_norm(x, x, weight, 1e-6)[0],
    )
    assert_rows(reference.silu_mul(x, float8=True), reference.silu_mul(x))
    matrix = Float8Matrix(*quantize_rows(drawn(16, 32, cpu)))
    assert torch.equal(
        reference.float8_linear(Float8Rows(*quantize_rows(x), x.dtype)[1:3], matrix),
        reference.float8_linear(x[1:3], matrix),
    )


def test_quantized_rows_are_no_input_of_a_plain_weight():
    x = drawn(5, 32, torch.device("cpu"))
    with pytest.raises(ValueError, match="plain weight"):
        linear(Float8Rows(*quantize_rows(x), x.dtype), x)


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (32, 40)])
def test_sizes_that_tensor_cores_do_not_take(rows, columns, device):
    weight = Float8Matrix(*quantize_rows(drawn(rows, columns, device)))
    with pytest.raises(ValueError, match="cannot multiply"):
        float8.float8_linear(drawn(3, columns, device).bfloat16(), weight)


@needs_a_gpu
@pytest.mark.parametrize("tokens", [1, 17, 250, 4096])
def test_the_product_equals_the_reference(tokens):
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(512, 1024, device, seed=1)))
    x = drawn(tokens, 1024, device, seed=2).bfloat16()
    ours, wanted = float8.float8_linear(x, weight), reference.float8_linear(x, weight)
    assert error(ours, wanted) < PRODUCT_ERROR
    into = torch.full((tokens + 2, 512), 7.0, dtype=x.dtype, device=device)
    assert float8.float8_linear(x, weight, into[1:-1]).data_ptr() == into[1].data_ptr()
    assert torch.equal(into[1:-1], ours)
    assert (into[[0, -1]] == 7).all()


@needs_a_gpu
@pytest.mark.parametrize("start", [1, 2, 3, 4, 150])
def test_rows_from_anywhere_meet_the_weight_with_their_own_scales(start):
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(512, 1024, device, seed=1)))
    x = (drawn(407, 1024, device, seed=2) * torch.arange(1, 408, device=device)[:, None]).bfloat16()
    ours = float8.float8_linear(float8.quantize_activations(x)[start:], weight)
    assert error(ours, reference.float8_linear(x[start:], weight)) < PRODUCT_ERROR
    wanted = reference.float8_linear(x, weight[128:])
    assert error(float8.float8_linear(x, weight[128:]), wanted) < PRODUCT_ERROR


@needs_a_gpu
@pytest.mark.parametrize(("rows", "columns"), [(34_816, 5120), (5120, 17_408), (14_336, 5120), (5120, 6144)])
def test_the_product_errs_no_more_than_products_of_unpacked_bf16(rows, columns):
    """The sizes of the 27B; against FP32 products of unpacked weights with what was not rounded."""
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(rows, columns, device, seed=1)))
    x = drawn(300, columns, device, seed=2).bfloat16()
    quantized = float8.quantize_activations(x)
    unpacked, rounded = weight.values.float() * weight.scale, quantized.values.float() * quantized.scale
    ours, theirs = float8.float8_linear(quantized, weight), rounded.bfloat16() @ unpacked.bfloat16().T
    assert error(ours, x.float() @ unpacked.T) <= 1.01 * error(theirs, x.float() @ unpacked.T)
    assert error(ours, rounded @ unpacked.T) < 2 * PRODUCT_ERROR  # sums of 17,408 numbers in few bits


@needs_a_gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(34_816, 5120), (5120, 17_408), (14_336, 5120), (16_384, 5120)]
)
def test_a_row_of_a_product_has_the_same_bits_among_any_others(rows, columns):
    """The 27B's matrices; the inputs of its linear layers stand beside 96 plain columns."""
    sum_rows_alike()
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(rows, columns, device, seed=1)))
    x = float8.quantize_activations(drawn(8192, columns, device, seed=2).bfloat16())
    whole = float8.float8_linear(x, weight)
    for count in (1, 31, 64, 128, 200, 256, 320, 576, 1_000, 1_430, 4_096, 5_270):
        wide = torch.empty(count, rows + 96, dtype=torch.bfloat16, device=device)
        for part in (slice(count), slice(-count, None)):
            assert torch.equal(float8.float8_linear(x[part], weight), whole[part])
            assert torch.equal(float8.float8_linear(x[part], weight, wide[:, :rows]), whole[part])
    odd = torch.empty(256, rows + 12, dtype=torch.bfloat16, device=device)  # rows of it begin anywhere
    assert torch.equal(float8.float8_linear(x[:256], weight, odd[:, :rows]), whole[:256])


@needs_a_gpu
def test_a_captured_product_equals_an_eager_one():
    device = torch.device("cuda")
    weight = Float8Matrix(*quantize_rows(drawn(512, 1024, device, seed=1)))
    x = drawn(250, 1024, device, seed=2).bfloat16()
    eager = float8.float8_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = float8.float8_linear(x, weight)
    x.copy_(drawn(250, 1024, device, seed=3))
    graph.replay()
    assert torch.equal(captured, float8.float8_linear(x, weight))
    assert not torch.equal(captured, eager)
