"""What goes wrong in a pass: memory that runs out, numbers that are none, a device that has died."""

import pytest
import torch

from d3serve.errors import DeviceError, InvalidModelOutput, OutOfDeviceMemory
from d3serve.kernels import reference
from d3serve.model import device_faults
from d3serve.model.backbone import Backbone
from d3serve.model.engine import DecisionEngine
from d3serve.model.host_tier import HostTier
from d3serve.schemas.questions import NoulQuestion

QUESTIONS = {f"q{n}": NoulQuestion(type="noul", instructions=f"Is it {n} days late?") for n in range(10)}
TWO = {name: QUESTIONS[name] for name in ("q0", "q1")}


@pytest.fixture
def engine(tiny_checkpoint):
    return DecisionEngine.load(str(tiny_checkpoint), device="cpu")


@pytest.fixture
def memory_for(monkeypatch):
    """Let a pass run out of memory at more than so many questions; counts of those that were tried."""
    tried = []

    def limit(questions):
        forward = Backbone.forward

        def bounded(self, inputs):
            tried.append(len(inputs.readout_rows))
            if tried[-1] > questions:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(self, inputs)

        monkeypatch.setattr(Backbone, "forward", bounded)
        return tried

    return limit


def test_a_job_whose_questions_do_not_fit_together_is_answered_in_parts(engine, memory_for):
    jobs = [engine.prepare("a parcel", QUESTIONS), engine.prepare("a letter", TWO)]
    expected = engine.decide(jobs)
    engine.cache.clear()
    tried = memory_for(3)
    decided = engine.decide(jobs)
    assert [each.usage for each in decided] == [each.usage for each in expected]
    for ours, theirs in zip(decided, expected, strict=True):
        assert ours.answers.keys() == theirs.answers.keys()
        for name, answer in ours.answers.items():
            assert answer.noul == pytest.approx(theirs.answers[name].noul, abs=1e-6)
    assert tried == [12, 6, 3, 3, 3, 3], "half as many each time, and no more than have run"


def test_one_question_that_does_not_fit_alone_is_refused_and_the_next_job_runs(
    engine, memory_for, monkeypatch
):
    job = engine.prepare("a parcel", TWO)
    memory_for(0)
    with pytest.raises(OutOfDeviceMemory, match="do not fit the device"):
        engine.decide([job])
    monkeypatch.undo()
    assert engine.decide([job])[0].answers.keys() == TWO.keys()


def test_numbers_that_are_none_concern_their_question_alone(engine, monkeypatch):
    whole = engine.prepare("a parcel", QUESTIONS)
    expected = engine.decide([whole])[0].answers
    forward = Backbone.forward

    def broken(self, inputs):
        hidden = forward(self, inputs)
        hidden[3] = float("nan")
        return hidden

    monkeypatch.setattr(Backbone, "forward", broken)
    decided = engine.decide([whole])[0]
    assert list(decided.failed) == ["q3"]
    assert isinstance(decided.failed["q3"], InvalidModelOutput)
    assert decided.failed["q3"].field == "questions.q3"
    assert decided.answers == {name: expected[name] for name in QUESTIONS if name != "q3"}
    assert engine.cached_state_keys() == [], "the state may be what broke it"


class Dead(RuntimeError):
    """What Triton, cuBLAS or a copy say of a device that has died: not torch's own kind."""


def die(*_args, **_kwargs):
    raise Dead("Triton Error [CUDA]: an illegal memory access was encountered\nlaunch of x")


def in_a_pass(monkeypatch, _engine):
    monkeypatch.setattr(Backbone, "forward", die)


def in_a_layer(monkeypatch, _engine):
    monkeypatch.setattr(reference, "gated_delta_rule", die)


def in_a_copy_from_the_host(monkeypatch, engine):
    engine.decide([engine.prepare("a parcel", TWO)])
    assert engine.cache.clear()
    assert engine.cached_state_keys(), "it is in host memory"
    monkeypatch.setattr(HostTier, "load", die)


def in_a_copy_to_the_host(monkeypatch, engine):
    engine.decide([engine.prepare("a letter", TWO)])
    engine.cache._free_slots.clear()
    monkeypatch.setattr(HostTier, "save", die)


PLACES = [in_a_pass, in_a_layer, in_a_copy_from_the_host, in_a_copy_to_the_host]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("alive", [True, False])
def test_whoever_notices_it_a_dead_device_is_a_device_error(tiny_checkpoint, monkeypatch, place, alive):
    engine = DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_host_bytes=2**24)
    job = engine.prepare("a parcel", TWO)
    place(monkeypatch, engine)
    monkeypatch.setattr(device_faults, "answers", lambda _device: alive)
    with pytest.raises(Dead if alive else DeviceError, match="illegal memory access"):
        engine.decide([job])


def test_a_device_that_dies_in_the_warm_up_or_the_load_is_a_device_error(
    tiny_checkpoint, engine, monkeypatch
):
    monkeypatch.setattr(device_faults, "answers", lambda _device: False)
    monkeypatch.setattr(Backbone, "forward", die)
    with pytest.raises(DeviceError):
        engine.warm_up()
    monkeypatch.setattr("d3serve.model.assembly.load_weights", die)
    with pytest.raises(DeviceError):
        DecisionEngine.load(str(tiny_checkpoint), device="cpu")


def test_a_full_device_is_not_a_dead_one(monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch, "ones", full)
    assert device_faults.answers(torch.device("cuda"))
    monkeypatch.setattr(torch, "ones", die)
    assert not device_faults.answers(torch.device("cuda"))
