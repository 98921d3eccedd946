"""States that show images and videos, against transformers: one full prompt a question, and its own vision tower."""

import dataclasses
import functools

import numpy as np
import pytest
from media_states import CLIP, JSON, LONG_CLIP, QUESTIONS, SHOWN, TALL, TEXT, WIDE
from oracle import Oracle

from d3serve.model import backbone, plan
from d3serve.model import engine as engine_module
from d3serve.model.engine import DecisionEngine
from d3serve.model.host_tier import HostTier
from d3serve.model.media import Medium
from d3serve.model.media_prompt import MediaFormat, PlacedMedia
from d3serve.model.state_cache import StateCache
from d3serve.model.vision import VisionTower
from d3serve.schemas.questions import NoulQuestion

MODES = ("prefix_bidir", "causal", "noncausal_full_attention")
SHARING = MODES[:2]
TOLERANCE = 1e-4  # two FP32 implementations differ by 1e-5; each sabotage below moves at least 1e-2


@pytest.fixture(scope="session")
def oracles(seeing):
    return functools.cache(lambda mode: Oracle(seeing(mode)))


@pytest.fixture(scope="session")
def engines(seeing):
    """One engine for each mode; its cache may hold what an earlier test left."""
    return functools.cache(lambda mode: DecisionEngine.load(str(seeing(mode)), device="cpu"))


@pytest.fixture
def engine(seeing):
    """A fresh engine with room for the states of each test at once."""
    return DecisionEngine.load(str(seeing("prefix_bidir")), device="cpu", state_cache_bytes=138_000_000)


def worst(engine, oracle, compare, jobs) -> float:
    """Largest difference when all states, with what they show, go through one call."""
    prepared = [engine.prepare(state, QUESTIONS, media=media) for state, media in jobs]
    found = 0.0
    for (state, media), decided in zip(jobs, engine.decide(prepared), strict=True):
        for name, question in QUESTIONS.items():
            expected = oracle.probabilities(state, question, media)
            found = max(found, compare(decided.answers[name], expected))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shown", SHOWN)
def test_a_job_alone_equals_one_full_prompt_per_question(mode, shown, engines, oracles, compare):
    assert worst(engines(mode), oracles(mode), compare, [SHOWN[shown]]) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_jobs_of_one_turn_equal_one_full_prompt_per_question(mode, engines, oracles, compare):
    engine = engines(mode)
    for key in engine.cached_state_keys():
        engine.cache.forget(key)
    jobs = [(TEXT, ()), *SHOWN.values(), (JSON, ())]
    assert worst(engine, oracles(mode), compare, jobs) < TOLERANCE


@pytest.mark.parametrize("mode", SHARING)
def test_a_cached_state_gives_the_answers_of_a_new_one(mode, seeing, oracles, compare):
    engine = DecisionEngine.load(str(seeing(mode)), device="cpu")
    state, media = SHOWN["images and videos"]
    job = engine.prepare(state, QUESTIONS, media=media)
    for cached in (False, True):
        assert worst(engine, oracles(mode), compare, [(state, media)]) < TOLERANCE
        (decided,) = engine.decide([job])
        assert decided.usage.state_cached
        assert decided.usage.media_tokens == job.media.tokens, cached
    other = {"other": NoulQuestion(type="noul", instructions="Is the card broken?")}
    (asked,) = engine.decide([engine.prepare(state, other, media=media)])
    assert asked.usage.state_cached
    expected = oracles(mode).probabilities(state, other["other"], media)
    assert compare(asked.answers["other"], expected) < TOLERANCE


def test_a_state_that_left_the_device_comes_back_with_its_delta(engine, oracles, compare):
    engine.cache._tier = HostTier(engine.backbone.pools, 2**24)
    shown = SHOWN["several images"]
    assert worst(engine, oracles("prefix_bidir"), compare, [shown]) < TOLERANCE
    engine.cache.clear()
    assert worst(engine, oracles("prefix_bidir"), compare, [shown]) < TOLERANCE
    assert engine.cache.stats.restored == 1


def test_the_tower_runs_once_for_each_distinct_medium_of_a_pass(engine, monkeypatch):
    runs = []
    steps = VisionTower.steps

    def counted(tower, medium):
        runs.append(medium.digest)
        return steps(tower, medium)

    monkeypatch.setattr(VisionTower, "steps", counted)
    states = [(TEXT, (WIDE, TALL)), (JSON, (TALL, TALL)), ("", (CLIP, WIDE))]
    jobs = [engine.prepare(state, QUESTIONS, media=media) for state, media in states]
    engine.decide(jobs)
    assert sorted(runs) == sorted(medium.digest for medium in (WIDE, TALL, CLIP))
    engine.decide(jobs)
    assert len(runs) == 3, "a cached state shows nothing again"


