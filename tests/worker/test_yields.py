"""Between the steps of a long pass, on a clock of the test's: who overtakes, what is asked and told, what ends it."""

import itertools

import pytest

from d3serve.errors import DeviceError, StorageUnavailable
from d3serve.worker import yields as yields_module
from d3serve.worker.yields import (
    ASK_EVERY_S,
    AWAY_S,
    LONG_SHARE,
    LOOK_COST,
    LOOK_EVERY_S,
    TELL_EVERY_S,
    NobodyWaits,
    OutOfTime,
    Yields,
)


class Clock:
    """A time that only moves when somebody works."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def work(self, seconds, result=None):
        self.now += seconds
        return result


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(yields_module, "time", clock)
    return clock


def steps_of(clock, yields, *, seconds, step_s=0.02):
    """Run a pass of so many seconds of its own."""
    done = 0.0
    while done < seconds:
        done += step_s
        clock.work(step_s)
        yields(done / seconds)


@pytest.mark.parametrize("quiet_s", [0, 10])
@pytest.mark.parametrize("step_s", [0.001, 0.02])
def test_a_flood_of_short_work_leaves_a_long_pass_its_share(clock, step_s, quiet_s):
    flood_from = clock.now + quiet_s
    yields = Yields(lambda: True, lambda: clock.now > flood_from and clock.work(0.05, result=True))
    steps_of(clock, yields, seconds=quiet_s + 2, step_s=step_s)
    others = clock.now - flood_from - 2
    assert LONG_SHARE - 0.01 <= 2 / (2 + others) < LONG_SHARE + 0.2
    assert yields.others_s == pytest.approx(others, abs=0.05)


def test_who_comes_close_behind_another_overtakes_without_a_step_between(clock):
    passed_at, waiting = [], []

    def let_overtake():
        if not waiting:
            return False
        waiting.pop()
        passed_at.append(clock.now)
        return clock.work(0.04, result=True)

    yields = Yields(lambda: True, let_overtake)
    steps_of(clock, yields, seconds=1)  # nobody came: the long pass has paid in advance
    waiting += ["one", "other"]
    clock.work(0.04)
    yields(0.5)
    yields(0.5)  # the device has the next step already; none has ended
    assert passed_at[1] - passed_at[0] == pytest.approx(0.04)


def test_looks_that_find_nothing_cost_little_however_long_they_take(clock):
    yields = Yields(lambda: True, lambda: clock.work(0.03, result=False))
    began = clock.now
    steps_of(clock, yields, seconds=10)
    assert 10 / (clock.now - began) > 1 - LOOK_COST - 0.01
    assert yields.others_s == 0


def test_a_look_that_finds_nothing_is_not_repeated_at_every_step(clock):
    looks = []
    steps_of(clock, Yields(lambda: True, lambda: looks.append(clock.now)), seconds=1, step_s=0.001)
    assert 50 < len(looks) <= 1 / LOOK_EVERY_S


def test_whether_a_pass_is_wanted_is_not_asked_at_every_step(clock):
    asked = []
    steps_of(clock, Yields(lambda: asked.append(clock.now) or True, None), seconds=5)
    assert 25 < len(asked) <= 5 / ASK_EVERY_S + 1


def test_a_redis_that_hangs_costs_a_long_pass_little(clock):
    """Whatever is asked or told, it waits for a while and fails."""

    def hang(*_):
        clock.work(0.25)
        raise StorageUnavailable("the job table cannot be used")

    for wanted, let_overtake, tell in itertools.product(
        [hang, lambda: True], [hang, lambda: False], [hang, print]
    ):
        began = clock.now
        steps_of(clock, Yields(wanted, let_overtake, tell), seconds=10)
        assert clock.now - began - 10 <= 0.25 * (10 / AWAY_S + 1)


def test_what_goes_wrong_beside_a_long_pass_does_not_end_it_and_is_tried_again_later(clock):
    tries = []

    def fail():
        tries.append(clock.now)
        raise ConnectionError

    steps_of(clock, Yields(lambda: True, fail), seconds=9)
    assert 1 < len(tries) <= 9 / AWAY_S + 1


def test_a_device_that_is_lost_in_a_short_pass_ends_the_long_one_too(clock):
    def lose():
        raise DeviceError("an illegal memory access was encountered")

    with pytest.raises(DeviceError):
        steps_of(clock, Yields(lambda: True, lose), seconds=1)


def test_a_short_turn_whose_process_is_to_end_ends_the_long_one_too(clock):
    def run_out_of_time():
        raise OutOfTime

    with pytest.raises(OutOfTime):
        steps_of(clock, Yields(lambda: True, run_out_of_time), seconds=1)


def test_a_pass_that_nobody_waits_for_ends_within_two_hundred_milliseconds(clock):
    canceled_at = clock.now + 1
    with pytest.raises(NobodyWaits):
        steps_of(clock, Yields(lambda: clock.now < canceled_at, None), seconds=5, step_s=0.04)
    assert clock.now - canceled_at <= 0.2


def test_what_is_told_is_linear_in_time_and_seldom(clock):
    told = []
    yields = Yields(lambda: True, None, lambda share, eta_s: told.append((clock.now, share, eta_s)))
    clock.work(1)  # a pass is planned before its first step
    began = clock.now
    steps_of(clock, yields, seconds=6)
    assert 10 < len(told) <= 6 / TELL_EVERY_S
    for now, share, eta_s in told:
        assert share == pytest.approx((now - began) / 6)
        assert eta_s == pytest.approx(6 - (now - began), abs=0.1)


def test_what_is_told_of_one_of_several_passes_is_of_the_whole_job(clock):
    told = []
    yields = Yields(lambda: True, None, lambda *told_now: told.append(told_now), span=(0.5, 0.25))
    steps_of(clock, yields, seconds=2)
    assert all(0.5 < share <= 0.75 for share, _ in told)
    share, eta_s = told[-1]
    assert eta_s == pytest.approx((1 - share) * 8, abs=0.2)


@pytest.mark.parametrize(("left_s", "ends"), [(6, True), (12, False)])
def test_a_pass_that_would_outlast_its_process_ends_as_soon_as_that_is_known(clock, left_s, ends):
    """A pass of ten seconds, which others make four times as long: who stops lets nobody pass."""
    yields = Yields(lambda: True, lambda: clock.work(0.06, result=True), fits=lambda eta_s: eta_s <= left_s)
    clock.work(1)  # planning
    began = clock.now
    if not ends:
        steps_of(clock, yields, seconds=10)
        return
    with pytest.raises(OutOfTime):
        steps_of(clock, yields, seconds=10)
    assert clock.now - began < 2


def test_a_pass_is_not_given_up_for_a_guess_from_its_first_step(clock):
    asked = []
    yields = Yields(lambda: True, None, fits=lambda eta_s: asked.append((clock.now, eta_s)) or True)
    began = clock.now
    steps_of(clock, yields, seconds=2)
    assert {eta_s for now, eta_s in asked if now - began < TELL_EVERY_S} == {0.0}
    assert all(eta_s > 0 for now, eta_s in asked if TELL_EVERY_S + 0.02 < now - began < 1.9)


def test_a_process_whose_time_is_over_ends_its_pass_though_redis_is_away(clock):
    def hang():
        clock.work(0.25)
        raise StorageUnavailable("the job table cannot be used")

    over_at = clock.now + 1
    with pytest.raises(OutOfTime):
        steps_of(clock, Yields(hang, hang, fits=lambda eta_s: clock.now + eta_s < over_at), seconds=20)
    assert clock.now < over_at + 0.5
