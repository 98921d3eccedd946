"""transformers on the very weights of our backbone: the peer, and the oracle at full size.

Its attention is registered for this comparison: cuDNN SDPA without a mask where every row sees every key, which
is the best case for it (its stock path builds a mask and is slower). Its gated delta rule is fla's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from d3serve.model.config import Geometry


class Peer:
    """`Qwen3_5TextModel` over borrowed weights: read the state once, or one whole prompt a question."""

    def __init__(self, geometry: Geometry, tensors: dict[str, Tensor], readout: Tensor) -> None:
        """Borrow `tensors` by their names in a package; nothing is copied."""
        attention = f"prefix_bidir_{id(self)}"  # each peer knows its own state's length
        AttentionInterface.register(attention, self._attend)
        self.state_tokens: int | None = None
        self.readout = readout
        config = _config(geometry, attention)
        with torch.device("meta"):
            self.model = qwen.Qwen3_5TextModel(config)
        self.model.load_state_dict(tensors, assign=True)
        self.model.rotary_emb = qwen.Qwen3_5TextRotaryEmbedding(config).to(readout.device)
        self.model.eval()

    def _attend(
        self, _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Rows of the state see the state, rows of a question see all that is there."""
        cut = self.state_tokens
        fast = query.is_cuda and query.dtype == torch.bfloat16
        backend = SDPBackend.CUDNN_ATTENTION if fast else SDPBackend.MATH
        with sdpa_kernel(backend):
            if cut is None or query.shape[2] <= cut:
                out = _sdpa(query, key, value, kwargs["scaling"])
            else:
                state = _sdpa(query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], kwargs["scaling"])
                out = torch.cat((state, _sdpa(query[:, :, cut:], key, value, kwargs["scaling"])), dim=2)
        return out.transpose(1, 2).contiguous(), None

    def _run(self, tokens: Tensor, cache: DynamicCache | None) -> Tensor:
        nothing = {"full_attention": None, "linear_attention": None}
        return self.model(
            input_ids=tokens, attention_mask=nothing, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state[:, -1]

    @torch.inference_mode()
    def whole_prompts(self, state: Tensor, questions: Sequence[Tensor]) -> Tensor:
        """Logits [N, codes] of one prompt a question, one by one, under the prefix_bidir mask."""
        self.state_tokens = len(state)
        rows = [self._run(torch.cat((state, question))[None], None) for question in questions]
        return torch.cat(rows).float() @ self.readout.T

    @torch.inference_mode()
    def whole_prompts_batched(self, state: Tensor, questions: Sequence[Tensor]) -> Tensor:
        """The same in one batch; questions must be of one length."""
        self.state_tokens = len(state)
        batch = torch.stack([torch.cat((state, question)) for question in questions])
        return self._run(batch, None).float() @ self.readout.T

    @torch.inference_mode()
    def state_once(self, state: Tensor, questions: Sequence[Tensor]) -> Tensor:
        """The state read once, its cache repeated, the questions as one batch; they must be of one length."""
        self.state_tokens = None
        cache = DynamicCache(config=self.model.config)
        self._run(state[None], cache)
        _repeat(cache, len(questions))
        return self._run(torch.stack(list(questions)), cache).float() @ self.readout.T


def _repeat(cache: DynamicCache, times: int) -> None:
    """One cache row for each question; transformers repeats only its full-attention layers by itself."""
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            for states in (layer.conv_states, layer.recurrent_states):
                states[0] = states[0].repeat_interleave(times, dim=0)
        else:
            layer.batch_repeat_interleave(times)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)


def _config(g: Geometry, attention: str) -> Qwen3_5TextConfig:
    config = Qwen3_5TextConfig(
        vocab_size=g.vocab_size, hidden_size=g.hidden, intermediate_size=g.ffn,
        num_hidden_layers=len(g.layer_types), layer_types=list(g.layer_types),
        num_attention_heads=g.heads, num_key_value_heads=g.kv_heads, head_dim=g.head_dim,
        linear_num_key_heads=g.linear_key_heads, linear_num_value_heads=g.linear_value_heads,
        linear_key_head_dim=g.linear_key_dim, linear_value_head_dim=g.linear_value_dim,
        linear_conv_kernel_dim=g.conv_width, rms_norm_eps=g.eps, max_position_embeddings=g.max_positions,
        rope_parameters={
            "rope_type": "default", "rope_theta": g.rope_theta, "mrope_interleaved": True,
            "partial_rotary_factor": g.rotary_dim / g.head_dim, "mrope_section": _sections(g.rotary_dim),
        },
    )  # fmt: skip
    config._attn_implementation = attention  # noqa: SLF001 - transformers' own way to name one
    return config


def _sections(rotary_dim: int) -> list[int]:
    """How the rotary dims fall to time, height and width; text reads the same position on all three."""
    half = rotary_dim // 2
    third = half // 3
    return [half - 2 * third, third, third]
