"""Attention over a packed pass: every row sees its state's keys in the pool, then its own block.

One Triton kernel for state rows (own block both ways), question rows (their state's pool range, then their
own block), causal blocks and whole prompts. The query heads of a key/value head stand together in the row
tile, so K and V are read once for all of them; long ranges are split over keys and merged by their log-sum-exp.
No mask tensor is ever built: `attention_plan` says which keys need a look at the rows' own ranges.
"""

from collections.abc import Iterator, Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from d3serve.kernels import cards
from d3serve.kernels.attention_cut import Cut, cut_segments
from d3serve.kernels.attention_dense import attend_dense, dense_blocks
from d3serve.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS, AttentionPlan, Sizes, plan_tiles
from d3serve.kernels.attention_tiles import TileShape, choose_tile
from d3serve.kernels.segments import AttentionShape, Segment

LOG2_E = 1.4426950408889634
MERGE_ROWS = 16  # packed rows that one merge program joins: small, so that a few tiles still fill the device


@triton.jit
def _soften(scores, row_sum, row_max, visible, qk_scale, MASKED: tl.constexpr):
    """One step of the online softmax in the log2 domain: (weights, decay of what came before, row_sum, row_max)."""
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    shift = new_max
    if MASKED:
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: (-inf) - (-inf) is NaN
    weights = tl.exp2(scores * qk_scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    return weights, decay, row_sum * decay + tl.sum(weights, 1), new_max


@triton.jit
def _prefix_bidir_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
    row_ranges_ptr, edges_ptr, items_ptr,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_o, stride_oh,
    qk_scale,
    k_desc, v_desc,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program i·KV_HEADS + h does item i for key/value head h; see `attention_plan` for the fields."""
    kv_head = tl.program_id(0) % KV_HEADS
    fields = items_ptr + tl.program_id(0) // KV_HEADS * ITEM_FIELDS
    first_row = tl.load(fields)
    rows = tl.load(fields + 1)
    if rows == 0:
        return  # of a padded plan
    open_begin = tl.load(fields + 2)
    open_end = tl.load(fields + 3)
    first_edge = tl.load(fields + 4)
    edges = tl.load(fields + 5)
    slot = tl.load(fields + 6)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = (offs_d < HEAD_DIM)[None, :]
    # 64-bit once, for the tile's corner; within a tile 32 bits are enough.
    # Rows past the tile's last one repeat it: valid to read, never stored.
    in_tile = tl.minimum(offs_m // GROUP, rows - 1)
    is_row = offs_m < rows * GROUP
    q_tile = q_ptr + first_row.to(tl.int64) * stride_q + kv_head * GROUP * stride_qh
    in_q = in_tile * stride_q + offs_m % GROUP * stride_qh
    q = tl.load(q_tile + (in_q[:, None] + offs_d[None, :]), mask=in_head, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)

    whole_end = open_begin + (open_end - open_begin) // BLOCK_N * BLOCK_N
    if OVERLAP:
        # The product with V lags one block behind: it runs on the tensor cores during the next softmax.
        # The first one multiplies zeros with the first block.
        weights = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        decay = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
        for start in range(open_begin, whole_end, BLOCK_N):
            k = k_desc.load([start, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            v = v_desc.load([tl.maximum(start - BLOCK_N, open_begin), kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
            weights, decay, row_sum, row_max = _soften(scores, row_sum, row_max, None, qk_scale, False)
        if whole_end > open_begin:
            v = v_desc.load([whole_end - BLOCK_N, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    else:
        for start in range(open_begin, whole_end, BLOCK_N):
            k = k_desc.load([start, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            weights, decay, row_sum, row_max = _soften(scores, row_sum, row_max, None, qk_scale, False)
            v = v_desc.load([start, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    # The open range's ragged end, then the edges: keys outside are not even loaded, since a pool
    # row that nobody owns may hold anything, and 0 x NaN is NaN.
    ranges = row_ranges_ptr + 2 * (first_row + in_tile)
    own_begin = tl.load(ranges)
    own_end = tl.load(ranges + 1)
    tails = (open_end > whole_end).to(tl.int32)
    for block in range(tails + edges):
        is_tail = block < tails
        edge = edges_ptr + 2 * (first_edge + block - tails)
        start = tl.load(edge, mask=block >= tails, other=whole_end)
        end = tl.load(edge + 1, mask=block >= tails, other=open_end)
        key = start + offs_n
        in_block = tl.minimum(offs_n, end - start - 1)
        k_tile = k_ptr + start.to(tl.int64) * stride_k + kv_head * stride_kh
        v_tile = v_ptr + start.to(tl.int64) * stride_v + kv_head * stride_vh
        k = tl.load(k_tile + (in_block[:, None] * stride_k + offs_d[None, :]), mask=in_head, other=0.0)
        v = tl.load(v_tile + (in_block[:, None] * stride_v + offs_d[None, :]), mask=in_head, other=0.0)
        begins = tl.where(is_tail, start, own_begin)
        ends = tl.minimum(tl.where(is_tail, end, own_end), end)
        visible = (key[None, :] >= begins[:, None]) & (key[None, :] < ends[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weights, decay, row_sum, row_max = _soften(scores, row_sum, row_max, visible, qk_scale, True)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    nothing = row_sum == 0.0
    acc = acc / tl.where(nothing, 1.0, row_sum)[:, None]
    store = is_row[:, None] & in_head
    if slot < 0:
        o_tile = out_ptr + first_row.to(tl.int64) * stride_o + kv_head * GROUP * stride_oh
        in_o = in_tile * stride_o + offs_m % GROUP * stride_oh
        tl.store(o_tile + (in_o[:, None] + offs_d[None, :]), acc.to(out_ptr.dtype.element_ty), mask=store)
    else:
        part = (slot * KV_HEADS + kv_head) * BLOCK_M
        lse = tl.where(nothing, float("-inf"), row_max + tl.log2(tl.where(nothing, 1.0, row_sum)))
        partial_tile = partial_ptr + part.to(tl.int64) * HEAD_DIM
        tl.store(partial_tile + (offs_m[:, None] * HEAD_DIM + offs_d[None, :]), acc, mask=store)
        tl.store(lse_ptr + part + offs_m, lse, mask=is_row)


@triton.jit
def _merge_kernel(
    out_ptr, partial_ptr, lse_ptr, merges_ptr, stride_o, stride_oh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, MERGE_FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (merge, kv_head, part): out = sum of 2^(lse_i - max) out_i over the pieces, normalised."""
    kv_head = tl.program_id(1)
    fields = merges_ptr + tl.program_id(0) * MERGE_FIELDS
    first_row = tl.load(fields)
    rows = tl.load(fields + 1)
    first_slot = tl.load(fields + 2)
    pieces = tl.load(fields + 3)

    offs_m = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = offs_m < rows * GROUP
    mask = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    weight_sum = tl.zeros([BLOCK_R], dtype=tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    for slot in range(first_slot, first_slot + pieces):
        part = ((slot * KV_HEADS + kv_head) * BLOCK_M + offs_m).to(tl.int64)
        lse = tl.load(lse_ptr + part, mask=is_row, other=float("-inf"))
        piece = tl.load(partial_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay, weight = tl.exp2(top - shift), tl.exp2(lse - shift)
        acc = acc * decay[:, None] + piece * weight[:, None]
        weight_sum = weight_sum * decay + weight
        top = new_top
    acc = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    row = first_row + offs_m // GROUP
    o_offset = row.to(tl.int64) * stride_o + (kv_head * GROUP + offs_m % GROUP) * stride_oh
    tl.store(out_ptr + o_offset[:, None] + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def cut_attention(segments: Sequence[Segment], shape: AttentionShape) -> Cut:
    """Cut one pass into tiles; long both-ways blocks go whole to a library where it is faster.

    How a segment's sums are taken depends on that segment and the kind of device alone, so neither company nor
    another worker changes a bit of its rows.

    Raises:
        ValueError: H is no multiple of HK, D is not 16 to 256, no tile fits the device, or the segments overlap
            or are out of order.
    """
    return cut_segments(
        segments,
        causal=shape.causal,
        group=shape.heads // shape.kv_heads,
        tile=_tile(shape),
        dense=dense_blocks(segments, shape),
    )


def plan_attention(cut: Cut, shape: AttentionShape, *, sizes: Sizes | None = None) -> AttentionPlan:
    """Plan a pass: made once, used by every layer.

    `sizes` pad the plan for a CUDA graph: `launch` then depends on them alone.

    Raises:
        ValueError: the pass does not fit `sizes`.
    """
    processors = cards.card(shape.device).processors
    wave = processors // gcd(
        processors, shape.kv_heads
    )  # items whose programs fill the device once or a few times
    return plan_tiles(cut, kv_heads=shape.kv_heads, device=shape.device, sizes=sizes, wave=wave)


def _tile(shape: AttentionShape) -> TileShape:
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    if heads % kv_heads or not 16 <= head_dim <= 256:
        raise ValueError(f"cannot serve {heads} query heads over {kv_heads} of width {head_dim}")
    return choose_tile(
        group=heads // kv_heads,
        head_dim=head_dim,
        itemsize=shape.dtype.itemsize,
        card=cards.card(shape.device),
    )


def prefix_bidir_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: AttentionPlan,
    *,
    softmax_scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each segment's rows to its whole prefix and its own block: all of it, or backwards when causal.

    Args:
        q: [T, H, D] queries of every row of the pass; query head h reads key/value head h // (H // HK).
        k_pool: [P, HK, D] keys of every pool row, with any row stride.
        v_pool: [P, HK, D] values.
        plan: from `plan_attention`, for these heads.
        softmax_scale: factor of the scores, positive.
        out: [T, H, D] to write into; a new tensor by default.

    Returns:
        [T, H, D] in q's type, accumulated in FP32; rows of no segment are not written.

    Raises:
        ValueError: shapes, types or strides disagree with each other or with the plan.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for _ in attention_steps(q, k_pool, v_pool, out, plan, softmax_scale=softmax_scale):
        pass
    return out


def attention_steps(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: AttentionPlan, *, softmax_scale: float
) -> Iterator[int]:
    """Attend as `prefix_bidir_attention`, in steps of about `STEP_PAIRS` that the plan has fixed.

    Yields, after each step is launched, how many pairs of a query row and a key it is. What runs on the stream
    between two steps changes no bit.

    Raises:
        ValueError: shapes, types or strides disagree with each other or with the plan.
    """
    _check(q, k_pool, v_pool, out, plan, softmax_scale)
    for block in plan.dense:
        yield from attend_dense(q, k_pool, v_pool, out, block, softmax_scale)
    yield from _attend_tiles(q, k_pool, v_pool, out, plan, softmax_scale)


def _check(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: AttentionPlan, softmax_scale: float
) -> None:
    T, H, D = q.shape
    P, HK, _ = k_pool.shape
    if (
        (HK, H % HK, k_pool.shape[2]) != (plan.kv_heads, 0, D)
        or v_pool.shape != k_pool.shape
        or out.shape != q.shape
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}, v_pool {tuple(v_pool.shape)} and out"
            f" {tuple(out.shape)} do not fit each other and a plan for {plan.kv_heads} key/value heads"
        )
    if plan.launch.rows > T or plan.pool_rows > P:
        raise ValueError(
            f"the plan needs {plan.launch.rows} rows and {plan.pool_rows} pool rows; there are {T} and {P}"
        )
    if len({q.dtype, k_pool.dtype, v_pool.dtype, out.dtype}) > 1:
        raise ValueError(
            f"types differ: q {q.dtype}, pools {k_pool.dtype} and {v_pool.dtype}, out {out.dtype}"
        )
    if any(x.stride(2) != 1 for x in (q, k_pool, v_pool, out)):
        raise ValueError("q, the pools and out must be contiguous in their last dimension")
    if any((n * x.itemsize) % 16 for x in (k_pool, v_pool) for n in (x.stride(0), x.stride(1))):
        raise ValueError(
            f"pool rows and heads must lie 16 bytes apart or a multiple of it: {k_pool.stride()}"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")


def _attend_tiles(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, plan: AttentionPlan, softmax_scale: float
) -> Iterator[int]:
    (_, H, D), HK = q.shape, plan.kv_heads
    launch, tile = plan.launch, plan.launch.tile
    width = triton.next_power_of_2(D)
    partial = q.new_empty((launch.partials, HK, tile.block_m, D), dtype=torch.float32)
    lse = q.new_empty((launch.partials, HK, tile.block_m), dtype=torch.float32)
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"  # three products of parts keep FP32's digits
    shape = {"HEAD_DIM": D, "GROUP": H // HK, "KV_HEADS": HK, "BLOCK_M": tile.block_m, "BLOCK_D": width}
    k_desc, v_desc = (
        TensorDescriptor(pool, pool.shape, pool.stride(), [tile.block_n, 1, width])
        for pool in (k_pool, v_pool)
    )
    for each in launch.rounds:
        items = plan.items[each.first_item : each.first_item + each.items]
        _prefix_bidir_kernel[(each.items * HK,)](
            q, k_pool, v_pool, out, partial, lse,
            plan.row_ranges, plan.edges, items,
            q.stride(0), q.stride(1), k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1),
            out.stride(0), out.stride(1),
            softmax_scale * LOG2_E, k_desc, v_desc,
            **shape, ITEM_FIELDS=ITEM_FIELDS, BLOCK_N=tile.block_n, OVERLAP=tile.overlap,
            PRECISION=precision, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if each.merges:
            merges = plan.merges[each.first_merge : each.first_merge + each.merges]
            _merge_kernel[(each.merges, HK, triton.cdiv(tile.block_m, MERGE_ROWS))](
                out, partial, lse, merges, out.stride(0), out.stride(1),
                **shape, MERGE_FIELDS=MERGE_FIELDS, BLOCK_R=MERGE_ROWS, num_warps=4,
            )  # fmt: skip
        yield each.pairs
