"""The backbone's parameters, laid out for the pass: projections that read the same rows are one matrix."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from d3serve.kernels.matrix import (
    Float8Matrix,
    Int4Matrix,
    Matrix,
    StackedMatrix,
    quantize_rows,
    stacked,
)
from d3serve.model.config import Geometry


@dataclass(frozen=True)
class FullAttention:
    """A full-attention layer. `qkv` rows: per query head q | gate, then key heads, then value heads."""

    qkv: Matrix  # [(2H + 2HK)·D, hidden]
    out: Matrix  # [hidden, H·D]
    q_norm: Tensor  # [D] FP32
    k_norm: Tensor  # [D] FP32


@dataclass(frozen=True)
class LinearAttention:
    """A gated delta rule layer. `inputs` rows: q | k | v (C rows), then z, b and a."""

    inputs: Matrix  # [C + HV·V + 2·HV, hidden]; b and a, which say how fast a head forgets, never in FP8
    conv: Tensor  # [C, W]
    A_log: Tensor  # [HV] FP32
    dt_bias: Tensor  # [HV] FP32
    norm: Tensor  # [V] FP32
    out: Matrix  # [hidden, HV·V]


@dataclass(frozen=True)
class Layer:
    """One decoder layer: norm, mixer, norm, gated MLP."""

    mixer: FullAttention | LinearAttention
    input_norm: Tensor  # [hidden] FP32
    post_norm: Tensor  # [hidden] FP32
    gate_up: Matrix  # [2·ffn, hidden]
    down: Matrix  # [hidden, ffn]

    @property
    def first(self) -> Matrix:
        """The matrix that multiplies the normed input."""
        return self.mixer.qkv if isinstance(self.mixer, FullAttention) else self.mixer.inputs


@dataclass(frozen=True)
class Weights:
    """Every parameter of the text backbone and the readout."""

    embedding: Tensor  # [vocab, hidden]; pinned in the host's memory beside INT4 matrices on a GPU
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden] FP32
    readout: Tensor  # [codes, hidden] FP32

    def matrices(self) -> Iterator[Matrix]:
        """Every projection, each part of a stack for itself."""
        for layer in self.layers:
            for matrix in (layer.first, layer.mixer.out, layer.gate_up, layer.down):
                yield from matrix.parts if isinstance(matrix, StackedMatrix) else (matrix,)

    @property
    def format(self) -> str:
        """What projections are held as: int4, float8, or a type of plain numbers."""
        held = list(self.matrices())
        if any(isinstance(each, Int4Matrix) for each in held):
            return "int4"
        if any(isinstance(each, Float8Matrix) for each in held):
            return "float8"
        return str(self.embedding.dtype).removeprefix("torch.")

    @property
    def unpacked_bytes(self) -> int:
        """Memory of the largest INT4 matrix once a pass unpacks it; 0 if there is none."""
        packed = (each for each in self.matrices() if isinstance(each, Int4Matrix))
        return self.embedding.itemsize * max((each.shape.numel() for each in packed), default=0)


@dataclass(frozen=True)
class Kept:
    """Which matrices stay quantized on the device, by the names of their weights."""

    float8: Set[str] = frozenset()
    int4: Set[str] = frozenset()
    group: int = 0  # columns of a scale, of INT4


PLAIN = Kept()
EMBEDDING = "embed_tokens.weight"


def to_float8(weights: Weights, *, inputs: bool = False) -> Weights:
    """Quantize what the published FP8 packages quantize: every matrix but the inputs of linear layers.

    With `inputs` those of q, k, v and z too.
    """
    return replace(weights, layers=tuple(_layer_to_float8(layer, inputs=inputs) for layer in weights.layers))


def _layer_to_float8(layer: Layer, *, inputs: bool) -> Layer:
    mixer = replace(layer.mixer, out=_quantized(layer.mixer.out))
    if isinstance(mixer, FullAttention):
        mixer = replace(mixer, qkv=_quantized(mixer.qkv))
    elif inputs and isinstance(mixer.inputs, Tensor):
        gates = 2 * len(mixer.A_log)
        eight = Float8Matrix(*quantize_rows(mixer.inputs[:-gates]))
        mixer = replace(mixer, inputs=StackedMatrix((eight, mixer.inputs[-gates:].clone())))
    return replace(layer, mixer=mixer, gate_up=_quantized(layer.gate_up), down=_quantized(layer.down))


def _quantized(matrix: Matrix) -> Matrix:
    return Float8Matrix(*quantize_rows(matrix)) if isinstance(matrix, Tensor) else matrix


def scale_name(weight_name: str) -> str:
    """Name the tensor that holds the scales of an FP8 weight."""
    return f"{weight_name}_scale"


class Allocator:
    """Allocates parameters and remembers, for each tensor name of a package, the view that it fills."""

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        dtype: torch.dtype,
        kept: Kept = PLAIN,
    ) -> None:
        """Allocate on `device` in `dtype`, but what `kept` names as it says; FP8 only if it names every part."""
        self.kept = kept
        self.geometry = geometry
        self.device = device
        self.dtype = dtype
        self.targets: dict[str, Tensor] = {}
        self.packed: dict[str, Int4Matrix] = {}

    @property
    def nbytes(self) -> int:
        """Memory that what has been allocated by name takes of the device."""
        hosted = {EMBEDDING} if self._hosts_embedding else set[str]()
        plain = sum(each.nbytes for name, each in self.targets.items() if name not in hosted)
        return plain + sum(each.nbytes for each in self.packed.values())

    @property
    def _hosts_embedding(self) -> bool:
        return bool(self.kept.int4) and self.device.type != "cpu"

    def weights(self, codes: int) -> Weights:
        """Allocate everything; `targets` and `packed` then list every tensor that a package must hold."""
        g = self.geometry
        return Weights(
            embedding=self._embedding(),
            layers=tuple(self._layer(index) for index in range(len(g.layer_types))),
            norm=self._vector("norm.weight", g.hidden),
            readout=torch.empty(codes, g.hidden, dtype=torch.float32, device=self.device),
        )

    def _embedding(self) -> Tensor:
        """Beside packed weights it stands in the host's memory, where a GPU reads the few rows that a pass needs."""
        g = self.geometry
        if not self._hosts_embedding:
            return self._plain([(EMBEDDING, g.vocab_size)], g.hidden)
        real = self.device.type == "cuda"
        place = torch.device("cpu") if real else self.device
        table = torch.empty(g.vocab_size, g.hidden, dtype=self.dtype, device=place, pin_memory=real)
        self.targets[EMBEDDING] = table
        return table

    def _layer(self, index: int) -> Layer:
        g, prefix = self.geometry, f"layers.{index}."
        full = g.layer_types[index] == "full_attention"
        mlp = [(f"{prefix}mlp.{name}_proj.weight", g.ffn) for name in ("gate", "up")]
        return Layer(
            mixer=self._full(prefix + "self_attn.") if full else self._linear(prefix + "linear_attn."),
            input_norm=self._vector(prefix + "input_layernorm.weight", g.hidden),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", g.hidden),
            gate_up=self._fused(mlp, g.hidden),
            down=self._matrix(prefix + "mlp.down_proj.weight", g.hidden, g.ffn),
        )

    def _full(self, prefix: str) -> FullAttention:
        g = self.geometry
        heads = (("q", 2 * g.heads), ("k", g.kv_heads), ("v", g.kv_heads))
        return FullAttention(
            qkv=self._fused([(f"{prefix}{name}_proj.weight", n * g.head_dim) for name, n in heads], g.hidden),
            out=self._matrix(prefix + "o_proj.weight", g.hidden, g.heads * g.head_dim),
            q_norm=self._vector(prefix + "q_norm.weight", g.head_dim),
            k_norm=self._vector(prefix + "k_norm.weight", g.head_dim),
        )

    def _linear(self, prefix: str) -> LinearAttention:
        g = self.geometry
        values = g.linear_value_heads * g.linear_value_dim
        inputs = [(f"{prefix}in_proj_qkv.weight", g.conv_channels), (f"{prefix}in_proj_z.weight", values)]
        gates = [(f"{prefix}in_proj_{name}.weight", g.linear_value_heads) for name in "ba"]
        # In FP32 like the vectors: it is small, and some packages store it so.
        conv = torch.empty(g.conv_channels, g.conv_width, dtype=torch.float32, device=self.device)
        self.targets[prefix + "conv1d.weight"] = conv[:, None]  # stored as a grouped convolution: [C, 1, W]
        return LinearAttention(
            inputs=self._inputs(inputs, gates, g.hidden),
            conv=conv,
            A_log=self._vector(prefix + "A_log", g.linear_value_heads),
            dt_bias=self._vector(prefix + "dt_bias", g.linear_value_heads),
            norm=self._vector(prefix + "norm.weight", g.linear_value_dim),
            out=self._matrix(prefix + "out_proj.weight", g.hidden, values),
        )

    def _fused(self, parts: list[tuple[str, int]], columns: int) -> Matrix:
        if not all(name in self.kept.float8 for name, _ in parts):
            return self._stack(parts, columns)
        return self._float8(parts, columns)

    def _inputs(self, parts: list[tuple[str, int]], gates: list[tuple[str, int]], columns: int) -> Matrix:
        """Gates are never FP8."""
        if not all(name in self.kept.float8 for name, _ in parts):
            return self._stack([*parts, *gates], columns)
        return StackedMatrix((self._float8(parts, columns), self._plain(gates, columns)))

    def _float8(self, parts: list[tuple[str, int]], columns: int) -> Float8Matrix:
        rows = [rows for _, rows in parts]
        fused = Float8Matrix(
            torch.empty(sum(rows), columns, dtype=torch.float8_e4m3fn, device=self.device),
            torch.empty(sum(rows), 1, dtype=torch.float32, device=self.device),
        )
        views = zip(torch.split(fused.values, rows), torch.split(fused.scale, rows), strict=True)
        for (name, _), (values, scale) in zip(parts, views, strict=True):
            self.targets |= {name: values, scale_name(name): scale}
        return fused

    def _stack(self, parts: list[tuple[str, int]], columns: int) -> Matrix:
        """Neighbours that are held in one way are one matrix; each package chooses which it quantizes."""
        runs = [(packed, list(run)) for packed, run in groupby(parts, lambda part: part[0] in self.kept.int4)]
        return stacked(
            [self._int4(run, columns) if packed else self._plain(run, columns) for packed, run in runs]
        )

    def _int4(self, parts: list[tuple[str, int]], columns: int) -> Int4Matrix:
        fused = Int4Matrix.empty(sum(rows for _, rows in parts), columns, self.kept.group, self.device)
        start = 0
        for name, rows in parts:
            self.packed[name] = fused[start : start + rows]
            start += rows
        return fused

    def _plain(self, parts: list[tuple[str, int]], columns: int) -> Tensor:
        fused = torch.empty(sum(rows for _, rows in parts), columns, dtype=self.dtype, device=self.device)
        views = torch.split(fused, [rows for _, rows in parts])
        self.targets.update(zip((name for name, _ in parts), views, strict=True))
        return fused

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return self._fused([(name, rows)], columns)

    def _vector(self, name: str, size: int) -> Tensor:
        """Norms, A_log and dt_bias are few and sensitive: FP32 always, so that loading never rounds them."""
        vector = self.targets[name] = torch.empty(size, dtype=torch.float32, device=self.device)
        return vector
