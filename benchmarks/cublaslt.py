"""cuBLASLt by hand: what it proposes for a product beside the one algorithm that PyTorch takes.

For trials. The library is the one that PyTorch has loaded, called through ctypes by its documented C interface.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from d3serve.kernels.matrix import Float8Matrix, Float8Rows

BF16, FP32, E4M3 = 14, 0, 28  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType_t
TRANSA, A_SCALE, B_SCALE, FAST_ACCUM, A_MODE, B_MODE = 3, 17, 18, 25, 31, 32  # of a description
OUTER_VECTOR = 3  # a scale for each row
WORKSPACE_BYTES, REDUCTION_MASK = 1, 3  # of a preference
SPLIT = 2  # of an algorithm
WORKSPACE = 32 * 2**20
MOST = 200


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Library:
    """The library, and memory that it may use."""

    def __init__(self) -> None:
        """Find it."""
        torch.zeros(1, 1, device="cuda") @ torch.zeros(1, 1, device="cuda")  # brings it in
        self._functions = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}")
        self.handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            RuntimeError: it answers with a status.
        """
        if status := int(getattr(self._functions, name)(*arguments)):
            raise RuntimeError(f"{name} answered {status}")

    def set(self, kind: str, of: Any, attribute: int, value: Any) -> None:
        """Set an attribute of a description or a preference."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self(f"cublasLt{kind}SetAttribute", of, attribute, ctypes.byref(value), size)

    def split(self, algorithm: Algorithm) -> int:
        """Into how many parts an algorithm splits a sum."""
        value, size = ctypes.c_uint32(), ctypes.c_size_t()
        self(
            "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), SPLIT, ctypes.byref(value),
            ctypes.c_size_t(4), ctypes.byref(size),
        )  # fmt: skip
        return value.value


class Product:
    """x [M, K] times the transpose of a weight [N, K], both BF16 or both FP8 with a scale for each row: [M, N] BF16."""

    def __init__(self, library: Library, M: int, N: int, K: int, *, float8: bool) -> None:
        """Describe it."""
        self._library, self._float8 = library, float8
        self._description = ctypes.c_void_p()
        library("cublasLtMatmulDescCreate", ctypes.byref(self._description), COMPUTE_32F, FP32)
        self._set(TRANSA, ctypes.c_int32(1))
        if float8:
            self._set(FAST_ACCUM, ctypes.c_int8(1))
            for mode in (A_MODE, B_MODE):
                self._set(mode, ctypes.c_int32(OUTER_VECTOR))
            self._scale(library.workspace, library.workspace)  # none must be null while it thinks
        kind = E4M3 if float8 else BF16
        sizes = (
            (kind, K, N, K),
            (kind, K, M, K),
            (BF16, N, M, N),
        )  # columns first: it counts from the other side
        self._layouts = tuple(self._layout(*each) for each in sizes)

    def _set(self, attribute: int, value: Any) -> None:
        self._library.set("MatmulDesc", self._description, attribute, value)

    def _scale(self, weight: Tensor, x: Tensor) -> None:
        self._set(A_SCALE, ctypes.c_void_p(weight.data_ptr()))
        self._set(B_SCALE, ctypes.c_void_p(x.data_ptr()))

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._library(
            "cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind,
            ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride),
        )  # fmt: skip
        return layout

    def proposed(self) -> list[Algorithm]:
        """What the library proposes without split sums, its best guess first."""
        preference, library = ctypes.c_void_p(), self._library
        library("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        library.set("MatmulPreference", preference, WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE))
        library.set("MatmulPreference", preference, REDUCTION_MASK, ctypes.c_uint32(0))
        found, count = (Proposal * MOST)(), ctypes.c_int()
        library(
            "cublasLtMatmulAlgoGetHeuristic", library.handle, self._description, *self._layouts, self._layouts[2],
            preference, MOST, found, ctypes.byref(count),
        )  # fmt: skip
        library("cublasLtMatmulPreferenceDestroy", preference)
        algorithms = [
            Algorithm.from_buffer_copy(each.algorithm) for each in found[: count.value] if not each.state
        ]
        return [each for each in algorithms if library.split(each) <= 1]

    def run(
        self, algorithm: Algorithm, x: Tensor | Float8Rows, weight: Tensor | Float8Matrix, out: Tensor
    ) -> None:
        """Launch it on the current stream."""
        if isinstance(x, Float8Rows) and isinstance(weight, Float8Matrix):
            self._scale(weight.scale, x.scale)
            x, weight = x.values, weight.values
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        left, right, target = (ctypes.c_void_p(each.data_ptr()) for each in (weight, x, out))
        self._library(
            "cublasLtMatmul", self._library.handle, self._description, ctypes.byref(one), left, self._layouts[0],
            right, self._layouts[1], ctypes.byref(zero), target, self._layouts[2], target, self._layouts[2],
            ctypes.byref(algorithm), ctypes.c_void_p(self._library.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
