"""fla's rule behind our plans, without fla: what it would be given, and where its states go."""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from d3serve.kernels import fast, reference
from d3serve.kernels.operations import operations
from d3serve.kernels.segments import Segment

HK, HV, K, V = 1, 3, 16, 32
SCALE = K**-0.5
ATOL = 2e-5  # FP32 sums of a hundred terms of order one; a wrong state is off by 1e-2 or more


class FakeFla:
    """`chunk_gated_delta_rule` by its public description, on the reference; keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, chunk_indices
    ):
        bounds = cu_seqlens.tolist()
        pairs = list(pairwise(bounds))
        assert (bounds[0], bounds[-1]) == (0, q.shape[1])
        wanted = [[i, c] for i, (begin, end) in enumerate(pairs) for c in range(-(-(end - begin) // 64))]
        assert chunk_indices.tolist() == wanted
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, cu_seqlens, chunk_indices))
        count = len(pairs)
        states = torch.zeros(2 * count, *v.shape[2:3], q.shape[3], v.shape[3])
        if initial_state is not None:
            states[:count] = initial_state
        segments = tuple(
            Segment(begin, end - begin, begin, initial_slot=i, final_slot=count + i)
            for i, (begin, end) in enumerate(pairs)
        )
        plan = reference.Plan(segments)
        out = reference.gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], states, plan, scale=scale)
        self.calls.append((bounds, initial_state is not None))
        return out[None], states[count:] if output_final_state else None


@pytest.fixture
def fla(monkeypatch):
    """A module `fla` in place of the library, which must not be beside a CPU's torch."""
    fake = FakeFla()
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = fake.chunk_gated_delta_rule
    for ours in ("fast_fla", "fla_rule"):
        monkeypatch.delitem(sys.modules, f"d3serve.kernels.{ours}", raising=False)
    yield fake
    for ours in ("fast_fla", "fla_rule"):
        sys.modules.pop(f"d3serve.kernels.{ours}", None)
        vars(sys.modules["d3serve.kernels"]).pop(ours, None)


def packed(*segments):
    """Segments of (length, initial slot, final slot), one after the other."""
    found, start = [], 0
    for length, initial, final in segments:
        found.append(Segment(start, length, start, initial_slot=initial, final_slot=final))
        start += length
    return found


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    unit = torch.nn.functional.normalize
    q, k = unit(normal(rows, HK, K), dim=-1), unit(normal(rows, HK, K), dim=-1)
    gates = -torch.rand(rows, HV, generator=generator) * 0.2, torch.rand(rows, HV, generator=generator)
    return q, k, normal(rows, HV, V), *gates


def run(ops, segments, **options):
    """(out, states): every slot that nobody fills before it is read holds NaN."""
    states = torch.full((4, HV, K, V), float("nan"))
    filled = {segment.final_slot for segment in segments}
    for slot in {segment.initial_slot for segment in segments} - filled - {-1}:
        states[slot] = torch.randn(HV, K, V, generator=torch.Generator().manual_seed(slot))
    plan = ops.plan_recurrence(segments, device=torch.device("cpu"), **options)
    return ops.gated_delta_rule(*inputs(sum(s.length for s in segments)), states, plan, scale=SCALE), states


PASSES = {
    "a state and its questions": [(70, -1, 0), (1, 0, -1), (65, 0, -1), (64, 0, -1)],
    "questions of a cached state": [(15, 2, -1), (63, 2, -1)],
    "read and cached states at once": [(64, -1, 0), (130, -1, 1), (9, 2, -1), (5, 0, -1), (7, 1, -1)],
    "whole prompts": [(3, -1, -1), (100, -1, -1)],
    "a prompt before a state": [(5, -1, -1), (20, -1, 0), (3, 0, -1)],
    "one row": [(1, -1, 3)],
    "a state carried on": [(20, 2, 1), (30, 1, -1)],
}


@pytest.mark.parametrize("call_chunks", [1, 2, 3, 64])
@pytest.mark.parametrize("segments", PASSES.values(), ids=PASSES)
def test_every_segment_starts_from_its_state_and_leaves_it_where_it_should(fla, segments, call_chunks):
    segments = packed(*segments)
    expected, expected_states = run(reference, segments)
    ops = operations(torch.device("cuda"), "fla")
    out, states = run(ops, segments, call_chunks=call_chunks)
    torch.testing.assert_close(out, expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(states, expected_states, rtol=0, atol=ATOL, equal_nan=True)
    assert fla.calls
    assert all(sum(-(-(e - b) // 64) for b, e in pairwise(bounds)) <= call_chunks for bounds, _ in fla.calls)


def test_a_state_and_its_questions_take_two_calls(fla):
    run(operations(torch.device("cuda"), "fla"), packed((70, -1, 0), (5, 0, -1), (6, 0, -1)))
    assert fla.calls == [([0, 70], False), ([0, 5, 11], True)]


@pytest.mark.usefixtures("fla")
def test_the_rule_is_all_that_the_two_sets_differ_in():
    theirs = operations(torch.device("cuda"), "fla")
    assert operations(torch.device("cuda")) is operations(torch.device("cuda"), "ours") is fast
    assert operations(torch.device("cpu"), "fla") is reference
    differ = {name for name in fast.__all__ if getattr(theirs, name) is not getattr(fast, name)}
    assert differ == {"captures", "gated_delta_rule", "plan_recurrence"}
    assert set(theirs.__all__) == set(fast.__all__)


@pytest.mark.usefixtures("fla")
def test_what_fla_cannot_run_is_refused():
    plan = operations(torch.device("cuda"), "fla").plan_recurrence
    with pytest.raises(ValueError, match="cannot be padded"):
        plan(packed((5, -1, 0)), device="cpu", sizes=(1, 1, 1, 0))
    with pytest.raises(ValueError, match="before the one that fills its slot 0"):
        plan(packed((5, 0, -1), (5, -1, 0)), device="cpu")
    with pytest.raises(ValueError, match="row 7 follows row 5"):
        plan([Segment(0, 5, 0), Segment(7, 5, 7)], device="cpu")
    with pytest.raises(ValueError, match="two segments fill slot 1"):
        plan(packed((5, -1, 1), (5, -1, 1)), device="cpu")
