"""gdn_prepare against one convolution per whole sequence: a state and its question must read as one text."""

import pytest
import torch
import torch.nn.functional as F

from d3serve.kernels.convolution import gdn_prepare
from d3serve.kernels.recurrence_plan import RecurrenceSizes, plan_recurrence
from d3serve.kernels.segments import Segment

HK, HV, K, V, W = 1, 2, 8, 16, 4
C = 2 * HK * K + HV * V
SHAPE = {"key_heads": HK, "value_heads": HV, "key_dim": K, "value_dim": V}
ATOL = 1e-5  # float32 sums of four taps; a missing tap is off by 1e-1
SHORT = [1, 2, 3, 4, 5]


@pytest.fixture
def weights(device):
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(C, W, generator=generator)
    a_log, dt_bias = torch.rand(HV, generator=generator) * 2, torch.randn(HV, generator=generator)
    return [x.to(device) for x in (conv, a_log, dt_bias)]


def projection(rows, device, seed=0):
    """(mixed, b, a): slices of one wider tensor, as the backbone hands them in."""
    wide = torch.randn(rows, C + 40 + 2 * HV, generator=torch.Generator().manual_seed(seed)).to(device)
    return wide[:, :C], wide[:, C + 40 : C + 40 + HV], wide[:, C + 40 + HV :]


def whole_sequence(mixed, b, a, weights):
    """The five outputs for rows that form one sequence from its very beginning, in float64."""
    conv, a_log, dt_bias = (x.double() for x in weights)
    x = F.conv1d(F.pad(mixed.double().T[None], (W - 1, 0)), conv[:, None], groups=C)[0].T
    x = x / (1 + (-x).exp())
    q, k, v = x.split((HK * K, HK * K, HV * V), dim=1)
    q, k = (y.reshape(-1, HK, K) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = -a_log.exp() * F.softplus(a.double() + dt_bias)
    return q, k, v.reshape(-1, HV, V), g, 1 / (1 + (-b.double()).exp())


def prepare(tensors, weights, states, segments, **options):
    conv, a_log, dt_bias = weights
    plan = plan_recurrence(segments, device=conv.device, **options)
    return gdn_prepare(*tensors, conv, states, a_log, dt_bias, plan, **SHAPE)


def assert_same(actual, expected):
    for mine, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=0, atol=ATOL)


def new_states(device, slots=3):
    return torch.full((slots, C, W - 1), float("nan"), device=device)


@pytest.mark.parametrize("state", [*SHORT, 16, 17])
@pytest.mark.parametrize("cached", [False, True])
def test_questions_continue_their_state(state, cached, weights, device):
    tensors = projection(state + sum(SHORT), device)
    states = new_states(device)
    state_segment = Segment(0, state, 0, final_slot=1)
    starts = [state + sum(SHORT[:i]) for i in range(len(SHORT))]
    questions = [Segment(s, n, s, initial_slot=1) for s, n in zip(starts, SHORT, strict=True)]
    if cached:
        first = prepare([x[:state] for x in tensors], weights, states, [state_segment])
        behind = [question._replace(start=question.start - state) for question in questions]
        second = prepare([x[state:] for x in tensors], weights, states, behind)
        actual = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    else:
        actual = prepare(tensors, weights, states, [state_segment, *questions])
    for question in questions:
        rows = [*range(state), *range(question.start, question.start + question.length)]
        assert_same([x[rows] for x in actual], whole_sequence(*(x[rows] for x in tensors), weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("state", [1, 3, 4, 17])
def test_a_cached_state_gives_the_bits_of_one_in_the_pass(state, dtype, weights, device):
    """The taps are in FP32 either way: their products are rounded, so sums fused in one path alone would show."""
    count = 20 if device.type == "cuda" else 2  # an interpreter fuses nothing, and takes seconds for each row
    questions = [Segment(state + 5 * i, 5, state + 5 * i, initial_slot=1) for i in range(count)]
    tensors = [x.to(dtype) for x in projection(state + 5 * count, device)]
    states = new_states(device).to(dtype)
    read = prepare(tensors, weights, states, [Segment(0, state, 0, final_slot=1), *questions])
    alone = [question._replace(start=question.start - state) for question in questions]
    cached = prepare([x[state:] for x in tensors], weights, states, alone)
    assert all(torch.equal(mine[state:], theirs) for mine, theirs in zip(read, cached, strict=True))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 16, 17, 18, 19, 33])
