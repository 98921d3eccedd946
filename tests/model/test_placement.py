"""Where a model runs: what is asked for and is not there is refused, never quietly replaced."""

import pytest
import torch

from d3serve.errors import InvalidSettings
from d3serve.model.engine import DecisionEngine
from d3serve.model.placement import place

UNKNOWN = {"device": "cuda:1", "dtype": "float16", "quantization": "int8"}


@pytest.mark.parametrize("option", UNKNOWN)
def test_an_unknown_value_is_refused_by_name(option, tiny_checkpoint):
    with pytest.raises(InvalidSettings, match=f"{option} is '{UNKNOWN[option]}'; expected ") as refused:
        DecisionEngine.load(str(tiny_checkpoint), **({"device": "cpu"} | {option: UNKNOWN[option]}))
    assert refused.value.field == option


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some compute capability, as far as anything asks before it is used."""

    def present(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    return present


def test_a_gpu_is_taken_if_there_is_one_in_its_own_type(gpu):
    gpu((8, 0))
    assert place(None, None, None) == (torch.device("cuda"), torch.bfloat16)
    assert place("cpu", None, None) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), None), ((9, 0), "float32")])
def test_float8_weights_that_the_gpu_does_not_multiply_are_refused(capability, dtype, gpu):
    gpu(capability)
    with pytest.raises(InvalidSettings, match="does not multiply FP8") as refused:
        place("cuda", dtype, "fp8")
    assert refused.value.field == "quantization"


def test_float8_weights_that_it_does_multiply(gpu):
    gpu((9, 0))
    assert place("cuda", None, "fp8") == (torch.device("cuda"), torch.bfloat16)
