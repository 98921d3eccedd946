"""The backbone's parameters, laid out for the pass: projections that read the same rows are one matrix."""

from collections.abc import Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d3serve.kernels.matrix import Float8Matrix, Matrix, StackedMatrix, quantize_rows
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

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden] FP32
    readout: Tensor  # [codes, hidden] FP32


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
        stacked = StackedMatrix((eight, mixer.inputs[-gates:].clone()))
        mixer = replace(mixer, inputs=stacked)
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
        float8: Set[str] = frozenset(),
    ) -> None:
        """Allocate on `device` in `dtype`, but matrices whose every part `float8` names as FP8 with scales."""
        self.float8 = float8
        self.geometry = geometry
        self.device = device
        self.dtype = dtype
        self.targets: dict[str, Tensor] = {}

    def weights(self, codes: int) -> Weights:
        """Allocate everything; `targets` then lists every tensor that a package must hold."""
        g = self.geometry
        return Weights(
            embedding=self._plain([("embed_tokens.weight", g.vocab_size)], g.hidden),
            layers=tuple(self._layer(index) for index in range(len(g.layer_types))),
            norm=self._vector("norm.weight", g.hidden),
            readout=torch.empty(codes, g.hidden, dtype=torch.float32, device=self.device),
        )

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
            inputs=self._stack(inputs, gates, g.hidden),
            conv=conv,
            A_log=self._vector(prefix + "A_log", g.linear_value_heads),
            dt_bias=self._vector(prefix + "dt_bias", g.linear_value_heads),
            norm=self._vector(prefix + "norm.weight", g.linear_value_dim),
            out=self._matrix(prefix + "out_proj.weight", g.hidden, values),
        )

    def _fused(self, parts: list[tuple[str, int]], columns: int) -> Matrix:
        if not all(name in self.float8 for name, _ in parts):
            return self._plain(parts, columns)
        return self._float8(parts, columns)

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

    def _stack(self, parts: list[tuple[str, int]], plain: list[tuple[str, int]], columns: int) -> Matrix:
        """One matrix where all is plain; `plain` always is."""
        if not all(name in self.float8 for name, _ in parts):
            return self._plain([*parts, *plain], columns)
        return StackedMatrix((self._float8(parts, columns), self._plain(plain, columns)))

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
