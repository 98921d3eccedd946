"""Products with FP8 weights on FP8 tensor cores: rows of activations quantized on the way in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3serve.kernels.matrix import LARGEST, SMALLEST_SCALE, Float8Matrix

BLOCK = 2048


@triton.jit
def _quantize_kernel(
    x, values, scale, columns, x_stride, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr
):
    """One row: find its largest magnitude, then write row / scale as eight-bit floats."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        cols = start + offs
        loaded = tl.load(x + row * x_stride + cols, mask=cols < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(loaded.to(tl.float32)))
    row_scale = tl.maximum(tl.max(largest, 0) / LARGEST, SMALLEST)
    tl.store(scale + row, row_scale)
    for start in range(0, columns, BLOCK):
        cols = start + offs
        inside = cols < columns
        scaled = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32) / row_scale
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        tl.store(values + row * columns + cols, scaled.to(values.dtype.element_ty), mask=inside)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of x [T, columns], columns contiguous, as `matrix.quantize_rows` does.

    Returns:
        values [T, columns] float8_e4m3fn and scale [T, 1] FP32.
    """
    T, columns = x.shape
    values = torch.empty(T, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(T, 1, dtype=torch.float32, device=x.device)
    if T:
        _quantize_kernel[(T,)](
            x, values, scale, columns, x.stride(0), BLOCK=BLOCK, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE
        )  # fmt: skip
    return values, scale


def float8_linear(x: Tensor, weight: Float8Matrix) -> Tensor:
    """Multiply x [T, columns] by the transpose of `weight` [rows, columns]: [T, rows] BF16, summed in FP32.

    Raises:
        ValueError: rows or columns are no multiple of 16, which the tensor cores need, or x is not BF16.
    """
    rows, columns = weight.values.shape
    if rows % 16 or columns % 16 or x.dtype != torch.bfloat16 or x.stride(-1) != 1:
        raise ValueError(
            f"cannot multiply {x.dtype} {tuple(x.shape)} by FP8 of {rows} rows and {columns} columns"
        )
    values, scale = quantize_activations(x)
    return torch._scaled_mm(  # noqa: SLF001  (the library's own name for it, for now)
        values, weight.values.T, scale_a=scale, scale_b=weight.scale.T, out_dtype=x.dtype, use_fast_accum=True
    )
