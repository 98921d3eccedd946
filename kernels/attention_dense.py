"""Long both-ways blocks, handed whole to a library's dense attention in steps of query rows.

cuDNN's comes with PyTorch. FlashAttention-3 is faster, and on a Hopper alone: the wheel `fa3-fwd` holds its forward
kernels, which do not depend on PyTorch's version. In E4M3 it is faster again, and its answers are others.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from d3serve.kernels import cards
from d3serve.kernels.attention_cut import STEP_PAIRS, DenseBlock
from d3serve.kernels.attention_tiles import DENSE_ROWS, DENSE_TILE_ROWS, FLASH3_ROWS, FLOAT8_ROWS
from d3serve.kernels.matrix import LARGEST, SMALLEST_SCALE
from d3serve.kernels.segments import AttentionShape, LongAttention, Segment

FLASH3 = "fa3_fwd_interface"
# Keys whose products with V are summed by the tensor cores themselves, in 14 bits; pieces are joined in FP32. Where
# values lean one way, sums over 16,384 keys fall 2 % short, over 58,000 4 %; over 8,192 1 %, for 6 % of the time.
FLOAT8_PIECE = 16_384
PIECES_BYTES = 2**29  # of unjoined results at a time

Attend = Callable[[Tensor], Tensor]  # from query rows [R, H, D] to what they attend to


def flash3_fault() -> str | None:
    """Why FlashAttention-3 cannot run in this process; None where it can."""
    if find_spec(FLASH3) is None:
        return "fa3-fwd is not installed: pip install 'd3serve[fa3]'"
    try:
        _flash3()
    except (ImportError, OSError, RuntimeError) as error:
        return f"fa3-fwd does not load: {str(error).splitlines()[0]}"
    return None


def dense_blocks(segments: Sequence[Segment], shape: AttentionShape) -> tuple[DenseBlock, ...]:
    """Segments that a library takes whole."""
    here = cards.card(shape.device)
    widest = here.widest_cudnn_head if shape.device.type == "cuda" and shape.dtype.itemsize == 2 else 0
    if shape.causal or shape.head_dim > widest:
        return ()
    lengths = DENSE_ROWS if shape.long == "ours" else FLASH3_ROWS
    wave = DENSE_TILE_ROWS * here.processors // shape.heads  # rows that fill the device once
    return tuple(_block(s, shape, wave) for s in segments if s.length in lengths and s.prefix_length == 0)


def _block(segment: Segment, shape: AttentionShape, wave: int) -> DenseBlock:
    """Whole waves of about `STEP_PAIRS` a step, and fewer where rows are attended to in pieces."""
    length = segment.length
    attention: LongAttention = "fa3" if shape.long == "fp8" and length not in FLOAT8_ROWS else shape.long
    rows = STEP_PAIRS // length
    if attention == "fp8":
        row_bytes = shape.heads * shape.head_dim * torch.float32.itemsize
        rows = min(rows, PIECES_BYTES // (_pieces(length) * row_bytes))
    return DenseBlock(segment.start, length, segment.own_start, max(1, rows // wave) * wave, attention)


def _pieces(length: int) -> int:
    return -(-length // FLOAT8_PIECE)


def attend_dense(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, block: DenseBlock, softmax_scale: float
) -> Iterator[int]:
    """Attend within one both-ways block; yields how many pairs of a query row and a key each step was."""
    own = slice(block.own_start, block.own_start + block.length)
    attend = ATTENTIONS[block.attention](k_pool[own], v_pool[own], softmax_scale)
    end = block.start + block.length
    for first in range(block.start, end, block.step_rows):
        rows = slice(first, min(first + block.step_rows, end))
        out[rows] = attend(q[rows])
        yield (rows.stop - rows.start) * block.length


def _by_cudnn(k: Tensor, v: Tensor, softmax_scale: float) -> Attend:
    """CuDNN's; a backend that builds N x N scores is never taken."""
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))

    def attend(q: Tensor) -> Tensor:
        query = q.transpose(0, 1).unsqueeze(0)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = F.scaled_dot_product_attention(query, key, value, scale=softmax_scale, enable_gqa=True)
        return attended[0].transpose(0, 1)

    return attend


def _by_flash3(k: Tensor, v: Tensor, softmax_scale: float) -> Attend:
    """FlashAttention-3's, in the type of the operands."""
    attend = partial(
        _flash3(), k=k[None], v=v[None], softmax_scale=softmax_scale, num_splits=1, pack_gqa=False
    )
    return lambda q: attend(q[None])[0]


def _by_flash3_float8(k: Tensor, v: Tensor, softmax_scale: float) -> Attend:
    """FlashAttention-3's with both products in E4M3.

    The mean key adds the same to all scores of a row, and every row's weights sum to one: so means are taken out of
    K and V before they are rounded, and V's is added to what was attended to. What E4M3 leaves then is a
    relative error of each number, so one scale a head is as good as one a block.
    """
    (keys, k_scale, _), (values, v_scale, mean) = (_centred(x) for x in (k, v))
    heads = len(mean)
    attend = partial(
        _flash3(), k=keys[None], v=values[None], k_descale=k_scale[None], v_descale=v_scale[None],
        softmax_scale=softmax_scale, num_splits=_pieces(len(k)), pack_gqa=False,
    )  # fmt: skip

    def attend_rows(q: Tensor) -> Tensor:
        grouped = (len(q), heads, -1, q.shape[2])
        wide = q.reshape(grouped).to(torch.float32, copy=True)
        scale = _scale(wide, (0, 2, 3))
        rows = _rounded(wide, scale[:, None, None]).flatten(1, 2)
        attended: Tensor = attend(rows[None], q_descale=scale[None])[0]
        return (attended.reshape(grouped) + mean[:, None]).flatten(1, 2)

    return attend_rows


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, float], Attend]] = {
    "ours": _by_cudnn,
    "fa3": _by_flash3,
    "fp8": _by_flash3_float8,
}


def _centred(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 of x [T, HK, D] less its mean row, the scale of each head [HK], and the mean [HK, D], in FP32."""
    wide = x.to(torch.float32, copy=True)
    mean = wide.mean(0)
    wide -= mean
    scale = _scale(wide, (0, 2))
    return _rounded(wide, scale[:, None]), scale, mean


def _scale(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dims)
    return (largest / LARGEST).clamp_(min=SMALLEST_SCALE)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 of x / scale; x is used up."""
    return x.div_(scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@cache
def _flash3() -> Callable[..., Any]:
    from fa3_fwd_interface import flash_attn_func  # noqa: PLC0415 # 100 MB, on a Hopper alone

    return flash_attn_func  # type: ignore[no-any-return]
