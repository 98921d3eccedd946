"""States that show images and videos, from the job table to answers: decoded beside passes, read as what they are."""

import dataclasses
import hashlib
from concurrent.futures import Future

import numpy as np
import pytest
from media_files import picture, saved, video

from d3serve.errors import UnsupportedModality
from d3serve.media import files
from d3serve.media.files import MediaFile, join_state
from d3serve.media.sizes import image_tokens
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion
from d3serve.settings import Settings
from d3serve.store.encode import encode_state
from d3serve.store.turns import ClaimedJob, Freed, Turn
from d3serve.worker import shown
from d3serve.worker.fake_engine import FakeEngine
from d3serve.worker.media_decoder import MediaDecoder
from d3serve.worker.shown import OpenState, StateOpener, as_they_are_ready
from d3serve.worker.turn import TurnRunner

PNG, JPEG = saved(picture(100, 80), "PNG"), saved(picture(90, 120, seed=1), "JPEG")
CLIP = video(count=6)
QUESTION = '{"q":{"type":"noul","instructions":"Is it red?"}}'


def job(name, state="see", *shows):
    stored = encode_state(state)
    if shows:
        stored = join_state(stored, [MediaFile.of(kind, data) for kind, data in shows])
    return ClaimedJob(
        id=name, group=name, tenant="me", model="m", attempt=1, state=stored.decode(), questions=QUESTION,
        partial=False, asked_lane="offline", created_ms=0,
    )  # fmt: skip


class Store:
    """A job table that hands out one turn and notes what comes of its jobs."""

    lease_s, max_batch_questions = 60.0, 512

    def __init__(self, *jobs):
        self.jobs, self.answers, self.failures = list(jobs), {}, {}

    def claim(self, _pid, **_):
        return Turn("lease", self.jobs)

    def progress(self, _lease, _stage, names, *_):
        return set(names)

    def renew(self, _lease):
        return True

    def held(self, _lease):
        return set()

    def interactive_waits(self):
        return False

    def succeed_all(self, _lease, successes, _identity):
        self.answers |= {each.job_id: each.response for each in successes}
        return [True] * len(successes)

    def fail(self, _lease, name, error):
        self.failures[name] = error
        return True

    def more(self, _lease):
        return []

    def free(self, *_):
        return Freed(0, 0, [])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The tiny checkpoint with a vision tower."""
    import make_tiny_checkpoint as tool

    folder = tool.write_checkpoint(tmp_path_factory.mktemp("seeing"), tool.Variant(extras=True))
    return DecisionEngine.load(str(folder), device="cpu")


def run(store, engine):
    runner = TurnRunner(store, engine, Settings(), lambda _lane: None)
    runner.run()
    runner.preparer.close()


def test_what_a_state_shows_is_read_and_broken_files_fail_alone(engine):
    store = Store(
        job("text", "see"), job("image", "see", ("image", PNG)), job("other", "see", ("image", JPEG)),
        job("both", {"a": 1}, ("image", PNG), ("video", CLIP)),
        job("broken", "see", ("image", PNG), ("image", JPEG[: len(JPEG) // 2])),
    )  # fmt: skip
    run(store, engine)
    assert set(store.answers) == {"text", "image", "other", "both"}
    assert len({answer.answers["q"].noul for answer in store.answers.values()}) == 4
    usage = store.answers["image"].usage
    assert usage.media_tokens == image_tokens(100, 80)
    assert usage.state_tokens > usage.media_tokens
    error = store.failures["broken"]
    assert (error.code, error.field) == ("invalid_media", "images.1")
    assert error.message == "images.1 cannot be decoded (OSError)"


def test_the_answer_is_that_of_the_decoded_file(engine):
    store = Store(job("a", "see", ("video", CLIP), ("image", PNG)))
    run(store, engine)
    decoder = MediaDecoder()
    found = [decoder.begin(kind, hashlib.sha256(data).hexdigest(), lambda data=data: data)
             for kind, data in (("video", CLIP), ("image", PNG))]  # fmt: skip
    question = {"q": NoulQuestion(type="noul", instructions="Is it red?")}
    prepared = engine.prepare("see", question, media=[one.result(60) for one in found], salt="me")
    [decided] = engine.decide([prepared])
    decoder.close()
    assert decided.answers["q"].noul == pytest.approx(store.answers["a"].answers["q"].noul, abs=1e-5)


def test_a_model_without_eyes_refuses_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(files.MediaFile, "data", lambda _: pytest.fail("it was decoded"))
    store = Store(job("a", "see", ("image", PNG)), job("b"))
    run(store, FakeEngine.load("fake:?faults=1"))
    assert set(store.answers) == {"b"}
    assert store.failures["a"].code == "unsupported_modality"


def test_a_worker_without_the_libraries_names_the_extra(monkeypatch):
    monkeypatch.setattr(shown, "find_spec", lambda name: None if name == "av" else name)
    with pytest.raises(UnsupportedModality, match=r"no av .*d3serve\[media\]"):
        StateOpener(("text", "image")).open(job("a", "see", ("image", PNG)).state)


def test_who_waits_for_no_file_goes_first_and_others_as_files_are_decoded():
    slow, slower = Future(), Future()
    states = {"a": OpenState("a", [1], [slower]), "b": OpenState("b"), "c": OpenState("c", [1], [slow])}
    order = as_they_are_ready(
        [(dataclasses.replace(job(name), id=name), state) for name, state in states.items()]
    )
    assert [one.id for one, _ in next(order)] == ["b"]
    slow.set_result(np.zeros(1))
    assert [one.id for one, _ in next(order)] == ["c"]
    slower.set_exception(ValueError())
    assert [one.id for one, _ in next(order)] == ["a"]
    assert next(order, None) is None


def test_videos_that_are_too_long_together_are_refused(engine, monkeypatch):
    monkeypatch.setattr(shown, "MAX_VIDEO_TOKENS", 3)
    store = Store(job("a", "see", ("video", CLIP)))
    run(store, engine)
    assert (store.failures["a"].code, store.failures["a"].field) == ("max_tokens_exceeded", "videos")


def test_a_stored_state_is_told_apart_from_what_it_shows():
    for state in ("", "&", "a\nb\n", {"a": ["\n", "&[]"]}):
        stored = encode_state(state)
        named = [MediaFile.of("image", PNG), MediaFile.of("video", CLIP)]
        text, found = files.split_state(join_state(stored, named).decode())
        assert text.encode() == stored
        assert [file.data() for file in found] == [PNG, CLIP]
        assert files.split_state(stored.decode()) == (stored.decode(), [])
