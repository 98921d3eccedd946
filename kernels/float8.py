"""Products with FP8 weights on FP8 tensor cores: rows of activations quantized on the way in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from d3serve.kernels import matrix
from d3serve.kernels.matrix import Float8Matrix, Float8Rows, Rows

BLOCK = 2048
ALIGNMENT = 16  # bytes, of whatever the tensor cores read
LARGEST = tl.constexpr(matrix.LARGEST)
SMALLEST_SCALE = tl.constexpr(matrix.SMALLEST_SCALE)


@triton.jit
def scale_of(largest):  # noqa: ANN201  (Triton knows no annotations but constexpr)
    """The scale of a row whose largest magnitude is `largest`."""
    return tl.maximum(largest / LARGEST, SMALLEST_SCALE)


@triton.jit
def to_float8(x, scale):  # noqa: ANN201
    """Round x / scale to E4M3, held within its range: a cast alone makes NaN of what rounding puts beyond it."""
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def _quantize_kernel(x, values, scale, columns, x_stride, BLOCK: tl.constexpr):
    """One row: find its largest magnitude, then write row / scale as eight-bit floats."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        cols = start + offs
        loaded = tl.load(x + row * x_stride + cols, mask=cols < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(loaded.to(tl.float32)))
    row_scale = scale_of(tl.max(largest, 0))
    tl.store(scale + row, row_scale)
    for start in range(0, columns, BLOCK):
        cols = start + offs
        loaded = tl.load(x + row * x_stride + cols, mask=cols < columns, other=0.0)
        tl.store(
            values + row * columns + cols, to_float8(loaded.to(tl.float32), row_scale), mask=cols < columns
        )


def empty_rows(T: int, columns: int, like: Tensor) -> Float8Rows:
    """Allocate T rows where `like` is, to be filled with what was of its type."""
    return Float8Rows(
        torch.empty(T, columns, dtype=torch.float8_e4m3fn, device=like.device),
        torch.empty(T, 1, dtype=torch.float32, device=like.device),
        like.dtype,
    )


def quantize_activations(x: Tensor) -> Float8Rows:
    """Quantize each row of x [T, columns], columns contiguous, as `matrix.quantize_rows` does."""
    T, columns = x.shape
    rows = empty_rows(T, columns, x)
    if T:
        _quantize_kernel[(T,)](x, rows.values, rows.scale, columns, x.stride(0), BLOCK=BLOCK)
    return rows


def float8_linear(x: Rows, weight: Float8Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of `weight` [rows, columns]: [T, rows] BF16, summed in FP32.

    Rows that come unquantized are quantized first.

    Raises:
        ValueError: rows or columns are no multiple of 16, which the tensor cores need, or x is not BF16.
    """
    rows, columns = weight.values.shape
    if rows % 16 or columns % 16 or x.dtype != torch.bfloat16:
        raise ValueError(
            f"cannot multiply {len(x)} rows of {x.dtype} by FP8 of {rows} rows, {columns} columns"
        )
    if isinstance(x, Tensor):
        x = quantize_activations(x)
    scale = x.scale if x.scale.data_ptr() % ALIGNMENT == 0 else x.scale.clone()  # a slice may start anywhere
    settings = {"scale_a": scale, "scale_b": weight.scale.T, "out_dtype": x.dtype, "use_fast_accum": True}
    if out is not None and (out.data_ptr() | out.stride(0) * out.itemsize) % ALIGNMENT == 0:
        settings["out"] = out
    product: Tensor = torch._scaled_mm(x.values, weight.values.T, **settings)  # noqa: SLF001  (its only name)
    return product if out is None or "out" in settings else out.copy_(product)