def test_a_long_pass_yields_within_its_media_and_answers_alike(seeing, monkeypatch):
    state, media = SHOWN["images and videos"]
    answers, shares = [], []
    for long_rows in (engine_module.LONG_ROWS, 1):
        monkeypatch.setattr(engine_module, "LONG_ROWS", long_rows)
        engine = DecisionEngine.load(str(seeing("prefix_bidir")), device="cpu")
        job = engine.prepare(state, QUESTIONS, media=media)
        answers += [decided.answers for decided in engine.decide([job], at_yield=shares.append)]
    assert answers[0] == answers[1]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert len(shares) > len(media) * engine.backbone.tower.geometry.depth


# --- each of these breaks the engine in one place; the parity check must fail --------------------------


def _no_delta(monkeypatch):
    """Questions at their token index, as in a prompt of text."""
    reserve = StateCache.reserve
    monkeypatch.setattr(StateCache, "reserve", lambda cache, key, length, _: reserve(cache, key, length))


def _text_positions(monkeypatch):
    """Media move on all axes, one token after the other."""
    monkeypatch.setattr(PlacedMedia, "positions", lambda _, length: np.tile(np.arange(length), (3, 1)))


def _rows_for_columns(monkeypatch):
    positions = PlacedMedia.positions
    monkeypatch.setattr(PlacedMedia, "positions", lambda placed, length: positions(placed, length)[[0, 2, 1]])


def _axes_in_blocks(monkeypatch):
    """Sections of frequencies one after the other, as in the family before."""
    monkeypatch.setattr(backbone, "axes", lambda sections, _: np.repeat(np.arange(3), sections))


def _swapped_images(monkeypatch):
    render = MediaFormat.render

    def swapped(form, media):
        first, second, *rest = media
        return render(form, [second, first, *rest])

    monkeypatch.setattr(MediaFormat, "render", swapped)


def _videos_before_images(monkeypatch):
    backwards = functools.partial(sorted, reverse=True)
    monkeypatch.setattr("d3serve.model.media_prompt.sorted", backwards, raising=False)


def _no_outer_markers(monkeypatch):
    append = MediaFormat._append

    def bare(form, ids, medium):
        own: list[int] = []
        spans = append(form, own, medium)
        before = len(ids) - 1
        ids += own[1:-1]
        return tuple(dataclasses.replace(span, start=span.start + before) for span in spans)

    monkeypatch.setattr(MediaFormat, "_append", bare)


def _no_times(monkeypatch):
    append = MediaFormat._append
    zero = {
        medium: dataclasses.replace(medium, seconds=(0.0,) * len(medium.seconds))
        for medium in (CLIP, LONG_CLIP)
    }
    monkeypatch.setattr(
        MediaFormat, "_append", lambda form, ids, each: append(form, ids, zero.get(each, each))
    )


def _frames_backwards(monkeypatch):
    _change_pixels(monkeypatch, lambda frames: frames[::-1])


def _blue_for_red(monkeypatch):
    _change_pixels(monkeypatch, lambda frames: frames[:, ::-1])


def _change_pixels(monkeypatch, change):
    steps = VisionTower.steps

    def changed(tower, medium):
        frames = np.ascontiguousarray(change(medium.frames))
        return steps(tower, Medium(medium.kind, medium.digest, frames, medium.seconds))

    monkeypatch.setattr(VisionTower, "steps", changed)


def _one_segment_a_video(monkeypatch):
    """Attention of a video's frames over each other."""
    attend = VisionTower._attend

    def over_all(tower, block, x, rotary):
        turned = tuple(each.repeat(len(x), 1) for each in rotary)
        return attend(tower, block, x.reshape(1, -1, x.shape[-1]), turned).view(x.shape)

    monkeypatch.setattr(VisionTower, "_attend", over_all)


def _features_in_the_first_place_only(monkeypatch):
    distinct = plan._distinct

    def first(placed):
        return tuple(dataclasses.replace(each, rows=each.rows[:1]) for each in distinct(placed))

    monkeypatch.setattr(plan, "_distinct", first)


SABOTAGES = {
    _no_delta: "several images",
    _text_positions: "several images",
    _rows_for_columns: "several images",
    _axes_in_blocks: "several images",
    _swapped_images: "several images",
    _videos_before_images: "media and JSON",
    _no_outer_markers: "a video",
    _no_times: "a video",
    _frames_backwards: "a video",
    _blue_for_red: "an image",
    _one_segment_a_video: "a video",
    _features_in_the_first_place_only: "an image twice",
}


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda f: f.__name__.strip("_"))
def test_parity_notices(sabotage, seeing, oracles, compare, monkeypatch):
    sabotage(monkeypatch)
    engine = DecisionEngine.load(str(seeing("prefix_bidir")), device="cpu")
    shown = SHOWN[SABOTAGES[sabotage]]
    assert worst(engine, oracles("prefix_bidir"), compare, [shown]) > 10 * TOLERANCE
