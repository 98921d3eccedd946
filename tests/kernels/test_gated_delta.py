"""The chunked kernels against the token-by-token definition in float64."""

import pytest
import torch

from d3serve.kernels.gated_delta import gated_delta_rule
from d3serve.kernels.recurrence_plan import RecurrenceSizes, plan_recurrence, recurrence_sizes
from d3serve.kernels.segments import Segment

HK, HV, K, V = 1, 3, 16, 32
SCALE = K**-0.5
ATOL = 2e-5  # float32 sums of a hundred terms of order one; measured 2e-6, a wrong row is off by 1e-2 or more
BOUNDARIES = [1, 2, 3, 4, 5, 15, 63, 64, 65, 127, 128, 129]


def packed(*lengths, **slots):
    """Segments of these lengths, one after the other; `slots[f"s{i}"]` is segment i's (initial, final)."""
    segments, start = [], 0
    for i, length in enumerate(lengths):
        initial, final = slots.get(f"s{i}", (-1, -1))
        segments.append(Segment(start, length, start, initial_slot=initial, final_slot=final))
        start += length
    return segments


def inputs(rows, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    unit = torch.nn.functional.normalize
    # keys lean on one direction, so that A is far from small and its inverse is put to the test
    k = unit(normal(rows, HK, K) + 1.5 * normal(1, HK, K), dim=-1)
    tensors = [unit(normal(rows, HK, K), dim=-1), k, normal(rows, HV, V)]
    gates = [-torch.rand(rows, HV, generator=generator) * 0.2, torch.rand(rows, HV, generator=generator)]
    return [x.to(device, dtype) for x in tensors] + [x.to(device) for x in gates]


def by_token(q, k, v, g, beta, states, segments):
    """The definition, one row at a time in float64: (out, states after)."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    states = states.double().clone()
    out = torch.zeros_like(v)
    for segment in sorted(segments, key=lambda s: s.initial_slot in {x.final_slot for x in segments} - {-1}):
        state = states[segment.initial_slot] if segment.initial_slot >= 0 else torch.zeros_like(states[0])
        for t in range(segment.start, segment.start + segment.length):
            for h in range(HV):
                key = k[t, h // (HV // HK)]
                decayed = state[h] * g[t, h].exp()
                state = state.clone()
                state[h] = decayed + torch.outer(key, beta[t, h] * (v[t, h] - key @ decayed))
                out[t, h] = SCALE * (q[t, h // (HV // HK)] @ state[h])
        if segment.final_slot >= 0:
            states[segment.final_slot] = state
    return out, states


def run(segments, device, *, slots=2, seed=0, **plan_options):
    """(out, states, expected out, expected states); every slot that nobody reads holds NaN."""
    rows = sum(s.length for s in segments)
    tensors = inputs(rows, device, seed=seed)
    states = torch.full((slots, HV, K, V), float("nan"), device=device)
    filled = {s.final_slot for s in segments}
    for slot in {s.initial_slot for s in segments} - filled - {-1}:
        states[slot] = torch.randn(HV, K, V, generator=torch.Generator().manual_seed(slot)).to(device)
    expected, expected_states = by_token(*tensors, states, segments)
    plan = plan_recurrence(segments, device=device, **plan_options)
    out = gated_delta_rule(*tensors, states, plan, scale=SCALE)
    return out, states, expected, expected_states


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=ATOL, equal_nan=True)


@pytest.mark.parametrize("length", BOUNDARIES)
def test_state_then_question_equals_the_definition(length, device):
    segments = packed(length, 66, s0=(-1, 1), s1=(1, -1))
    out, states, expected, expected_states = run(segments, device)
    assert_close(out, expected)
    assert_close(states, expected_states)


@pytest.mark.parametrize("length", BOUNDARIES)
def test_question_of_any_length_continues_a_cached_state(length, device):
    out, states, expected, expected_states = run(packed(length, s0=(1, -1)), device)
    assert_close(out, expected)
    assert_close(states, expected_states)


def test_questions_of_two_states_do_not_mix(device):
    segments = packed(70, 1, 5, 64, 3, s0=(-1, 0), s1=(-1, 2), s2=(0, -1), s3=(0, -1), s4=(2, -1))
    out, states, expected, expected_states = run(segments, device, slots=4)
    assert_close(out, expected)
    assert_close(states, expected_states)


@pytest.mark.usefixtures("ordered_products")
def test_question_alone_is_bit_equal_to_the_same_among_others(device):
    tensors = inputs(70 + 9 + 65, device)
    states = torch.zeros(1, HV, K, V, device=device)
    segments = packed(70, 9, 65, s0=(-1, 0), s1=(0, -1), s2=(0, -1))
    together = gated_delta_rule(*tensors, states, plan_recurrence(segments, device=device), scale=SCALE)
    kept = states.clone()
    alone = gated_delta_rule(
        *(x[79:].contiguous() for x in tensors),
        states,
        plan_recurrence(packed(65, s0=(0, -1)), device=device),
        scale=SCALE,
    )
    assert torch.equal(alone, together[79:])
    assert torch.equal(states, kept)  # a question never writes its state


@pytest.mark.usefixtures("ordered_products")
def test_steps_carry_the_state_without_changing_a_bit(device):
    segments = packed(130, 65, 129, 70, s0=(-1, 0), s1=(-1, -1), s2=(0, -1), s3=(0, -1))
    tensors = inputs(sum(s.length for s in segments), device)

    def read(**options):
        states = torch.full((2, HV, K, V), float("nan"), device=device)
        plan = plan_recurrence(segments, device=device, **options)
        return plan, gated_delta_rule(*tensors, states, plan, scale=SCALE), states[0]

    _, out, state = read()
    for step_chunks in (1, 2, 3):
        plan, stepped, carried = read(step_chunks=step_chunks)
        assert len(plan.steps) > 1
        assert torch.equal(stepped, out)
        assert torch.equal(carried, state)


@pytest.mark.usefixtures("ordered_products")
def test_padding_stores_nothing_and_changes_no_bit(device):
    segments = packed(70, 5, s0=(-1, 0), s1=(0, -1))
    plain = run(segments, device)
    padded = run(segments, device, sizes=RecurrenceSizes(tiles=9, chunks=8, roots=3, followers=4))
    assert torch.equal(padded[0], plain[0])
    assert torch.equal(padded[1][0], plain[1][0])
    assert padded[1][1].isnan().all()  # the slot that nobody owns


def test_repeated_keys_with_full_strength_stay_exact(device):
    """A chunk of one key at beta 1 and no decay: a series in powers of A would lose every digit."""
    q, k, v, g, beta = inputs(64, device)
    k[:] = k[:1]
    g.zero_()
    beta.fill_(1.0)
    segments = packed(64)
    states = torch.zeros(1, HV, K, V, device=device)
    expected, _ = by_token(q, k, v, g, beta, states, segments)
    out = gated_delta_rule(q, k, v, g, beta, states, plan_recurrence(segments, device=device), scale=SCALE)
    assert_close(out, expected)


def test_strong_decay_underflows_to_zero_without_nan(device):
    q, k, v, g, beta = inputs(130, device)
    g.fill_(-40.0)
    segments = packed(130, s0=(-1, 0))
    states = torch.zeros(1, HV, K, V, device=device)
    expected, expected_states = by_token(q, k, v, g, beta, states, segments)
    out = gated_delta_rule(q, k, v, g, beta, states, plan_recurrence(segments, device=device), scale=SCALE)
    assert_close(out, expected)
    assert_close(states, expected_states)


def test_definition_notices_a_forgotten_initial_state(device):
    """Sabotage: the comparison above must fail when a question starts from zeros."""
    segments = packed(20, 10, s0=(-1, 0), s1=(-1, -1))
    out, _, _, _ = run(segments, device)
    expected, _ = by_token(
        *inputs(30, device), torch.zeros(1, HV, K, V, device=device), packed(20, 10, s0=(-1, 0), s1=(0, -1))
    )
    with pytest.raises(AssertionError):
        assert_close(out, expected)


def test_wrong_layouts_are_refused(device):
    q, k, v, g, beta = inputs(8, device)
    plan = plan_recurrence(packed(8), device=device)
    states = torch.zeros(1, HV, K, V, device=device)
    with pytest.raises(ValueError, match="float32"):
        gated_delta_rule(q, k, v, g, beta, states.bfloat16(), plan, scale=SCALE)
    with pytest.raises(ValueError, match="contiguous"):
        gated_delta_rule(
            q, k, v.transpose(1, 2).contiguous().transpose(1, 2), g, beta, states, plan, scale=SCALE
        )
    with pytest.raises(ValueError, match="belong together"):
        gated_delta_rule(q, k[:4], v, g, beta, states, plan, scale=SCALE)


def test_sizes_counts_what_the_plan_builds(device):
    segments = packed(70, 1, 5, s0=(-1, 0), s1=(-1, -1), s2=(0, -1))
    plan = plan_recurrence(segments, device=device)
    sizes = recurrence_sizes(segments)
    assert sizes == (
        len(plan.tiles),
        len(plan.chunks),
        plan.steps[0].phases[0][1],
        plan.steps[0].phases[1][1],
    )
