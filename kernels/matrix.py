"""Matrices and products: eight-bit floats with a scale for each row, how rows are quantized, the order of sums."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 1e-12  # an all-zero row stays zero


@dataclass(frozen=True)
class Float8Matrix:
    """weight[i, j] = values[i, j] · scale[i], as published FP8 packages store their projections."""

    values: Tensor  # [rows, columns] float8_e4m3fn, contiguous
    scale: Tensor  # [rows, 1] FP32

    def __getitem__(self, rows: slice) -> Self:
        """The same matrix with some of its rows."""
        return type(self)(self.values[rows], self.scale[rows])

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True)
class Float8Rows:
    """Activations on their way into an FP8 product: row i is values[i] · scale[i], and was of `dtype`."""

    values: Tensor  # [T, columns] float8_e4m3fn, contiguous
    scale: Tensor  # [T, 1] FP32
    dtype: torch.dtype
    plain: Tensor | None = None  # [T, columns], as they were: where a plain weight reads them too

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows."""
        plain = None if self.plain is None else self.plain[rows]
        return type(self)(self.values[rows], self.scale[rows], self.dtype, plain)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.values)


@dataclass(frozen=True)
class StackedMatrix:
    """Matrices of one width above each other, each held in its own way."""

    parts: tuple[Tensor | Float8Matrix, ...]

    def __getitem__(self, rows: slice) -> Self:
        """The same matrix with some of its rows."""
        start, stop, _ = rows.indices(self.shape[0])
        kept, first = [], 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, part.shape[0])
            if begin < end:
                kept.append(part[begin:end])
            first += part.shape[0]
        return type(self)(tuple(kept))

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for part in self.parts)


Matrix = Tensor | Float8Matrix | StackedMatrix
Rows = Tensor | Float8Rows


def sum_rows_alike() -> None:
    """Let this process's products on a GPU sum each row in one order, whatever rows stand beside it.

    cuBLAS splits the sums of a wide matrix for some numbers of rows, which changes one element in a hundred; over
    64 layers that grows until a probability moves by 0.05. cuBLASLt without splits is as fast on the shapes served.
    """
    cuda = torch.backends.cuda
    if cuda.preferred_blas_library().name != "Cublaslt":  # chosen as torch came in, or torch warns on stderr
        cuda.preferred_blas_library("cublaslt")
    cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row by its largest magnitude: (values float8_e4m3fn, scale [rows, 1] FP32)."""
    x = x.float()
    scale = (x.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
