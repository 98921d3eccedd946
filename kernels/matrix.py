"""Matrices and products: how weights of eight and of four bits are held, how rows are quantized, the order of sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 1e-12  # an all-zero row stays zero
LARGEST_INT4 = 15  # of four bits, unsigned
INT4_GROUPS = (32, 64, 128)  # columns of a scale: half of them meet the tensor cores at once, 16 at least


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
class Int4Matrix:
    """weight[i, j] = (q[i, j] - zero[g, i]) · scale[g, i] with q of four bits and g = j // group.

    A column of a group is numbered 32 w + 16 j + 8 h + 2 c + o, and lies in byte c · group / 8 + 4 w + 2 o + j, with h
    in the high bits. So each of the four threads that share a row of a tensor core's operand (c) finds all that it
    multiplies in one run of bytes, and a mask takes two neighbours (o) out of a word of four. A group's bytes of all
    rows stand together, and so do its scales: what a tile of rows reads is one piece of memory.
    """

    values: Tensor  # [groups, rows, group / 2] uint8, contiguous in the last two
    scale: Tensor  # [groups, rows] BF16, contiguous in rows
    zero: Tensor  # [groups, rows] uint8, 0 to 15, contiguous in rows

    def __getitem__(self, rows: slice) -> Self:
        """The same matrix with some of its rows."""
        return type(self)(self.values[:, rows], self.scale[:, rows], self.zero[:, rows])

    @classmethod
    def empty(cls, rows: int, columns: int, group: int, device: torch.device) -> Self:
        """Allocate one."""
        groups = columns // group
        return cls(
            torch.empty(groups, rows, group // 2, dtype=torch.uint8, device=device),
            torch.empty(groups, rows, dtype=torch.bfloat16, device=device),
            torch.empty(groups, rows, dtype=torch.uint8, device=device),
        )

    def copy_(self, other: Self) -> None:
        """Take over the contents of a matrix of the same shape."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.copy_(theirs)

    @property
    def words(self) -> Tensor:
        """The values as kernels read them, eight at a time: [groups, rows, group / 8] int32."""
        return self.values.view(torch.int32)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 2 * self.values.shape[2]

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        groups, rows, half = self.values.shape
        return torch.Size((rows, groups * 2 * half))

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scale.nbytes + self.zero.nbytes


@dataclass(frozen=True)
class StackedMatrix:
    """Matrices of one width above each other, each held in its own way."""

    parts: tuple[Tensor | Float8Matrix | Int4Matrix, ...]

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


def stacked(parts: Sequence[Tensor | Int4Matrix]) -> Tensor | Int4Matrix | StackedMatrix:
    """Stack matrices; one alone stays what it is."""
    return parts[0] if len(parts) == 1 else StackedMatrix(tuple(parts))


Matrix = Tensor | Float8Matrix | Int4Matrix | StackedMatrix
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


def pack_int4(q: Tensor, scale: Tensor, zero: Tensor) -> Int4Matrix:
    """Pack values q [rows, columns] of 0 to 15, with scale and zero [rows, groups], into our layout.

    Raises:
        ValueError: columns are not whole groups of a size that we hold.
    """
    rows, columns = q.shape
    groups = scale.shape[1]
    group = columns // max(1, groups)
    if group not in INT4_GROUPS or group * groups != columns:
        raise ValueError(
            f"{columns} columns are not whole groups of {group}: expected groups of {INT4_GROUPS}"
        )
    low, high = q.to(torch.uint8).view(rows, groups, -1, 2, 2, 4, 2).unbind(4)
    values = in_byte_order(low | high << 4).transpose(0, 1).contiguous()
    return Int4Matrix(values, scale.T.bfloat16().contiguous(), zero.T.to(torch.uint8).contiguous())


def in_byte_order(values: Tensor) -> Tensor:
    """Bytes [rows, groups, w, j, c, o], numbered as `Int4Matrix` says, as it stores them: [rows, groups, bytes]."""
    return values.permute(0, 1, 4, 2, 5, 3).flatten(2)


def int4_values(weight: Int4Matrix) -> Tensor:
    """The values q [groups, rows, group] uint8, columns in their own order."""
    stored = weight.values.unflatten(2, (4, -1, 2, 2))  # [groups, rows, c, w, o, j]
    return torch.stack((stored & 0xF, stored >> 4), dim=6).permute(0, 1, 3, 5, 6, 2, 4).flatten(2)


def unpack_int4(weight: Int4Matrix) -> Tensor:
    """The weight [rows, columns] in FP32, exactly: (q - zero) · scale."""
    moved = int4_values(weight).float() - weight.zero.float()[:, :, None]
    return (moved * weight.scale.float()[:, :, None]).transpose(0, 1).flatten(1)


def quantize_int4(weight: Tensor, group: int = INT4_GROUPS[-1]) -> Int4Matrix:
    """Quantize weight [rows, columns] by the least and largest of each group, zero among its values; no calibration."""
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} columns are not whole groups of {group}")
    grouped = weight.float().unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / LARGEST_INT4).clamp(min=SMALLEST_SCALE).bfloat16()
    step = scale.float()
    zero = (-low / step).round().clamp(0, LARGEST_INT4)
    q = (grouped / step[:, :, None] + zero[:, :, None]).round().clamp(0, LARGEST_INT4)
    return pack_int4(q.flatten(1), scale, zero)
