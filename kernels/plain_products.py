"""Products with weights that are no plain matrices, in plain PyTorch: part of `reference`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from d3serve.kernels.matrix import Float8Matrix, Float8Rows, Int4Matrix, Rows, quantize_rows, unpack_int4


def narrow_linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Multiply x [T, columns] by the transpose of a narrow weight [rows, columns] into `out` [T, rows]."""
    return torch.mm(x, weight.T, out=out)


def float8_linear(x: Rows, weight: Float8Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of `weight`, both in eight-bit floats: [T, rows] in x's type.

    Each row of x is quantized by its own largest magnitude, as FP8_DYNAMIC packages ask, unless it has been;
    sums are FP32.
    """
    rows = x if isinstance(x, Float8Rows) else Float8Rows(*quantize_rows(x), x.dtype)
    product = rows.values.float() @ weight.values.float().T
    product = (product * rows.scale * weight.scale.T).to(rows.dtype)
    return product if out is None else out.copy_(product)


def int4_linear(x: Tensor, weight: Int4Matrix, out: Tensor | None = None) -> Tensor:
    """Multiply x [T, columns] by the transpose of `weight` unpacked to x's type: [T, rows] in that type."""
    product = F.linear(x, unpack_int4(weight).to(x.dtype))
    return product if out is None else out.copy_(product)
