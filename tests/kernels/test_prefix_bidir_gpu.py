"""The attention kernel compiled for a GPU, at the 27B's geometry, past 32-bit offsets and inside CUDA graphs."""

import pytest
import torch

from d3serve.kernels.attention_cut import STEP_PAIRS, cut_segments
from d3serve.kernels.attention_plan import MAX_PARTIALS, Sizes, plan_tiles
from d3serve.kernels.attention_tiles import DENSE_ROWS, LARGE, SMALL
from d3serve.kernels.prefix_bidir import (
    attention_steps,
    cut_attention,
    plan_attention,
    prefix_bidir_attention,
)
from d3serve.kernels.segments import AttentionShape, Segment

pytestmark = pytest.mark.gpu

H, HK, D = 24, 4, 256
SCALE = D**-0.5


@pytest.fixture(autouse=True)
def _needs_a_gpu(device):
    if device.type != "cuda":
        pytest.skip("no GPU here")


def packed(*groups):
    """States first, then their questions: a group is (state tokens, question tokens...)."""
    segments, row = [], 0
    for state, *_ in groups:
        segments.append(Segment(row, state, row))
        row += state
    for index, (state, *questions) in enumerate(groups):
        at = sum(group[0] for group in groups[:index])
        for length in questions:
            segments.append(Segment(row, length, row, at, state))
            row += length
    return segments


def cached(prefix, *questions):
    """Questions alone, on a state that an earlier pass left at pool row 5."""
    starts = [sum(questions[:i]) for i in range(len(questions))]
    return [
        Segment(start, length, prefix + 9 + start, 5, prefix)
        for start, length in zip(starts, questions, strict=True)
    ]


def tensors(segments, dtype=torch.bfloat16):
    """Random q and pools; NaN in the pool rows that no segment owns."""
    rows = max(s.start + s.length for s in segments)
    pool = max(max(s.own_start + s.length, s.prefix_start + s.prefix_length) for s in segments) + 70
    generator = torch.Generator("cuda").manual_seed(rows)
    q, k_pool, v_pool = (
        torch.randn(n, heads, D, generator=generator, device="cuda").to(dtype)
        for n, heads in ((rows, H), (pool, HK), (pool, HK))
    )
    owned = torch.zeros(pool, dtype=torch.bool, device="cuda")
    for s in segments:
        owned[s.own_start : s.own_start + s.length] = True
        owned[s.prefix_start : s.prefix_start + s.prefix_length] = True
    k_pool[~owned] = v_pool[~owned] = float("nan")
    return q, k_pool, v_pool


