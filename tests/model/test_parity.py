"""The packed pass against transformers' Qwen3_5Model, and proof that the comparison notices what it must."""

import dataclasses
from typing import Any

import pytest

from d3serve.kernels import reference
from d3serve.model import capacity
from d3serve.model import engine as engine_module
from d3serve.schemas.questions import NoulQuestion

MODES = ("prefix_bidir", "causal", "noncausal_full_attention")
TOLERANCE = 1e-4  # two FP32 implementations differ by 4e-6; each sabotage below moves at least 2.7e-2
WORDS = "the customer was charged twice for an order and asked our billing team to refund the card. "
LENGTHS = (0, 1, 3, 63, 64, 65, 500, 3000)


def state_of(characters: int) -> str:
    return (WORDS * (characters // len(WORDS) + 1))[:characters]


def worst(engine, oracle, compare, questions, states) -> float:
    """Largest difference when all jobs go through one turn."""
    jobs = [engine.prepare(state, questions) for state in states]
    found = 0.0
    for state, decided in zip(states, engine.decide(jobs), strict=True):
        for name, question in questions.items():
            found = max(found, compare(decided.answers[name], oracle.probabilities(state, question)))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("characters", LENGTHS)
def test_a_job_alone_equals_one_full_prompt_per_question(
    mode, characters, engines, oracles, questions, compare
):
    if characters == LENGTHS[-1]:
        questions = {
            "urgent": questions["urgent"]
        }  # the oracle's mask is dense: one long prompt a mode is enough
    assert worst(engines(mode), oracles(mode), compare, questions, [state_of(characters)]) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_jobs_of_one_turn_equal_one_full_prompt_per_question(mode, engines, oracles, questions, compare):
    states = [state_of(n) for n in LENGTHS[:-1]] + [{"text": "é😀", "n": [1.0, None, True]}]
    assert worst(engines(mode), oracles(mode), compare, questions, states) < TOLERANCE


@pytest.mark.parametrize("mode", ["prefix_bidir", "causal"])
def test_a_cached_state_gives_the_answers_of_a_new_one(mode, packages, oracles, questions, compare):
    engine = engine_module.DecisionEngine.load(str(packages(mode)), device="cpu")
    job = engine.prepare(state_of(500), questions)
    (cold,), (warm,) = engine.decide([job]), engine.decide([job])
    assert not cold.usage.state_cached
    assert warm.usage.state_cached
    assert warm.usage.computed_tokens == cold.usage.computed_tokens - job.state_tokens
    prompts = sum(job.state_tokens + len(block) for block in job.blocks)
    assert warm.usage.input_tokens == cold.usage.input_tokens == prompts, "whole prompts, read or not"
    for name, question in questions.items():
        expected = oracles(mode).probabilities(state_of(500), question)
        assert compare(cold.answers[name], expected) < TOLERANCE
        assert compare(warm.answers[name], expected) < TOLERANCE


def test_whole_prompts_share_nothing_and_say_so(engines, questions):
    engine = engines("noncausal_full_attention")
    job = engine.prepare(state_of(500), questions)
    first, second = engine.decide([job, job])
    for decided in (first, second):
        assert decided.usage.state_tokens == 0
        assert not decided.usage.state_cached
        assert decided.usage.computed_tokens == decided.usage.input_tokens
    assert engine.cached_state_keys() == []


@pytest.mark.parametrize(
    "layers", [("full", "linear", "full"), ("linear", "full"), ("full", "full", "linear")]
)
def test_any_order_of_layers(layers, tmp_path, checkpoint_tool, oracle_of, questions, compare):
    package = checkpoint_tool.write_checkpoint(tmp_path, checkpoint_tool.Variant(layers=layers))
    engine = engine_module.DecisionEngine.load(str(package), device="cpu")
    oracle = oracle_of(package)
    for _ in ("state and questions in one pass", "the state cached"):
        assert worst(engine, oracle, compare, questions, [state_of(65), state_of(3)]) < TOLERANCE


def test_mlp_in_steps_of_rows(tiny_checkpoint, oracles, questions, compare, monkeypatch):
    monkeypatch.setattr(capacity, "MLP_ROWS", 7)
    engine = engine_module.DecisionEngine.load(str(tiny_checkpoint), device="cpu")
    assert worst(engine, oracles("prefix_bidir"), compare, questions, [state_of(65)]) < TOLERANCE


def test_bfloat16_decides_as_float32_where_the_margin_is_clear(tiny_checkpoint, oracles, questions, compare):
    engine = engine_module.DecisionEngine.load(str(tiny_checkpoint), device="cpu", dtype="bfloat16")
    assert worst(engine, oracles("prefix_bidir"), compare, questions, [state_of(65)]) < 0.1


# --- each of these breaks the engine in one place; the parity check must fail --------------------------


def _causal_everywhere(monkeypatch):
    cut = reference.cut_attention
    monkeypatch.setattr(reference, "cut_attention", lambda s, shape: cut(s, shape._replace(causal=True)))


def _blind_to_state(monkeypatch):
    cut = reference.cut_attention
    monkeypatch.setattr(
        reference,
        "cut_attention",
        lambda s, shape: cut([x._replace(prefix_length=0) for x in s], shape),
    )


def _state_sees_question(monkeypatch):
    """The mask of the other checkpoints: the state's rows also see a question."""
    cut = reference.cut_attention

    def leaky(segments, shape):
        question = segments[-1]
        states = [
            s._replace(prefix_start=question.own_start, prefix_length=question.length)
            if s.final_slot >= 0
            else s
            for s in segments
        ]
        return cut(states, shape)

    monkeypatch.setattr(reference, "cut_attention", leaky)


def _questions_see_each_other(monkeypatch):
    cut = reference.cut_attention

    def leaky(segments, shape):
        asked = [s for s in segments if s.final_slot < 0]
        spread = [s if s.final_slot >= 0 else s._replace(own_start=asked[0].own_start) for s in segments]
        return cut(spread, shape)

    monkeypatch.setattr(reference, "cut_attention", leaky)


def _forgotten_conv_state(monkeypatch):
    def forgetful(*args, **kwargs):
        *tensors, plan = args
        plan = plan._replace(segments=tuple(s._replace(initial_slot=-1) for s in plan.segments))
        return reference_prepare(*tensors, plan, **kwargs)

    reference_prepare = reference.gdn_prepare
    monkeypatch.setattr(reference, "gdn_prepare", forgetful)


def _zeroed_recurrent_state(monkeypatch):
    def forgetful(q, k, v, g, beta, states, plan, *, scale):
        plan = plan._replace(segments=tuple(s._replace(initial_slot=-1) for s in plan.segments))
        return reference_rule(q, k, v, g, beta, states, plan, scale=scale)

    reference_rule = reference.gated_delta_rule
    monkeypatch.setattr(reference, "gated_delta_rule", forgetful)


def _positions_from_zero(monkeypatch):
    _change_rows(monkeypatch, lambda rows: {"positions": rows.positions * 0})


def _question_positions_restart(monkeypatch):
    def restarted(rows):
        positions = rows.positions.copy()
        for segment in rows.segments:
            inside = slice(segment.start, segment.start + segment.length)
            positions[inside] -= positions[segment.start]
        return {"positions": positions}

    _change_rows(monkeypatch, restarted)


def _reads_the_row_before(monkeypatch):
    _change_rows(monkeypatch, lambda rows: {"readout_rows": rows.readout_rows - 1})


def _change_rows(monkeypatch, change: Any) -> None:
    planned = engine_module.plan_rows

    def changed(*args):
        rows = planned(*args)
        return dataclasses.replace(rows, **change(rows))

    monkeypatch.setattr(engine_module, "plan_rows", changed)


SABOTAGES = (
    _causal_everywhere,
    _blind_to_state,
    _state_sees_question,
    _questions_see_each_other,
    _forgotten_conv_state,
    _zeroed_recurrent_state,
    _positions_from_zero,
    _question_positions_restart,
    _reads_the_row_before,
)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda f: f.__name__.strip("_"))
def test_parity_notices(sabotage, engine, oracles, questions, compare, monkeypatch):
    asked = questions | {"other": NoulQuestion(type="noul", instructions="Is the card broken?")}
    assert worst(engine, oracles("prefix_bidir"), compare, asked, [state_of(65)]) < TOLERANCE
    engine.cache.forget(engine.cached_state_keys()[0])
    sabotage(monkeypatch)
    assert worst(engine, oracles("prefix_bidir"), compare, asked, [state_of(65)]) > 100 * TOLERANCE


DAMAGES = {
    "keys": lambda pools: pools.k.zero_(),
    "values": lambda pools: pools.v.zero_(),
    "recurrent state": lambda pools: pools.recurrent.zero_(),
    "conv state": lambda pools: pools.conv.zero_(),
    "order of conv columns": lambda pools: pools.conv.copy_(pools.conv.flip(-1)),
}


@pytest.mark.parametrize("part", DAMAGES)
def test_parity_of_a_cached_state_notices_damage_to(part, engine, oracles, questions, compare):
    assert worst(engine, oracles("prefix_bidir"), compare, questions, [state_of(65)]) < TOLERANCE
    DAMAGES[part](engine.backbone.pools)
    assert worst(engine, oracles("prefix_bidir"), compare, questions, [state_of(65)]) > 100 * TOLERANCE


def test_rows_that_fill_a_product_up_are_nobodys_answers(
    tiny_checkpoint, oracles, questions, compare, monkeypatch
):
    monkeypatch.setattr(reference, "least_rows", 8)
    engine = engine_module.DecisionEngine.load(str(tiny_checkpoint), device="cpu")
    assert worst(engine, oracles("prefix_bidir"), compare, questions, ["a state", ""]) < TOLERANCE
