"""The attention kernel against a loop in FP64, in Triton's interpreter; `test_prefix_bidir_gpu` compiles it.

Every pool row that a pass may not read holds NaN, and so does all fresh memory: a row that is read or left out
by mistake shows. The rule of closeness is FlashAttention's: at most twice the error of plain PyTorch in the same
type, since that is what rounding alone costs.
"""

import pytest
import torch

from d3serve.kernels import prefix_bidir, reference
from d3serve.kernels.attention_cut import cut_segments
from d3serve.kernels.attention_plan import Sizes, plan_tiles
from d3serve.kernels.attention_tiles import LARGE, TileShape
from d3serve.kernels.prefix_bidir import prefix_bidir_attention
from d3serve.kernels.segments import AttentionShape, Segment

OVERLAPPED = TileShape(32, 16, 4, 2, overlap=True)
PLAIN = TileShape(16, 16, 4, 2, overlap=False)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="for Triton's interpreter; test_prefix_bidir_gpu compiles the kernel"
)

ROUNDING = 1e-6  # of outputs near 1 where plain PyTorch happens to be exact, over one key


def visible(segment, row, causal):
    prefix = range(segment.prefix_start, segment.prefix_start + segment.prefix_length)
    own = range(segment.own_start, segment.own_start + (row + 1 if causal else segment.length))
    return [*prefix, *own]


def loop(q, k_pool, v_pool, segments, causal, scale):
    """softmax(q·k)·v one row and one key/value head at a time, in the type of the arguments."""
    out = torch.full_like(q, float("nan"))
    group = q.shape[1] // k_pool.shape[1]
    for segment in segments:
        for row in range(segment.length):
            keys = torch.tensor(visible(segment, row, causal))
            for kv_head in range(k_pool.shape[1]):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                scores = q[segment.start + row, heads] @ k_pool[keys, kv_head].T * scale
                out[segment.start + row, heads] = scores.softmax(1) @ v_pool[keys, kv_head]
    return out


def tensors(segments, *, group=6, kv_heads=1, head_dim=32, dtype=torch.float32, seed=0):
    """Random q and pools; NaN in the pool rows that no segment owns."""
    rows = max((s.start + s.length for s in segments), default=0)
    pool = (
        max((max(s.own_start + s.length, s.prefix_start + s.prefix_length) for s in segments), default=0) + 20
    )
    generator = torch.Generator().manual_seed(seed)
    q, k_pool, v_pool = (
        torch.randn(n, heads, head_dim, generator=generator).to(dtype)
        for n, heads in ((rows, group * kv_heads), (pool, kv_heads), (pool, kv_heads))
    )
    owned = torch.zeros(pool, dtype=torch.bool)
    for s in segments:
        owned[s.own_start : s.own_start + s.length] = True
        owned[s.prefix_start : s.prefix_start + s.prefix_length] = True
    k_pool[~owned] = v_pool[~owned] = float("nan")
    return q, k_pool, v_pool


def make_plan(segments, q, k_pool, *, causal=False, tile=OVERLAPPED, **options):
    kv_heads = k_pool.shape[1]
    cut = cut_segments(segments, causal=causal, group=q.shape[1] // kv_heads, tile=tile)
    return plan_tiles(cut, kv_heads=kv_heads, device=q.device, **options)


def assert_close(actual, expected, plain):
    """FlashAttention's rule; a failure names the size and place of the largest error."""
    covered = ~expected.isnan()
    assert not actual[covered].isnan().any(), "a covered row holds NaN"
    error = torch.where(covered, actual.double() - expected, 0).abs()
    allowed = 2 * torch.where(covered, plain.double() - expected, 0).abs().max() + ROUNDING
    worst = [int(i) for i in (error == error.max()).nonzero()[0]]
    assert error.max() <= allowed, f"max {error.max():.3g} at {worst}, rms {error.square().mean().sqrt():.3g}"


def check(segments, *, causal=False, tile=OVERLAPPED, plan=None, **shape):
    q, k_pool, v_pool = tensors(segments, **shape)
    scale = q.shape[2] ** -0.5
    plan = plan or make_plan(segments, q, k_pool, causal=causal, tile=tile)
    actual = prefix_bidir_attention(q, k_pool, v_pool, plan, softmax_scale=scale)
    expected = loop(q.double(), k_pool.double(), v_pool.double(), segments, causal, scale)
    assert_close(actual, expected, loop(q, k_pool, v_pool, segments, causal, scale))
    return plan


def state_and_questions(state, questions, *, at=3):
    """A state at pool row `at`, and its questions behind it."""
    segments, row = [Segment(0, state, at)], state
    for length in questions:
        segments.append(Segment(row, length, at + row, at, state))
        row += length
    return segments


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("tile", [OVERLAPPED, PLAIN], ids=["overlapped", "plain"])
def test_a_state_and_questions_of_all_lengths(tile, causal):
    check(state_and_questions(37, [*range(1, 9), 17]), tile=tile, causal=causal)


@pytest.mark.parametrize("state", [1, 15, 16, 17, 33])
def test_states_around_a_block_and_one_token_questions(state):
    check(state_and_questions(state, [1, 1, 5, 1]))


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (2, 1), (3, 2), (4, 1), (6, 2), (8, 1)])
def test_each_query_head_reads_its_own_key_head(group, kv_heads):
    check(state_and_questions(18, [4, 7]), group=group, kv_heads=kv_heads)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_head_widths(head_dim):
    check(state_and_questions(18, [4, 7]), group=2, head_dim=head_dim)