def plain(q, k_pool, v_pool, segment, causal, rows=slice(None)):
    """softmax(q·k)·v of some rows of a segment, in the type of the arguments."""
    keys = torch.cat(
        (
            torch.arange(segment.prefix_start, segment.prefix_start + segment.prefix_length, device=q.device),
            torch.arange(segment.own_start, segment.own_start + segment.length, device=q.device),
        )
    )
    at = torch.arange(segment.length, device=q.device)[rows]
    k, v = (pool[keys].repeat_interleave(H // HK, dim=1).transpose(0, 1) for pool in (k_pool, v_pool))
    scores = q[segment.start + at].transpose(0, 1) @ k.transpose(1, 2) * SCALE
    if causal:
        last = segment.prefix_length + at
        scores = scores.masked_fill(torch.arange(len(keys), device=q.device) > last[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def assert_close(actual, q, k_pool, v_pool, segments, causal=False, rows=slice(None)):
    """FlashAttention's rule: at most twice the error of plain PyTorch in the same type."""
    doubles = [x.double() for x in (q, k_pool, v_pool)]
    for segment in segments:
        expected = plain(*doubles, segment, causal, rows)
        allowed = 2 * (plain(q, k_pool, v_pool, segment, causal, rows).double() - expected).abs().max() + 1e-6
        error = (actual[segment.start : segment.start + segment.length][rows].double() - expected).abs().max()
        assert error <= allowed, f"{segment}: error {error:.3g}, allowed {allowed:.3g}"


def served(segments, causal=False, dtype=torch.bfloat16, **options):
    shape = AttentionShape(causal, H, HK, D, dtype, torch.device("cuda"))
    return plan_attention(cut_attention(segments, shape), shape, **options)


def tiled(segments, causal=False, tile=LARGE):
    cut = cut_segments(segments, causal=causal, group=H // HK, tile=tile)
    return plan_tiles(cut, kv_heads=HK, device=torch.device("cuda"))


PASSES = {
    "one token each": packed((1, 1)),
    "around a block": packed((63, 1, 64), (64, 17), (65, 100), (127, 5)),
    "a thousand": packed((1_000, 100, 15, 230)),
    "many questions": packed((150, *[80] * 64)),
    "short questions share tiles": packed((150, *[7] * 30)),
    "cached, split over keys": cached(5_000, 100, 1, 60),
    "cached, one token": cached(3_001, 1),
}


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("name", PASSES)
def test_bfloat16_stays_within_twice_the_rounding_of_pytorch(name, causal):
    segments = PASSES[name]
    inputs = tensors(segments)
    for plan in (
        served(segments, causal),
        tiled(segments, causal),
        tiled(segments, causal, SMALL[0]),
    ):
        assert_close(
            prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE), *inputs, segments, causal=causal
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types(dtype):
    for segments in (packed((70, 30, 9)), cached(3_000, 40)):
        inputs = tensors(segments, dtype)
        plan = served(segments, dtype=dtype)
        assert_close(prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE), *inputs, segments)


@pytest.mark.parametrize("tile", [LARGE, *SMALL], ids=lambda t: str(t[:2]))
def test_every_tile(tile):
    segments = packed((150, 33, 90))
    inputs = tensors(segments)
    plan = tiled(segments, tile=tile)
    assert_close(prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE), *inputs, segments)


def test_two_runs_give_the_same_bits():
    segments = cached(5_000, 100, 1, 60)
    inputs, plan = tensors(segments), served(segments)
    assert plan.launch.merges
    first, second = (prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("prefix", [150, 5_000, 60_000])
def test_a_question_has_the_same_bits_alone_and_among_63_others(prefix):
    crowd = cached(prefix, *[80, 100, 33, 47] * 16)
    inputs = tensors(crowd)
    among = prefix_bidir_attention(*inputs, served(crowd), softmax_scale=SCALE)
    alone = prefix_bidir_attention(*inputs, served(crowd[:1]), softmax_scale=SCALE)
    assert torch.equal(alone[:80], among[:80])


def test_offsets_past_32_bits():
    rows, prefix = 349_600, 2_200_000  # rows·H·D and prefix·HK·D are past 2^31
    question = Segment(rows - 40, 40, prefix - 200, prefix - 5_000, 4_700)
    q = torch.zeros(rows, H, D, dtype=torch.bfloat16, device="cuda")
    k_pool, v_pool = (torch.zeros(prefix, HK, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for x, count in ((q, 40), (k_pool, 5_000), (v_pool, 5_000)):
        x[-count:].normal_()
    plan = served([question])
    actual = prefix_bidir_attention(q, k_pool, v_pool, plan, softmax_scale=SCALE)
    near = Segment(0, 40, 4_800, 0, 4_700)
    assert_close(actual[-40:], q[-40:], k_pool[-5_000:], v_pool[-5_000:], [near])


def test_a_captured_graph_replays_another_plan_of_equal_launch():
    first, second = packed((150, 100)), packed((40, 100, 60), (31, 9))
    inputs = tensors(packed((200, 56)))
    captured, fresh = (served(segments, sizes=Sizes(256, 8, 0)) for segments in (first, second))
    assert captured.launch == fresh.launch
    prefix_bidir_attention(*inputs, captured, softmax_scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefix_bidir_attention(*inputs, captured, softmax_scale=SCALE)
    captured.table.copy_(fresh.table)
    graph.replay()
    exact = served(second)
    assert_close(out, *inputs, second)
    assert torch.equal(
        out[: exact.launch.rows],
        prefix_bidir_attention(*inputs, fresh, softmax_scale=SCALE)[: exact.launch.rows],
    )


def test_a_long_block_goes_to_cudnn_and_agrees_with_the_kernel():
    rows = DENSE_ROWS.start
    segments = packed((rows, 100))
    inputs = tensors(segments)
    plan = served(segments)
    assert [block.length for block in plan.dense] == [rows]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        actual = prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("cudnn" in name for name in names), names
    last = slice(-50, None)
    assert_close(actual, *inputs, segments, rows=last)
    kernel_alone = prefix_bidir_attention(*inputs, tiled(segments), softmax_scale=SCALE)
    assert_close(kernel_alone, *inputs, segments, rows=last)


@pytest.mark.parametrize("rows", [DENSE_ROWS.stop - 1_000, DENSE_ROWS.stop + 1_000], ids=["cudnn", "kernel"])
def test_a_long_state_is_attended_in_steps_of_bounded_work(rows):
    segments = packed((rows, 50))
    inputs, plan = tensors(segments), served(segments)
    steps = list(attention_steps(*inputs, torch.empty_like(inputs[0]), plan, softmax_scale=SCALE))
    assert len(steps) > 8
    assert max(steps) <= STEP_PAIRS
    assert sum(steps) == plan.pairs


@pytest.mark.parametrize("rows", [4_000, DENSE_ROWS.start + 1_000], ids=["kernel", "cudnn"])
def test_no_square_tensor_is_built(rows):
    segments = packed((rows, 50))
    inputs, plan = tensors(segments), served(segments)
    out = torch.empty_like(inputs[0])
    prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE, out=out)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 3 * out.numel() * out.itemsize, f"{extra / 2**20:.0f} MiB"


def test_memory_of_unmerged_pieces_has_a_bound():
    peaks = []
    for count in (64, 256):
        segments = cached(60_000, *[40] * count)
        inputs, plan = tensors(segments), served(segments)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prefix_bidir_attention(*inputs, plan, softmax_scale=SCALE)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    more_output = 192 * 40 * H * D * 2
    assert peaks[1] < peaks[0] + 2 * more_output, peaks
    assert peaks[0] < 1.2 * MAX_PARTIALS * HK * LARGE.block_m * D * 4, peaks
