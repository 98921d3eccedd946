"""A long pass lets others run between its steps: no bit of any answer changes, and nothing stays behind."""

from itertools import count, cycle, pairwise

import pytest

from d3serve.errors import OutOfDeviceMemory
from d3serve.model import capacity
from d3serve.model import engine as engine_module
from d3serve.model.capacity import BESIDE_ROWS
from d3serve.model.engine import DecisionEngine
from d3serve.model.state_cache import StateCache
from d3serve.schemas.questions import NoulQuestion

ASKED = {f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {'very ' * n}urgent?") for n in range(3)}
LONG = "the customer was charged twice for an order " * 60
SHORT = "the team will refund it "


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """What is long here, and how many rows a step has: a pass of some hundred steps."""
    monkeypatch.setattr(engine_module, "LONG_ROWS", 1000)
    monkeypatch.setattr(capacity, "MLP_ROWS", 100)


@pytest.fixture
def roomy(tiny_checkpoint, _small_steps):
    engine = DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_bytes=138_000_000)
    assert engine.beside_tokens == BESIDE_ROWS
    assert engine.cache.slots < 25
    return engine


def forget_all(engine):
    for key in engine.cached_state_keys():
        engine.cache.forget(key)


def now_and_then(act):
    """At every third step, the last among them: other ones in each layer, as no layer has a multiple of three."""
    steps = count()
    return lambda share: act(share) if next(steps) % 3 == 2 else None


def test_the_share_done_grows_to_one_over_several_passes(roomy):
    job = roomy.prepare(LONG, ASKED | {f"late {n}": ASKED["q0"] for n in range(60)})
    roomy.pass_rows = (
        job.state_tokens + len(job.blocks[0]) * 40
    )  # the questions take two passes, both of them long
    shares = []
    roomy.decide([job], at_yield=shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.1
    assert shares[-1] == pytest.approx(1)
    steps = [b - a for a, b in pairwise(shares)]
    assert len(steps) > 40
    assert max(steps) < 0.1


def test_a_short_pass_between_the_steps_changes_no_bit_of_either(roomy):
    long, short = roomy.prepare(LONG, ASKED), roomy.prepare(SHORT, ASKED)
    (alone,), (read,), (cached,) = (roomy.decide([job]) for job in (long, short, short))
    forget_all(roomy)
    beside = []
    (disturbed,) = roomy.decide([long], at_yield=now_and_then(lambda _: beside.extend(roomy.decide([short]))))
    assert disturbed == alone
    assert len(beside) > 20
    assert beside[0] == read
    assert all(each == cached for each in beside[1:])


def test_many_other_states_between_the_steps_push_out_none_that_the_long_pass_needs(roomy):
    long = roomy.prepare(LONG, ASKED)
    (alone,) = roomy.decide([long])
    forget_all(roomy)
    others = [roomy.prepare(f"{SHORT}{n}", ASKED) for n in range(roomy.cache.slots + 5)]
    left = cycle(others)
    (disturbed,) = roomy.decide([long], at_yield=now_and_then(lambda _: roomy.decide([next(left)])))
    assert disturbed == alone


def test_the_bits_notice_scratch_rows_that_two_passes_share(roomy, monkeypatch):
    """Sabotage: a short pass that writes where the long one keeps its questions."""
    monkeypatch.setattr(StateCache, "reserve_scratch", lambda *_: 0)
    monkeypatch.setattr(StateCache, "release_scratch", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_short_pass_between_the_steps_changes_no_bit_of_either(roomy)


def test_what_does_not_fit_beside_is_refused_and_the_long_pass_goes_on(roomy):
    long = roomy.prepare(LONG, ASKED)
    (alone,) = roomy.decide([long])
    forget_all(roomy)
    large = roomy.prepare("word " * BESIDE_ROWS, ASKED)
    refused = []

    def ask(_share):
        if len(refused) == 3:
            return
        with pytest.raises(OutOfDeviceMemory, match=f"passes of {BESIDE_ROWS} rows"):
            roomy.decide([large])
        refused.append(True)

    assert roomy.decide([long], at_yield=ask) == [alone]
    assert refused
    assert roomy.decide([large])[0].usage.questions == len(ASKED)


def test_what_is_raised_between_the_steps_ends_the_pass_and_leaves_nothing(roomy):
    long = roomy.prepare(LONG, ASKED)

    def give_up(share):
        if share > 0.5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        roomy.decide([long], at_yield=give_up)
    assert roomy.cached_state_keys() == []
    assert list(roomy.cache._ranges.gaps()) == [(0, roomy.cache.rows)]
    (again,) = roomy.decide([long])
    forget_all(roomy)
    assert roomy.decide([long]) == [again]


def test_short_passes_do_not_yield(roomy):
    def never(_share):
        raise AssertionError

    roomy.decide([roomy.prepare(SHORT, ASKED)], at_yield=never)


def test_a_long_pass_leaves_slots_for_a_short_one(roomy):
    jobs = [roomy.prepare(f"{SHORT}{n}", ASKED) for n in range(roomy.cache.slots + 3)]
    short = roomy.prepare("another state", ASKED)
    asked = []
    roomy.decide(jobs, at_yield=lambda _: asked.extend(roomy.decide([short])) if not asked else None)
    assert len(asked) == 1
