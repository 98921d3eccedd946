"""Where a model runs: what is asked for and is not there is refused, never quietly replaced."""

import pytest
import torch

from d3serve.errors import InvalidSettings
from d3serve.kernels import cards
from d3serve.model import backbone, placement
from d3serve.model.engine import DecisionEngine
from d3serve.model.placement import choose_linear_rule, choose_long_attention, place

UNKNOWN = {
    "device": "cuda:1",
    "dtype": "float16",
    "quantization": "int8",
    "linear_rule": "auto",
    "attention": "fp4",
}
GPU = torch.device("cuda")


@pytest.mark.parametrize("option", UNKNOWN)
def test_an_unknown_value_is_refused_by_name(option, tiny_checkpoint):
    with pytest.raises(InvalidSettings, match=f"{option} is '{UNKNOWN[option]}'; expected ") as refused:
        DecisionEngine.load(str(tiny_checkpoint), **({"device": "cpu"} | {option: UNKNOWN[option]}))
    assert refused.value.field == option


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some compute capability, as far as anything asks before it is used."""

    def present(capability, *, float8_product=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(cards, "card", lambda _: cards.Card(capability, 101_376, 100))
        monkeypatch.setattr(placement, "_has_float8_product", lambda _: float8_product)

    return present


@pytest.mark.parametrize(
    ("listed", "dtype"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\nbugs : amx_bf16\n", torch.bfloat16),
        ("flags : fpu amx_tile amx_bf16\n", torch.bfloat16),
        ("flags : fpu avx512f avx512_bf16x amx_tile amx_int8\nbugs : amx_bf16\n", torch.float32),
        ("Features : fp asimd bf16\n", torch.float32),  # another architecture, on which nobody has timed it
        (None, torch.float32),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_gets_it_for_a_wide_model(listed, dtype, tmp_path, monkeypatch):
    list_ = tmp_path / "cpuinfo"
    if listed is not None:
        list_.write_text(listed)
    monkeypatch.setattr(placement, "PROCESSOR", list_)
    asked = placement.processor_multiplies_bfloat16
    monkeypatch.setattr(placement, "processor_multiplies_bfloat16", asked.__wrapped__)  # it remembers
    assert placement.default_dtype(torch.device("cpu"), 1024) == dtype
    assert placement.default_dtype(torch.device("cpu"), 1023) == torch.float32
    assert placement.default_dtype(GPU, 1) == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "wide", "dtype"),
    [
        ({}, 1, "bfloat16"),
        ({}, 1024, "float32"),
        ({"dtype": "float32"}, 1, "float32"),
        ({"dtype": "bfloat16"}, 1024, "bfloat16"),
    ],
)
def test_whoever_asks_for_a_type_gets_it_on_any_processor(options, wide, dtype, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(placement, "processor_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(placement, "WIDE", wide)
    assert DecisionEngine.load(str(tiny_checkpoint), device="cpu", **options).info.dtype == dtype


def test_a_gpu_is_taken_if_there_is_one_in_its_own_type(gpu):
    gpu((8, 0))
    assert place(None, None, None) == (torch.device("cuda"), torch.bfloat16)
    assert place("cpu", None, None) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("quantization", ["fp8", "fp8-all"])
@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), None), ((9, 0), "float32")])
def test_float8_weights_that_the_gpu_does_not_multiply_are_refused(capability, dtype, quantization, gpu):
    gpu(capability)
    with pytest.raises(InvalidSettings, match=f"{quantization}, but .* does not multiply FP8") as refused:
        place("cuda", dtype, quantization)
    assert refused.value.field == "quantization"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_float8_weights_that_it_does_multiply(capability, gpu):
    gpu(capability)
    assert place("cuda", None, "fp8") == (torch.device("cuda"), torch.bfloat16)


def test_a_card_for_which_pytorch_has_no_float8_product_is_refused_and_a_hopper_is_not_tried(gpu):
    gpu((12, 0), float8_product=False)
    with pytest.raises(InvalidSettings, match="does not multiply FP8"):
        place("cuda", None, "fp8")
    gpu((9, 0), float8_product=False)
    assert place("cuda", None, "fp8") == (torch.device("cuda"), torch.bfloat16)


def test_rocm_is_refused_by_name_unless_the_cpu_is_asked_for(gpu, monkeypatch):
    gpu((9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    for device in (None, "cuda"):
        with pytest.raises(InvalidSettings, match="built for ROCm 7") as refused:
            place(device, None, None)
        assert refused.value.field == "device"
    assert place("cpu", None, None) == (torch.device("cpu"), torch.float32)


@pytest.fixture
def installed(monkeypatch):
    """Whether fla is installed, as far as anything asks before it is imported."""

    def say(there):
        monkeypatch.setattr(
            placement, "find_spec", lambda name: object() if there and name == "fla" else None
        )

    return say


@pytest.mark.parametrize(
    ("capability", "there", "dtype", "rule"),
    [
        ((9, 0), True, torch.bfloat16, "ours"),
        ((8, 0), True, torch.bfloat16, "fla"),
        ((12, 0), True, torch.bfloat16, "fla"),
        ((8, 0), False, torch.bfloat16, "ours"),
        ((8, 0), True, torch.float32, "ours"),
    ],
)
def test_ours_runs_where_it_was_tuned_and_fla_elsewhere(capability, there, dtype, rule, gpu, installed):
    gpu(capability)
    installed(there)
    assert choose_linear_rule(None, GPU, dtype) == rule
    assert choose_linear_rule("ours", GPU, dtype) == "ours"


def test_fla_on_request_runs_on_a_hopper_too(gpu, installed):
    gpu((9, 0))
    installed(True)
    assert choose_linear_rule("fla", GPU, torch.bfloat16) == "fla"


def test_a_missing_fla_is_one_line_that_names_the_extra(gpu, installed):
    gpu((9, 0))
    installed(False)
    with pytest.raises(
        InvalidSettings, match=r"^linear_rule is fla, but .* pip install 'd3serve\[gpu\]'$"
    ) as refused:
        choose_linear_rule("fla", GPU, torch.bfloat16)
    assert refused.value.field == "linear_rule"


@pytest.mark.parametrize(("where", "dtype"), [(torch.device("cpu"), torch.bfloat16), (GPU, torch.float32)])
def test_fla_where_it_cannot_run_is_refused(where, dtype, gpu, installed):
    gpu((9, 0))
    installed(True)
    with pytest.raises(InvalidSettings, match="on a GPU, in bfloat16"):
        choose_linear_rule("fla", where, dtype)
    assert choose_linear_rule(None, torch.device("cpu"), torch.bfloat16) == "ours"


def test_the_rule_that_was_asked_for_reaches_the_layers(tiny_checkpoint, monkeypatch):
    """From the option to the set of operations; and whose rule it was is part of what an answer depends on."""
    asked = []
    monkeypatch.setattr(
        "d3serve.model.assembly.choose_linear_rule", lambda *options: asked.append(options) or "fla"
    )
    chosen = []
    whole = backbone.operations
    monkeypatch.setattr(backbone, "operations", lambda *given: chosen.append(given) or whole(*given))
    cpu = torch.device("cpu")
    theirs = DecisionEngine.load(str(tiny_checkpoint), device="cpu", linear_rule="fla")
    assert asked == [("fla", cpu, torch.float32)]
    assert chosen == [(cpu, "fla")]
    monkeypatch.undo()
    ours = DecisionEngine.load(str(tiny_checkpoint), device="cpu")
    assert theirs.info.identity != ours.info.identity


@pytest.fixture
def flash3(monkeypatch):
    """Why FlashAttention-3 cannot run; None where it can."""

    def say(fault):
        monkeypatch.setattr(placement, "flash3_fault", lambda: fault)

    return say


@pytest.mark.parametrize(
    ("capability", "fault", "dtype", "attention"),
    [
        ((9, 0), None, torch.bfloat16, "fa3"),
        ((9, 0), "fa3-fwd is not installed", torch.bfloat16, "ours"),
        ((9, 0), None, torch.float32, "ours"),
        ((10, 0), None, torch.bfloat16, "ours"),
        ((8, 0), None, torch.bfloat16, "ours"),
    ],
)
def test_long_states_go_to_flash_attention_3_on_a_hopper_where_it_is_installed(
    capability, fault, dtype, attention, gpu, flash3
):
    gpu(capability)
    flash3(fault)
    assert choose_long_attention(None, GPU, dtype) == attention
    assert choose_long_attention("ours", GPU, dtype) == "ours"
    assert choose_long_attention(None, torch.device("cpu"), dtype) == "ours"


@pytest.mark.parametrize("asked", ["fa3", "fp8"])
def test_what_needs_flash_attention_3_is_refused_where_that_cannot_run(asked, gpu, flash3):
    gpu((9, 0))
    flash3(None)
    assert choose_long_attention(asked, GPU, torch.bfloat16) == asked
    for where, dtype, words in (
        (GPU, torch.float32, "on a Hopper GPU, in bfloat16"),
        (torch.device("cpu"), torch.bfloat16, "on a Hopper GPU, in bfloat16"),
    ):
        with pytest.raises(InvalidSettings, match=words) as refused:
            choose_long_attention(asked, where, dtype)
        assert refused.value.field == "attention"
    gpu((10, 0))
    with pytest.raises(InvalidSettings, match="on a Hopper GPU"):
        choose_long_attention(asked, GPU, torch.bfloat16)
    gpu((9, 0))
    flash3("fa3-fwd is not installed: pip install 'd3serve[fa3]'")
    with pytest.raises(InvalidSettings, match=rf"^attention is {asked}, which .* 'd3serve\[fa3\]'$"):
        choose_long_attention(asked, GPU, torch.bfloat16)


def test_the_attention_that_was_asked_for_reaches_the_layers_and_the_identity(tiny_checkpoint, monkeypatch):
    """A state that was read in FP8 is another state: none may be taken for one that was read in BF16."""
    found = {}
    for asked in ("ours", "fa3", "fp8"):
        monkeypatch.setattr("d3serve.model.assembly.choose_long_attention", lambda *options: options[0])
        engine = DecisionEngine.load(str(tiny_checkpoint), device="cpu", attention=asked)
        assert engine.backbone.attention_shape(causal=False).long == asked
        found[asked] = engine.info.identity
    monkeypatch.undo()
    assert len(set(found.values())) == 3
    assert DecisionEngine.load(str(tiny_checkpoint), device="cpu").info.identity == found["ours"]
