"""The linear layers' kernels compiled for a GPU, at the 27B's geometry and past 32-bit offsets."""

import pytest
import torch

from d3serve.kernels import reference
from d3serve.kernels.convolution import gdn_prepare
from d3serve.kernels.gated_delta import gated_delta_rule
from d3serve.kernels.recurrence_plan import plan_recurrence, recurrence_sizes
from d3serve.kernels.segments import Segment

pytestmark = pytest.mark.gpu

HK, HV, D, W = 16, 48, 128, 4
C = (2 * HK + HV) * D
SCALE = D**-0.5
BF16_ERROR = 8e-3  # operands rounded to 8 bits, three products deep; measured 4e-3


@pytest.fixture(autouse=True)
def _needs_a_gpu(device):
    if device.type != "cuda":
        pytest.skip("no GPU here")


def packed(state, questions, slot=0):
    """One state and its questions."""
    segments, row = [Segment(0, state, 0, final_slot=slot)], state
    for length in questions:
        segments.append(Segment(row, length, row, initial_slot=slot))
        row += length
    return segments


def inputs(rows, seed=0, decay=0.2):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    unit = torch.nn.functional.normalize
    q, k, v = unit(normal(rows, HK, D), dim=-1), unit(normal(rows, HK, D), dim=-1), normal(rows, HV, D)
    g = torch.rand(rows, HV, generator=generator, device="cuda") * -decay
    return q, k, v, g, torch.rand(rows, HV, generator=generator, device="cuda")


def error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def empty_states(slots=1):
    return torch.full((slots, HV, D, D), float("nan"), device="cuda")


@pytest.mark.parametrize("state", [1, 63, 64, 65, 300])
def test_rule_stays_within_bfloat16_of_the_reference(state):
    segments = packed(state, [1, 64, 65, 100])
    tensors = inputs(state + 230)
    states, expected_states = empty_states(), empty_states()
    plan = reference.Plan(tuple(segments))
    expected = reference.gated_delta_rule(*(x.float() for x in tensors), expected_states, plan, scale=SCALE)
    out = gated_delta_rule(*tensors, states, plan_recurrence(segments, device="cuda"), scale=SCALE)
    assert error(out, expected) < BF16_ERROR
    assert error(states, expected_states) < BF16_ERROR


def test_prepare_equals_the_reference_at_full_width():
    segments = packed(70, [1, 2, 40])
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(113, C + 6144 + 2 * HV, generator=generator, device="cuda", dtype=torch.bfloat16)
    mixed, _, b, a = wide.split((C, 6144, HV, HV), dim=1)
    conv = torch.randn(C, W, generator=generator, device="cuda", dtype=torch.bfloat16)
    gates = torch.rand(2, HV, generator=generator, device="cuda")
    shape = {"key_heads": HK, "value_heads": HV, "key_dim": D, "value_dim": D}
    states = [torch.full((1, C, W - 1), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    plan = reference.Plan(tuple(segments))
    expected = reference.gdn_prepare(mixed, b, a, conv, states[0], *gates, plan, **shape)
    plan = plan_recurrence(segments, device="cuda")
    for mine, theirs in zip(
        gdn_prepare(mixed, b, a, conv, states[1], *gates, plan, **shape), expected, strict=True
    ):
        assert error(mine, theirs) < BF16_ERROR
    assert torch.equal(*states)


@pytest.mark.parametrize("state", [1, 2, 3, 16, 17, 150])
def test_a_cached_state_gives_the_bits_of_one_in_the_pass_at_full_width(state):
    """Taps in FP32 on rows in BF16, which round every product. Fused sums in one path alone show only at this width."""
    segments = packed(state, [5] * 20)
    rows = state + 100
    generator = torch.Generator("cuda").manual_seed(state)
    wide = torch.randn(rows, C + 2 * HV, generator=generator, device="cuda", dtype=torch.bfloat16)
    conv = torch.randn(C, W, generator=generator, device="cuda")
    gates = torch.rand(2, HV, generator=generator, device="cuda")
    states = torch.full((1, C, W - 1), float("nan"), device="cuda", dtype=torch.bfloat16)
    shape = {"key_heads": HK, "value_heads": HV, "key_dim": D, "value_dim": D}

    def prepared(first, segments):
        mixed, b, a = wide[first:].split((C, HV, HV), dim=1)
        return gdn_prepare(
            mixed, b, a, conv, states, *gates, plan_recurrence(segments, device="cuda"), **shape
        )

    read = prepared(0, segments)
    cached = prepared(state, [each._replace(start=each.start - state) for each in segments[1:]])
    assert all(torch.equal(mine[state:], theirs) for mine, theirs in zip(read, cached, strict=True))


def test_long_state_past_32_bit_offsets_reads_its_last_rows_right():
    """349,900 rows x 6,144 lanes is past 2**31 elements; the decay forgets all but the last thousand rows."""
    state, question, kept = 349_900, 100, 2_048
    tensors = inputs(state + question)
    segments = packed(state, [question])
    out = gated_delta_rule(*tensors, empty_states(), plan_recurrence(segments, device="cuda"), scale=SCALE)
    tail = [x[state - kept :].contiguous() for x in tensors]
    short = plan_recurrence(packed(kept, [question]), device="cuda")
    expected = gated_delta_rule(*tail, empty_states(), short, scale=SCALE)
    assert error(out[-question:], expected[-question:]) < BF16_ERROR


def test_more_segments_than_a_grid_axis_would_hold():
    count = 2_000  # with 48 heads on one axis: past 65,535
    segments = [Segment(3 * i, 3, 3 * i) for i in range(count)]
    tensors = inputs(3 * count)
    out = gated_delta_rule(*tensors, empty_states(), plan_recurrence(segments, device="cuda"), scale=SCALE)
    last = [x[-3:].contiguous() for x in tensors]
    alone = gated_delta_rule(
        *last, empty_states(), plan_recurrence([Segment(0, 3, 0)], device="cuda"), scale=SCALE
    )
    assert torch.equal(out[-3:], alone)


def test_one_graph_serves_another_pass_of_its_bucket():
    captured, replayed = packed(70, [30, 20]), packed(40, [64])
    sizes = recurrence_sizes(captured)
    tensors = inputs(120)
    states = empty_states()
    plan = plan_recurrence(captured, device="cuda", sizes=sizes)
    gated_delta_rule(*tensors, states, plan, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta_rule(*tensors, states, plan, scale=SCALE)
    plan.table.copy_(plan_recurrence(replayed, device="cuda", sizes=sizes).table)
    states.fill_(float("nan"))
    graph.replay()
    eager_states = empty_states()
    eager = gated_delta_rule(*tensors, eager_states, plan_recurrence(replayed, device="cuda"), scale=SCALE)
    assert torch.equal(out[:104], eager[:104])
    assert torch.equal(states, eager_states)