@pytest.mark.parametrize("continued", [False, True])
def test_final_state_is_the_last_raw_rows(length, continued, weights, device):
    tensors = projection(length, device)
    states = new_states(device)
    states[2] = torch.arange(C * (W - 1), device=device).view(C, W - 1) / 64
    initial = 2 if continued else -1
    kept = states[2].clone()
    prepare(tensors, weights, states, [Segment(0, length, 0, initial_slot=initial, final_slot=1)])
    history = kept.T if continued else torch.zeros(W - 1, C, device=device)
    assert torch.equal(states[1], torch.cat((history, tensors[0]))[-(W - 1) :].T)
    assert torch.equal(states[2], kept)
    assert states[0].isnan().all()


def test_packed_neighbours_do_not_leak(weights, device):
    lengths = [20, 3, 1, 17, 2]
    tensors = projection(sum(lengths), device)
    segments, start = [], 0
    for i, length in enumerate(lengths):
        segments.append(Segment(start, length, start, final_slot=0 if i == 0 else -1))
        start += length
    packed = prepare(tensors, weights, new_states(device), segments)
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.length)
        assert_same([x[rows] for x in packed], whole_sequence(*(x[rows] for x in tensors), weights))


def test_two_questions_share_a_state_of_two_rows(weights, device):
    tensors = projection(2 + 3 + 1, device)
    segments = [
        Segment(0, 2, 0, final_slot=0),
        Segment(2, 3, 2, initial_slot=0),
        Segment(5, 1, 5, initial_slot=0),
    ]
    packed = prepare(tensors, weights, new_states(device), segments)
    for rows in ([0, 1, 2, 3, 4], [0, 1, 5]):
        expected = whole_sequence(*(x[rows] for x in tensors), weights)
        assert_same([x[rows] for x in packed], expected)


def test_continued_state_hands_its_question_rows_older_than_itself(weights, device):
    """A one-row state that continues slot 0: its question must see two columns of that slot."""
    tensors = projection(7, device)
    states = new_states(device)
    prepare([x[:4] for x in tensors], weights, states, [Segment(0, 4, 0, final_slot=0)])
    segments = [Segment(0, 1, 0, initial_slot=0, final_slot=1), Segment(1, 2, 1, initial_slot=1)]
    packed = prepare([x[4:] for x in tensors], weights, states, segments)
    assert_same(packed, [x[4:] for x in whole_sequence(*tensors, weights)])


def test_padding_stores_nothing(weights, device):
    tensors = projection(5, device)
    states = new_states(device)
    sizes = RecurrenceSizes(tiles=4, chunks=3, roots=2, followers=2)
    outputs = prepare(tensors, weights, states, [Segment(0, 3, 0, final_slot=1)], sizes=sizes)
    assert all(x[3:].isnan().all() and x[:3].isfinite().all() for x in outputs)
    assert states[[0, 2]].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter: sigmoid(-600) is 1 / inf
def test_gates_do_not_overflow(weights, device):
    mixed, b, a = projection(4, device)
    a, b = a * 200, b * 200
    outputs = prepare((mixed, b, a), weights, new_states(device), [Segment(0, 4, 0)])
    expected = whole_sequence(mixed, b, a, weights)
    torch.testing.assert_close(outputs[3].double(), expected[3], rtol=1e-5, atol=ATOL)
    torch.testing.assert_close(outputs[4].double(), expected[4], rtol=1e-5, atol=ATOL)


def test_near_zero_heads_are_normalised_with_the_reference_epsilon(weights, device):
    mixed, b, a = projection(3, device)
    mixed = mixed * 1e-4
    outputs = prepare((mixed, b, a), weights, new_states(device), [Segment(0, 3, 0)])
    assert_same(outputs, whole_sequence(mixed, b, a, weights))
    assert outputs[0].norm(dim=-1).max() < 0.5  # the epsilon dominates: without it every norm is 1


def test_a_lost_history_row_is_noticed(weights, device):
    """Sabotage: a question that starts from zeros must not pass for one that continues."""
    tensors = projection(8, device)
    actual = prepare(tensors, weights, new_states(device), [Segment(0, 5, 0, final_slot=1), Segment(5, 3, 5)])
    with pytest.raises(AssertionError):
        assert_same(actual, whole_sequence(*tensors, weights))


def test_wrong_shapes_are_refused(weights, device):
    conv, a_log, dt_bias = weights
    tensors = projection(2, device)
    plan = plan_recurrence([Segment(0, 2, 0)], device=device)
    with pytest.raises(ValueError, match="conv states"):
        gdn_prepare(*tensors, conv, torch.zeros(1, C, W, device=device), a_log, dt_bias, plan, **SHAPE)
