"""All kernels together: a backbone's pass through them, plain and padded, equals the reference's."""

import numpy as np
import pytest
import torch

from d3serve.kernels import fast, reference
from d3serve.model.backbone import Backbone, PassInputs, Pools
from d3serve.model.buckets import MAX_PARTIALS, ROW_SIZES, Bucket
from d3serve.model.config import Geometry
from d3serve.model.plan import QuestionRows, StatePlace, StateRows, plan_rows
from d3serve.model.random_weights import random_weights

TINY = Geometry(
    vocab_size=64, hidden=32, ffn=48, layer_types=("linear_attention", "full_attention"),
    heads=3, kv_heads=1, head_dim=16, rotary_dim=8, rope_theta=10_000.0,
    linear_key_heads=1, linear_value_heads=2, linear_key_dim=16, linear_value_dim=16,
    conv_width=4, eps=1e-6, max_positions=1024,
)  # fmt: skip
CPU = torch.device("cpu")
SCRATCH = 80
ATOL = 2e-5  # two layers in float32; a lost state or a wrong mask moves a hidden state by more than 1e-2


@pytest.fixture
def kernels():
    """Let a backbone on the CPU run the kernels that a GPU would."""
    if torch.cuda.is_available():
        pytest.skip("compiled kernels take no CPU tensors")

    def use(model):
        model.ops = fast
        return model

    return use


def backbone(layer_types=TINY.layer_types):
    geometry = TINY.__class__(**{**TINY.__dict__, "layer_types": layer_types})
    weights, _ = random_weights(geometry, CPU, torch.float32)
    pools = Pools.allocate(geometry, rows=SCRATCH + 40, slots=2, device=CPU, dtype=torch.float32)
    for pool in (pools.k, pools.v, pools.recurrent, pools.conv):
        pool.fill_(float("nan"))  # rows and slots that nobody owns may hold anything
    return Backbone(geometry, weights, pools, mlp_rows=64)


def tokens(count, seed):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, count).astype(np.int32)


def build(model, rows, *, causal, bucket=None):
    shape = model.attention_shape(causal=causal)
    return PassInputs.build(
        model.ops, rows, model.ops.cut_attention(rows.segments, shape), shape, bucket=bucket
    )


def run(model, rows, causal, bucket=None):
    inputs = build(model, rows, causal=causal, bucket=bucket)
    with torch.inference_mode():
        return model.forward(inputs)[: len(rows.readout_rows)]


def two_states():
    """States of 18 and 3 rows; questions of 1, 5 and 9 rows."""
    first, second = StatePlace(0, 18, 0), StatePlace(20, 3, 1)
    states = [StateRows(tokens(18, 1), first), StateRows(tokens(3, 2), second)]
    blocks = [(1, first), (5, first), (9, second)]
    return plan_rows(states, [QuestionRows(tokens(n, 3 + n), place) for n, place in blocks], SCRATCH)


def cached_questions():
    """Two questions over the states that `two_states` left."""
    first, second = StatePlace(0, 18, 0), StatePlace(20, 3, 1)
    return plan_rows([], [QuestionRows(tokens(4, 9), second), QuestionRows(tokens(7, 8), first)], SCRATCH)


@pytest.mark.parametrize(
    ("last", "padded", "causal"),
    [
        ("full_attention", False, False),
        ("full_attention", True, False),
        ("full_attention", True, True),
        ("linear_attention", False, True),
        ("linear_attention", True, False),
    ],
)
def test_kernels_equal_the_reference_over_a_pass(last, padded, causal, kernels):
    layers = ("linear_attention", "full_attention", "linear_attention")[
        : 2 if last == "full_attention" else 3
    ]
    expected_model, model = backbone(layers), backbone(layers)
    expected = [run(expected_model, rows, causal) for rows in (two_states(), cached_questions())]
    kernels(model)
    actual = [
        run(model, rows, causal, Bucket.of(rows, 0) if padded else None)
        for rows in (two_states(), cached_questions())
    ]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ATOL)
    owned = [*range(18), 20, 21, 22]
    for name in ("k", "v"):
        mine, theirs = (getattr(m.pools, name)[:, owned] for m in (model, expected_model))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ATOL)
    for name in ("recurrent", "conv"):
        mine, theirs = (getattr(m.pools, name) for m in (model, expected_model))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ATOL)


