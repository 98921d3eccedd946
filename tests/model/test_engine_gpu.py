"""The engine on a GPU equals the engine on the CPU, with and without CUDA graphs."""

import json

import pytest
import torch
import torch.nn.functional as F
from oracle import Oracle

from d3serve.kernels.matrix import sum_rows_alike
from d3serve.model import engine as engine_module
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion

pytestmark = pytest.mark.gpu

FP32 = 1e-4  # float32 products in another order, three tf32 products each
WIDTHS_OF_THE_27B = {
    "hidden_size": 5120, "intermediate_size": 17_408,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


def load(folder, dtype, **options):
    return DecisionEngine.load(
        str(folder), device="cuda", dtype=dtype, **{"state_cache_bytes": 256 * 2**20, **options}
    )


def probabilities(engine, jobs):
    decided = engine.decide([engine.prepare(state, questions) for state, questions in jobs])
    rows = []
    for job in decided:
        for answer in job.answers.values():
            rows += [answer.noul] if answer.type == "noul" else list(answer.probabilities.values())
    return torch.tensor(rows, dtype=torch.float64)


def rms(differences):
    return differences.square().mean().sqrt()


@pytest.fixture
def jobs(questions):
    """A short state, a long one, the short one again with one question more, and an empty one."""
    more = {**questions, "again": NoulQuestion(type="noul", instructions="Is it about money?")}
    return [
        ("a short state", questions),
        ("word " * 400, questions),
        ("a short state", more),
        (None, questions),
    ]


def turns(jobs):
    """All jobs, then states that are cached by now."""
    return (jobs, jobs[:1], jobs[1:2], jobs[:1])


def test_gpu_equals_cpu(tiny_checkpoint, engine, jobs):
    fast = load(tiny_checkpoint, "float32")
    for turn in turns(jobs):
        assert (probabilities(fast, turn) - probabilities(engine, turn)).abs().max() < FP32
    used, total = fast.device_memory()
    assert fast.cached_bytes < fast.cache_size_bytes < used < total == torch.cuda.mem_get_info()[1]


def test_bfloat16_is_as_near_to_float32_as_in_transformers(tiny_checkpoint, oracles, jobs):
    """Both round the same weights; ours may lose twice as much, since its kernels round between products too."""
    fast, rounded = load(tiny_checkpoint, "bfloat16"), Oracle(tiny_checkpoint, torch.bfloat16)

    def asked(oracle):
        return [p for state, each in jobs for q in each.values() for p in listed(oracle, state, q)]

    def listed(oracle, state, question):
        found = oracle.probabilities(state, question)
        return found[1:] if question.type == "noul" else found

    exact, theirs = (torch.tensor(asked(each)) for each in (oracles("prefix_bidir"), rounded))
    ours = probabilities(fast, jobs)
    assert rms(ours - exact) < 2 * rms(theirs - exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_graph_equals_the_launched_pass(dtype, tiny_checkpoint, jobs):
    graphed, launched = load(tiny_checkpoint, dtype), load(tiny_checkpoint, dtype)
    launched._graphs = None
    small = jobs[:1]
    for _ in range(4):  # met, captured, replayed, replayed
        graphed.cache.forget(graphed.prepare(*small[0]).state_key)
        replayed, wanted = probabilities(graphed, small), probabilities(launched, small)
        assert (
            torch.equal(replayed, wanted) if dtype == "bfloat16" else (replayed - wanted).abs().max() < FP32
        )
    assert graphed._graphs._captured


def test_one_graph_answers_states_of_other_lengths(tiny_checkpoint, engine, questions):
    fast = load(tiny_checkpoint, "float32")
    urgent = {"urgent": questions["urgent"]}
    for words in (1, 2, 3, 5, 8, 13):
        turn = [("word " * words, urgent)]
        assert (probabilities(fast, turn) - probabilities(engine, turn)).abs().max() < FP32
    assert len(fast._graphs._captured) < 3


def test_a_row_of_a_product_has_the_same_bits_among_any_others():
    """The 27B's matrices; the last rows too, which a library may share out among more of its programs."""
    sum_rows_alike()
    changed = []
    for rows, columns in ((14_336, 5_120), (16_480, 5_120), (5_120, 6_144), (34_816, 5_120), (5_120, 17_408)):
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(16_384, columns, device="cuda", dtype=torch.bfloat16)
        whole = F.linear(x, weight)
        changed += [
            (count, rows, columns)
            for count in (1, 31, 64, 100, 128, 200, 250, 320, 576, 1_000, 1_430, 2_512, 4_096, 5_270, 8_592)
            for part in (slice(count), slice(-count, None))
            if not torch.equal(F.linear(x[part], weight), whole[part])
        ]
    assert not changed


def test_a_job_alone_has_the_digits_that_it_has_in_company(tiny_checkpoint, jobs):
    engine = load(tiny_checkpoint, "bfloat16")
    engine._graphs = None
    alone = probabilities(engine, jobs[:1])
    engine.cache.forget(engine.prepare(*jobs[0]).state_key)
    among = probabilities(engine, jobs)[: len(alone)]
    assert torch.equal(among, alone)


def test_twenty_turns_over_one_cached_state_give_the_bits_of_the_turn_that_read_it(tiny_checkpoint, jobs):
    engine = load(tiny_checkpoint, "bfloat16")
    first = probabilities(engine, jobs[:1])
    pools = engine.backbone.pools
    before = [pools.recurrent.clone(), pools.conv.clone()]
    assert all(torch.equal(probabilities(engine, jobs[:1]), first) for _ in range(20))
    assert torch.equal(before[0], pools.recurrent)
    assert torch.equal(before[1], pools.conv)


@pytest.fixture
def wide_package(package):
    """One period of the 27B's layers at its widths, for weights drawn at random."""
    config = json.loads((package / "config.json").read_text())
    config["text_config"] |= WIDTHS_OF_THE_27B
    config["vision_config"]["out_hidden_size"] = WIDTHS_OF_THE_27B["hidden_size"]
    (package / "config.json").write_text(json.dumps(config))
    return package


def test_at_full_width_a_cached_state_gives_the_bits_of_one_just_read(wide_package, jobs):
    """Kernels are compiled otherwise for heads of 128 and 256 than for the tiny checkpoint's of 32."""
    engine = load(wide_package, "bfloat16", load_format="random")
    for turn in (jobs[:1], jobs[1:2], jobs):
        for state, _ in turn:
            engine.cache.forget(engine.prepare(state, turn[0][1]).state_key)
        read = probabilities(engine, turn)
        assert all(torch.equal(probabilities(engine, turn), read) for _ in range(4))


@pytest.mark.parametrize("words", [3_000, 14_000], ids=["kernel", "cudnn"])
def test_short_passes_between_the_steps_of_a_long_one_change_no_bit(
    words, tiny_checkpoint, jobs, monkeypatch
):
    """The short ones are launched at first, captured then, and replayed."""
    monkeypatch.setattr(engine_module, "LONG_ROWS", 1_000)
    engine = load(tiny_checkpoint, "bfloat16")
    long, short = (engine.prepare(state, jobs[0][1]) for state in ("word " * words, "a short state"))
    (alone,), (short_alone,) = engine.decide([long]), engine.decide([short])
    beside = []
    for _ in range(2):
        engine.cache.forget(long.state_key)
        (disturbed,) = engine.decide([long], at_yield=lambda _: beside.extend(engine.decide([short])))
        assert disturbed == alone
    assert len(beside) > 10
    assert all(each.answers == short_alone.answers for each in beside)


def test_warm_up_leaves_nothing_to_compile_or_capture(tiny_checkpoint, jobs):
    engine = load(tiny_checkpoint, "bfloat16")
    engine.warm_up()
    assert engine.cached_state_keys() == []
    captured = set(engine._graphs._captured)
    assert captured
    assert probabilities(engine, jobs[:1]).isfinite().all()


@pytest.mark.filterwarnings("ignore")  # of fla, and of what it imports
def test_an_engine_with_the_rule_of_fla_is_as_near_to_float32_as_with_ours(tiny_checkpoint, engine, jobs):
    pytest.importorskip("fla", reason="fla is not installed")
    exact, errors = probabilities(engine, jobs), {}
    for rule in ("ours", "fla"):
        fast = load(tiny_checkpoint, "bfloat16", linear_rule=rule)
        fast.warm_up()
        errors[rule] = rms(probabilities(fast, jobs) - exact)
        cached = rms(probabilities(fast, jobs) - exact)
        assert cached == errors[rule]  # the states are read from the pools now
    assert (fast._graphs, fast.backbone.ops.captures) == (None, False)
    assert errors["fla"] <= 2 * errors["ours"] + FP32