def test_half_precision_accumulates_in_float32():
    check(state_and_questions(40, [9, 17]), group=3, dtype=torch.float16)


@pytest.mark.parametrize("tile", [OVERLAPPED, PLAIN], ids=["overlapped", "plain"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize(("rows", "prefix"), [(1, 700), (5, 643), (12, 1_300)])
def test_a_split_over_keys_is_merged(rows, prefix, tile, causal):
    plan = check([Segment(0, rows, prefix + 2, 1, prefix)], tile=tile, group=3, causal=causal)
    assert plan.launch.merges > 0


def test_pieces_that_do_not_fit_one_round_are_merged_in_several():
    segments = [Segment(3 * i, 3, 700 + 3 * i, 0, 640) for i in range(12)]
    q, k_pool, _ = tensors(segments)
    plan = make_plan(segments, q, k_pool, max_partials=20)
    assert len(plan.launch.rounds) > 3
    check(segments, plan=plan)


def test_steps_change_no_bit():
    segments = state_and_questions(60, [3, 20])
    q, k_pool, v_pool = tensors(segments)
    whole, cut = (make_plan(segments, q, k_pool, step_pairs=pairs) for pairs in (10**9, 2_000))
    assert len(cut.launch.rounds) > 2 * len(whole.launch.rounds)
    expected, actual = (prefix_bidir_attention(q, k_pool, v_pool, p, softmax_scale=0.2) for p in (whole, cut))
    assert torch.equal(actual, expected)


def test_several_states_in_any_order_of_pool_rows():
    segments = [
        Segment(0, 20, 200),
        Segment(20, 33, 100),
        Segment(53, 6, 300, 100, 33),
        Segment(59, 6, 150, 200, 20),
    ]
    check(segments, kv_heads=2, group=3)


def test_whole_prompts_share_nothing():
    check([Segment(0, 9, 0), Segment(9, 1, 9), Segment(10, 20, 10), Segment(30, 7, 80)])


def test_questions_of_two_states_of_one_length_stay_apart():
    check([Segment(0, 4, 50, 0, 20), Segment(4, 4, 54, 20, 20)], group=1)


def test_cached_states_with_gaps_between_the_rows():
    check([Segment(2, 5, 50, 0, 33), Segment(9, 3, 55, 0, 33), Segment(14, 20, 60, 40, 7)])


def test_no_segments():
    q, k_pool, v_pool = tensors([])
    out = prefix_bidir_attention(q, k_pool, v_pool, make_plan([], q, k_pool), softmax_scale=1.0)
    assert out.shape == (0, 6, 32)


@pytest.mark.usefixtures("ordered_products")
def test_views_of_one_projection_and_of_one_layer():
    segments = state_and_questions(20, [5, 6])
    q, k_pool, v_pool = tensors(segments)
    fused = torch.full((len(q), 6 * 2 * 32 + 8), float("nan"))
    fused_q = fused[:, : 6 * 2 * 32].view(-1, 6, 2, 32)[:, :, 0]  # a gate stands beside each query head
    fused_q.copy_(q)
    layers = torch.full((3, 2, *k_pool.shape), float("nan"))
    layers[1, 0], layers[1, 1] = k_pool, v_pool
    plan = make_plan(segments, q, k_pool)
    contiguous = prefix_bidir_attention(q, k_pool, v_pool, plan, softmax_scale=0.2)
    out = torch.full((len(q), 6, 64), float("nan"))[:, :, :32]
    views = prefix_bidir_attention(fused_q, layers[1, 0], layers[1, 1], plan, softmax_scale=0.2, out=out)
    assert views is out
    assert torch.equal(out, contiguous)


@pytest.mark.usefixtures("ordered_products")
def test_a_padded_plan_leaves_padded_rows_alone():
    segments = state_and_questions(20, [5, 75])
    q, k_pool, v_pool = tensors(segments, group=2)
    q = torch.cat((q, torch.full((28, 2, 32), float("nan"))))
    out = torch.full_like(q, 7.0)
    padded = make_plan(segments, q, k_pool, sizes=Sizes(128, 5, 8))
    prefix_bidir_attention(q, k_pool, v_pool, padded, softmax_scale=0.2, out=out)
    exact = make_plan(segments, q, k_pool)
    assert torch.equal(out[:100], prefix_bidir_attention(q, k_pool, v_pool, exact, softmax_scale=0.2)[:100])
    assert (out[100:] == 7).all()


@pytest.mark.usefixtures("ordered_products")
def test_a_table_copied_into_a_captured_plan_does_its_own_work():
    first, second = state_and_questions(20, [5, 60]), state_and_questions(33, [7, 2, 9])
    q, k_pool, v_pool = tensors(state_and_questions(60, [40]))
    captured, fresh = (make_plan(s, q, k_pool, sizes=Sizes(100, 4, 0)) for s in (first, second))
    assert captured.launch == fresh.launch
    captured.table.copy_(fresh.table)
    mine, theirs = (
        prefix_bidir_attention(q, k_pool, v_pool, p, softmax_scale=0.2) for p in (captured, fresh)
    )
    assert torch.equal(mine[:51], theirs[:51])


def test_an_empty_piece_changes_nothing():
    rows, kv_heads, head_dim, block_m = 2, 1, 16, 16
    partial, lse = torch.randn(3, kv_heads, block_m, head_dim), torch.zeros(3, kv_heads, block_m)
    partial[1], lse[1] = 0.0, float("-inf")
    out = torch.full((rows, 1, head_dim), float("nan"))
    merges = torch.tensor([[0, rows, 0, 3]], dtype=torch.int32)
    shape = {
        "HEAD_DIM": head_dim,
        "GROUP": 1,
        "KV_HEADS": 1,
        "MERGE_FIELDS": 4,
        "BLOCK_M": block_m,
        "BLOCK_R": 16,
    }
    launch = prefix_bidir._merge_kernel[(1, kv_heads, 1)]
    launch(out, partial, lse, merges, *out.stride()[:2], **shape, BLOCK_D=16)
    torch.testing.assert_close(out[:, 0], (partial[0, 0, :rows] + partial[2, 0, :rows]) / 2)
    lse.fill_(float("-inf"))
    launch(out, partial, lse, merges, *out.stride()[:2], **shape, BLOCK_D=16)
    assert (out == 0).all()


def attend(segments, q, k_pool, v_pool, **options):
    return prefix_bidir_attention(
        q, k_pool, v_pool, make_plan(segments, q, k_pool, **options), softmax_scale=0.2
    )


def test_who_hears_of_a_change():
    segments = state_and_questions(20, [6, 6])
    q, k_pool, v_pool = tensors(segments)
    before = attend(segments, q, k_pool, v_pool)

    def changed_by(pool_row):
        k, v = k_pool.clone(), v_pool.clone()
        k[pool_row], v[pool_row] = -k[pool_row], v[pool_row] + 1
        return (attend(segments, q, k, v) != before).flatten(1).any(1)

    assert changed_by(3 + 19).all(), "the state's last token reaches its first, and every question"
    last_of_first_question = changed_by(3 + 25)
    assert last_of_first_question[20:26].all(), "a question's last token reaches its first"
    assert not last_of_first_question[:20].any(), "no question reaches the state"
    assert not last_of_first_question[26:].any(), "no question reaches another"


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("tile", [OVERLAPPED, PLAIN], ids=["overlapped", "plain"])
@pytest.mark.parametrize("prefix", [20, 700])
def test_a_question_has_the_same_bits_alone_and_in_any_company(prefix, tile):
    lengths = [5, 1, 23, 5, 11, 1, 1, 3, 1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    crowd = [Segment(s, n, prefix + 10 + s, 3, prefix) for s, n in zip(starts, lengths, strict=True)]
    q, k_pool, v_pool = tensors(crowd)
    among = attend(crowd, q, k_pool, v_pool, tile=tile)
    items = make_plan(crowd, q, k_pool, tile=tile).items
    border = torch.tensor(starts)
    assert ((items[:, :1] < border) & (items[:, :1] + items[:, 1:2] > border)).any(), "questions share a tile"
    for segment in crowd[::2]:
        rows = slice(segment.start, segment.start + segment.length)
        alone = [segment._replace(start=2)]
        moved = torch.cat((q[:2], q[rows]))
        assert torch.equal(attend(alone, moved, k_pool, v_pool, tile=tile)[2:], among[rows])
        partials = cut_segments(alone, causal=False, group=6, tile=tile).partials
        padded = attend(alone, moved, k_pool, v_pool, tile=tile, sizes=Sizes(len(moved), 3, partials + 2))
        assert torch.equal(padded[2:], among[rows])


def widen_rows(plan):
    """Every row sees all edges of its tile: other questions, and of a causal block what comes after it."""
    plan.row_ranges[:, 0], plan.row_ranges[:, 1] = 0, 10**6


def drop_own_block(plan):
    plan.items[:, 5] = 0


def drop_prefix(plan):
    plan.items[:, 3] = plan.items[:, 2]


def drop_a_piece(plan):
    plan.merges[:, 3] -= 1


def drop_merges(plan):
    plan.merges.zero_()


@pytest.mark.parametrize(
    ("sabotage", "causal"), [(widen_rows, True), (drop_own_block, False), (drop_prefix, False)]
)
def test_these_tests_see_a_wrong_mask(sabotage, causal):
    segments = [Segment(6 * i, 6, 40 + 6 * i, 0, 20) for i in range(4)]
    q, k_pool, _ = tensors(segments)
    plan = make_plan(segments, q, k_pool, causal=causal)
    check(segments, causal=causal, plan=plan)
    sabotage(plan)
    with pytest.raises(AssertionError):
        check(segments, causal=causal, plan=plan)


@pytest.mark.parametrize("sabotage", [drop_a_piece, drop_merges])
def test_these_tests_see_a_wrong_merge(sabotage):
    segments = [Segment(0, 5, 700, 0, 640)]
    q, k_pool, _ = tensors(segments)
    plan = make_plan(segments, q, k_pool)
    check(segments, plan=plan)
    sabotage(plan)
    with pytest.raises(AssertionError):
        check(segments, plan=plan)


def test_the_reference_agrees_with_the_loop():
    segments = state_and_questions(18, [4, 7])
    q, k_pool, v_pool = tensors(segments, kv_heads=2, group=3)
    for causal in (False, True):
        plan = reference.Plan(tuple(segments), causal)
        actual = reference.prefix_bidir_attention(q, k_pool, v_pool, plan, softmax_scale=0.2)
        doubles = (x.double() for x in (q, k_pool, v_pool))
        assert_close(
            actual, loop(*doubles, segments, causal, 0.2), loop(q, k_pool, v_pool, segments, causal, 0.2)
        )


def test_the_served_plan_runs_as_it_is():
    segments = state_and_questions(40, [9, 12])
    q, _, _ = tensors(segments)
    shape = AttentionShape(False, 6, 1, 32, q.dtype, q.device)
    plan = prefix_bidir.plan_attention(prefix_bidir.cut_attention(segments, shape), shape)
    assert plan.launch.tile == LARGE
    check(segments, plan=plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"q": a["q"][:10]}, "needs 31 rows"),
        (lambda a: a | {"k_pool": a["k_pool"][:20], "v_pool": a["v_pool"][:20]}, "34 pool rows"),
        (lambda a: a | {"v_pool": a["v_pool"][:-1]}, "do not fit each other"),
        (lambda a: a | {"q": a["q"][:, :, :16]}, "do not fit each other"),
        (lambda a: a | {"k_pool": a["k_pool"].expand(-1, 2, -1)}, "do not fit each other"),
        (lambda a: a | {"k_pool": a["k_pool"].half()}, "types differ"),
        (
            lambda a: a | {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)},
            "contiguous in their last",
        ),
        (lambda a: a | {"k_pool": torch.zeros(54, 1, 33)[:, :, :32]}, "16 bytes apart"),
        (lambda a: a | {"softmax_scale": 0.0}, "must be positive"),
    ],
)
def test_misfits_are_refused_before_a_launch(change, message):
    segments = state_and_questions(20, [5, 6])
    q, k_pool, v_pool = tensors(segments)
    arguments = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "softmax_scale": 0.2}
    with pytest.raises(ValueError, match=message):
        prefix_bidir_attention(**change(arguments), plan=make_plan(segments, q, k_pool))