def test_padding_writes_no_row_that_it_does_not_own(kernels):
    model, rows = kernels(backbone()), two_states()
    run(model, rows, causal=False, bucket=Bucket.of(rows, 0))
    untouched = sorted(set(range(SCRATCH + 40)) - set(rows.slot_mapping.tolist()))
    assert len(untouched) > 1
    assert model.pools.k[:, untouched].isnan().all()
    assert model.pools.v[:, untouched].isnan().all()


def test_the_last_products_have_rows_enough_for_the_kernels_and_nobody_reads_the_others(kernels):
    """Those of few rows are the slow ones; on the CPU each row costs what it costs."""
    for model, least in ((backbone(), 1), (kernels(backbone()), fast.least_rows)):
        rows = two_states()
        inputs = build(model, rows, causal=False)
        questions = len(rows.readout_rows)
        assert len(inputs.readout_rows) == max(least, questions)
        wanted = torch.from_numpy(rows.readout_rows - rows.state_rows)
        assert torch.equal(inputs.readout_rows[:questions], wanted)
        assert set(inputs.readout_rows.tolist()) == set(wanted.tolist())


def test_a_pass_of_the_same_bucket_can_be_copied_into_another(kernels):
    """What a graph replay does, without the graph."""
    first = two_states()
    second = plan_rows(
        [StateRows(tokens(10, 30), StatePlace(5, 10, 1))],
        [QuestionRows(tokens(20, 31), StatePlace(5, 10, 1))],
        SCRATCH,
    )
    bucket = Bucket(64, 2, 4, 0)
    model = kernels(backbone())
    captured = build(model, first, causal=False, bucket=bucket)
    captured.copy_(build(model, second, causal=False, bucket=bucket))
    with torch.inference_mode():
        copied = model.forward(captured)[:1]
        plain = run(kernels(backbone()), second, causal=False)
    torch.testing.assert_close(copied, plain, rtol=0, atol=ATOL)


def test_buckets_are_few_and_large_passes_have_none():
    def shape(questions, length):
        blocks = [QuestionRows(tokens(length, i), None) for i in range(questions)]
        return plan_rows([], blocks, 0)

    assert Bucket.of(shape(3, 30), 0) == (96, 4, 0, 0)
    assert Bucket.of(shape(4, 24), 5) == (96, 4, 0, 8)
    assert Bucket.of(shape(1, ROW_SIZES[-1]), 0) == (ROW_SIZES[-1], 1, 0, 0)
    assert Bucket.of(shape(1, ROW_SIZES[-1] + 1), 0) is None
    assert Bucket.of(shape(1, 30), MAX_PARTIALS + 1) is None


def test_the_reference_notices_a_lost_state(kernels):
    """Sabotage: questions over a wiped slot must not pass for the cached ones."""
    model = backbone()
    run(model, two_states(), causal=False)
    right = run(model, cached_questions(), causal=False)
    model.pools.recurrent.zero_()
    kernels(model)
    wrong = run(model, cached_questions(), causal=False)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, right, rtol=0, atol=ATOL)


def test_a_cpu_runs_the_reference():
    assert backbone().ops is reference


def test_the_steps_of_a_pass_say_how_much_work_they_are(kernels):
    for model in (backbone(), kernels(backbone()), backbone(("full_attention", "linear_attention"))):
        inputs = build(model, two_states(), causal=False)
        with torch.inference_mode():
            done = list(model.steps(inputs))
        assert len(done) > 4
        assert sum(done) == model.work(inputs)
