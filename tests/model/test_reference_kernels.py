"""The plain PyTorch kernels against definitions written a second way: they are the oracle of everything else."""

import itertools

import pytest
import torch

from d3serve.kernels import reference
from d3serve.kernels.reference import Plan
from d3serve.kernels.segments import Segment

HK, HV, K, V, W = 2, 4, 16, 16, 4
C = 2 * HK * K + HV * V
HEADS = {"key_heads": HK, "value_heads": HV, "key_dim": K, "value_dim": V}


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(shape, generator=generator)


def rule_inputs(draw, rows):
    q, k = (torch.nn.functional.normalize(draw(rows, HK, K), dim=-1) for _ in "qk")
    return q, k, draw(rows, HV, V), -draw(rows, HV).abs() * 0.2, draw(rows, HV).sigmoid()


def both(inputs, states, plan):
    results = []
    for rule in (reference.gated_delta_rule, reference.gated_delta_rule_by_token):
        slots = states.clone()
        results += [rule(*inputs, slots, plan, scale=K**-0.5), slots]
    return results


SHORT_PAIRS = list(itertools.product((1, 2, 3, 4, 5), repeat=2))
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("state", LENGTHS)
def test_chunks_equal_tokens_at_every_pair_of_lengths(state, draw):
    for question in LENGTHS:
        plan = Plan((Segment(0, state, 0, final_slot=0), Segment(state, question, 0, initial_slot=0)))
        chunked, left, by_token, wanted = both(rule_inputs(draw, state + question), draw(1, HV, K, V), plan)
        torch.testing.assert_close(chunked, by_token, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(left, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_chunks_equal_tokens_on_long_states(length, draw):
    plan = Plan((Segment(0, length, 0, final_slot=0),))
    chunked, left, by_token, wanted = both(rule_inputs(draw, length), draw(1, HV, K, V), plan)
    torch.testing.assert_close(chunked, by_token, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left, wanted, rtol=1e-4, atol=1e-5)


def test_strong_decay_does_not_overflow(draw):
    q, k, v, _, beta = rule_inputs(draw, 200)
    decays = torch.full((200, HV), -40.0)
    plan = Plan((Segment(0, 200, 0),))
    chunked, _, by_token, _ = both((q, k, v, decays, beta), draw(1, HV, K, V), plan)
    torch.testing.assert_close(chunked, by_token, rtol=1e-4, atol=1e-5)


def prepare(mixed, slots, plan):
    gates = torch.ones(len(mixed), HV)
    weight = torch.linspace(-1, 1, C * W).view(C, W)
    zeros = torch.zeros(HV)
    return reference.gdn_prepare(mixed, gates, gates, weight, slots, zeros, zeros, plan, **HEADS)


@pytest.mark.parametrize(("state", "question"), SHORT_PAIRS)
def test_convolution_across_short_blocks_equals_one_pass(state, question, draw):
    mixed, slots = draw(state + question, C), torch.full((2, C, W - 1), float("nan"))
    split = Plan((Segment(0, state, 0, final_slot=1), Segment(state, question, 0, initial_slot=1)))
    whole = Plan((Segment(0, state + question, 0),))
    for ours, theirs in zip(prepare(mixed, slots, split), prepare(mixed, slots, whole), strict=True):
        torch.testing.assert_close(ours, theirs)
    padded = torch.cat((torch.zeros(W - 1, C), mixed[:state]))
    assert torch.equal(slots[1], padded[-(W - 1) :].T), "newest token in the last column"
    assert slots[0].isnan().all(), "no other slot is touched"


def test_a_short_block_keeps_older_columns_of_its_history(draw):
    mixed, slots = draw(1, C), draw(2, C, W - 1)
    before = slots.clone()
    prepare(mixed, slots, Plan((Segment(0, 1, 0, initial_slot=0, final_slot=1),)))
    assert torch.equal(slots[0], before[0])
    assert torch.equal(slots[1], torch.cat((before[0][:, 1:], mixed.T), dim=1))


def test_convolution_equals_conv1d(draw):
    mixed, weight = draw(9, C), draw(C, W)
    ours = reference._causal_convolution(mixed, weight, torch.zeros(1, C, W - 1), Plan((Segment(0, 9, 0),)))
    theirs = torch.nn.functional.conv1d(mixed.T[None], weight[:, None], padding=W - 1, groups=C)[0, :, :9].T
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_packed_segments_do_not_leak(draw):
    mixed, slots = draw(12, C), draw(1, C, W - 1)
    packed = Plan((Segment(0, 5, 0), Segment(5, 7, 0)))
    alone = prepare(mixed[5:], slots, Plan((Segment(0, 7, 0),)))
    for ours, theirs in zip(prepare(mixed, slots, packed), alone, strict=True):
        assert torch.equal(ours[5:], theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [3, 1024])
def test_attention_equals_a_dense_mask(causal, rows, draw, monkeypatch):
    """Two states and three questions in pools of another order, against one softmax under the full mask."""
    monkeypatch.setattr(reference, "QUERY_ROWS", rows)
    heads, width = 6, 8
    q, k_pool, v_pool = draw(27, heads, width), draw(40, HK, width), draw(40, HK, width)
    segments = (
        Segment(0, 7, 20),
        Segment(7, 1, 5),
        Segment(8, 9, 30, prefix_start=20, prefix_length=7),
        Segment(17, 1, 0, prefix_start=20, prefix_length=7),
        Segment(18, 9, 8, prefix_start=5, prefix_length=1),
    )
    out = reference.prefix_bidir_attention(q, k_pool, v_pool, Plan(segments, causal), softmax_scale=0.3)
    for s in segments:
        for i in range(s.length):
            own = i + 1 if causal else s.length
            seen = [
                *range(s.prefix_start, s.prefix_start + s.prefix_length),
                *range(s.own_start, s.own_start + own),
            ]
            for h in range(heads):
                k, v = (pool[seen, h // (heads // HK)] for pool in (k_pool, v_pool))
                expected = (k @ q[s.start + i, h] * 0.3).softmax(dim=0) @ v
                torch.testing.assert_close(out[s.start + i, h], expected, rtol=1e-5, atol=1e-5)


def test_near_zero_keys_are_normalised_with_the_models_epsilon():
    tiny = torch.full((1, C), 1e-4)
    q, *_ = reference.gdn_prepare(
        tiny,
        torch.zeros(1, HV),
        torch.zeros(1, HV),
        torch.eye(W)[-1].expand(C, W),
        torch.zeros(1, C, W - 1),
        torch.zeros(HV),
        torch.zeros(HV),
        Plan((Segment(0, 1, 0),)),
        **HEADS,
    )
    activated = 1e-4 * torch.sigmoid(torch.tensor(1e-4))
    torch.testing.assert_close(q[0, 0, 0], activated / (K * activated**2 + 1e-6).sqrt())
