"""What a count tells of a request is what its job then reads."""

from itertools import islice

import pytest


@pytest.mark.parametrize("mode", ["prefix_bidir", "causal", "noncausal_full_attention"])
def test_prompts_are_counted_as_they_are_read(mode, engines, questions):
    engine, state = engines(mode), {"order": 17, "note": "charged twice"}
    asked = dict(islice(questions.items(), 2))
    job = engine.prepare(state, asked)
    (decided,) = engine.decide([job])
    assert list(job.prompt_tokens) == list(asked)
    assert sum(job.prompt_tokens.values()) == decided.usage.input_tokens
    for name, question in asked.items():
        alone = engine.prepare(state, {name: question})
        assert alone.prompt_tokens == {name: job.prompt_tokens[name]}
