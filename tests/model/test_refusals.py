"""What we do not understand is refused at load, with the field and its value, and never with a traceback."""

import json

import pytest
import torch
from editing import edit
from safetensors.torch import load_file, save_file

from d3serve.errors import (
    InvalidCheckpoint,
    InvalidQuestion,
    InvalidRequest,
    InvalidSettings,
    TooManyOptions,
)
from d3serve.model.checkpoint import load_weights
from d3serve.model.engine import DecisionEngine
from d3serve.model.package import open_package
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion, ScoreQuestion


def refusal(package) -> InvalidCheckpoint:
    with pytest.raises(InvalidCheckpoint) as refused:
        DecisionEngine.load(str(package), device="cpu")
    return refused.value


DECISION = [
    ("attention_mode", "block_bidir", '"block_bidir"'),
    ("attention_mode", None, "null"),
    ("prompt_layout", "header-v9", '"header-v9"'),
    ("prompt_layout", "header-v1", "no public description"),
    ("pooling", "mean", '"mean"'),
    ("format_version", 2, "2"),
    ("format_version", True, "true"),
    ("format_version", "1", '"1"'),
    ("format_id", "d3-code-readout-v2", '"d3-code-readout-v2"'),
    ("prompt", "pplx", '"pplx"'),
    ("readout_dtype", "int8", '"int8"'),
    ("temperature", 0, "0"),
    ("temperature", True, "true"),
    ("temperature", "0.75", '"0.75"'),
    ("temperature", 1e-40, "1e-40"),
    ("temperature", 1e39, "1e+39"),
    ("temperature", 10**400, "1" + "0" * 100),
    ("max_length", True, "true"),
    ("max_length", 15, "15"),
    ("validated_length", 32768.0, "32768.0"),
    ("codes", ["A"], '["A"]'),
    ("token_ids", [True] * 255, "[true"),
    ("logit_bias", {"A": 1}, '{"A": 1}'),
    ("temperature_by_questions", {"max_questions": [1], "temperature": [1.0]}, "rising"),
    ("temperature_by_questions", {"max_questions": [4, 1], "temperature": [1.0, 1.0, 1.0]}, "rising"),
    ("temperature_by_questions", {"max_questions": [1], "temperature": [1.0, True]}, "rising"),
]


@pytest.mark.parametrize(("field", "value", "shown"), DECISION)
def test_decision_config(field, value, shown, package):
    edit(package, "decision_config.json", lambda c: c.update({field: value}))
    with pytest.raises(InvalidCheckpoint) as refused:
        open_package(package)
    assert refused.value.field == field
    assert f"decision_config.json: {field} is" in refused.value.message
    assert shown in refused.value.message


FAMILY = {
    "max_length": None,
    "readout_dtype": "float32",
    "base_model": "Qwen/Qwen3.5-27B",
    "revision": "0123abcd",
    "validated_length": None,
}
BUCKETS = {"max_questions": [1, 4, 16], "temperature": [1.046, 1.0, 1.0, 1.0]}
DESCRIBED = {
    "d3": {"attention_mode": "noncausal_full_attention"},
    "d3-turbo": {"attention_mode": "prefix_bidir", "validated_length": 32_768},
    "d3-ultra": {
        "attention_mode": "prefix_bidir",
        "prompt_layout": "header-v1",
        "temperature_by_questions": BUCKETS,
    },
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_configurations_as_their_makers_describe_them(name, package):
    """Field by field what is public about each; a field that is not may still change answers, and is refused."""
    edit(package, "decision_config.json", lambda c: c.update(FAMILY | DESCRIBED[name]))
    config = open_package(package, any_layout=name == "d3-ultra").decision
    assert config.attention_mode == DESCRIBED[name]["attention_mode"]
    assert config.validated_length == DESCRIBED[name].get("validated_length")
    assert [config.temperature_for(n) for n in (1, 4, 17)] == (
        [1.046, 1.0, 1.0] if name == "d3-ultra" else [config.temperature] * 3
    )


GEOMETRY = [
    ("layer_types", None, "layer_types is null"),
    ("layer_types", ["full_attention"] * 5 + ["sliding_attention"], "sliding_attention"),
    ("num_hidden_layers", True, "num_hidden_layers is true"),
    ("head_dim", "32", 'head_dim is "32"'),
    ("hidden_act", "gelu", 'hidden_act is "gelu"'),
    ("attn_output_gate", False, "attn_output_gate is false"),
    ("num_attention_heads", 5, "multiple of num_key_value_heads"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, 'rope_type is "yarn"'),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("rope_parameters", {"rope_theta": 0, "partial_rotary_factor": 0.25}, "rope_theta is 0"),
    ("rope_scaling", {"rope_type": "linear", "factor": 4.0}, 'rope_scaling is {"rope_type": "linear"'),
    ("rms_norm_eps", 10**400, "rms_norm_eps is 1000"),
    ("model_type", "qwen3", 'model_type is "qwen3"'),
]


@pytest.mark.parametrize(("field", "value", "shown"), GEOMETRY)
def test_config(field, value, shown, package):
    edit(package, "config.json", lambda c: c["text_config"].update({field: value}))
    with pytest.raises(InvalidCheckpoint, match=r"^config\.json: text_config") as refused:
        open_package(package)
    assert shown in refused.value.message


EMBEDDING = "language_model.embed_tokens.weight"
FILES = ["config.json", "decision_config.json", "model.safetensors", "readout.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("name", [*FILES, "tokenizer_config.json", "chat_template.jinja"])
def test_a_missing_file_is_named(name, package):
    (package / name).unlink()
    assert name in refusal(package).message


@pytest.mark.parametrize(
    "name", ["config.json", "decision_config.json", "model.safetensors", "readout.safetensors"]
)
def test_a_damaged_file_is_named(name, package):
    (package / name).write_bytes(b"\x00{]")
    assert name in refusal(package).message


def test_codes_of_another_tokenizer(package):
    edit(package, "decision_config.json", lambda c: c["codes"].__setitem__(3, "ZZ"))
    assert "codes[3] is 'ZZ'" in refusal(package).message


def test_token_ids_of_another_tokenizer(package):
    edit(package, "decision_config.json", lambda c: c["token_ids"].__setitem__(7, 12))
    assert "codes[7] is 'H' with token 12" in refusal(package).message


def test_a_chat_template_of_another_format(package):
    (package / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "chat_template.jinja renders" in refusal(package).message


@pytest.mark.parametrize(
    "template", ["{% for", "{{ 1 / 0 }}", "{{ messages.a.b }}", "{% for i in range(10**9) %}{% endfor %}"]
)
def test_a_chat_template_that_cannot_be_rendered(template, package):
    (package / "chat_template.jinja").write_text(template)
    message = refusal(package).message
    assert "chat_template.jinja cannot be rendered: " in message
    assert "\n" not in message


def test_a_tokenizer_with_too_few_codes(package):
    def forget(tokenizer):
        kept = [pair for pair in tokenizer["model"]["merges"] if not "".join(pair).isupper()]
        tokenizer["model"]["merges"] = kept

    edit(package, "tokenizer.json", forget)
    assert "26 single-token codes; 255 are needed" in refusal(package).message


def test_an_added_token_that_reaches_into_the_state(package):
    """Encoded at once, the role's end and the state's first word would be one token; we encode the state alone."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (package / name).read_text()
        (package / name).write_text(text.replace('"<tool_call>"', json.dumps("user\nState:")))
    assert "a control token joins the text beside it" in refusal(package).message


def test_a_token_without_an_embedding(package):
    """On a device it would fail in the middle of a turn, whenever some client's text holds it."""
    edit(package, "config.json", lambda c: c["text_config"].update(vocab_size=1203))
    reweigh(package, lambda t: t.update({EMBEDDING: t[EMBEDDING][:1203].clone()}))
    refused = refusal(package)
    assert refused.message == "config.json: text_config: vocab_size is 1203; tokenizer.json has a token 1203"
    assert refused.field == "vocab_size"


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(package, engine):
    def fixed(tokenizer):
        tokenizer["truncation"] = {
            "direction": "Right",
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        tokenizer["padding"] = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None}
        tokenizer["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "!"}

    edit(package, "tokenizer.json", fixed)
    question = {"q": NoulQuestion(type="noul")}
    odd, plain = (
        each.prepare("charged twice", question)
        for each in (DecisionEngine.load(str(package), device="cpu"), engine)
    )
    assert [*odd.state, *odd.blocks[0]] == [*plain.state, *plain.blocks[0]]


def test_a_chat_template_that_thinks(package):
    template = (package / "chat_template.jinja").read_text()
    (package / "chat_template.jinja").write_text(
        template.replace("enable_thinking is false", "enable_thinking")
    )
    assert "chat_template.jinja renders" in refusal(package).message


def test_a_tokenizer_class_that_we_do_not_know(package):
    edit(package, "tokenizer_config.json", lambda c: c.update(tokenizer_class="LlamaTokenizer"))
    assert "tokenizer_class" in refusal(package).message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tiny_checkpoint):
    with pytest.raises(InvalidSettings, match="sees no GPU"):
        DecisionEngine.load(str(tiny_checkpoint), device="cuda")


# --- tensors ---------------------------------------------------------------------------------------


def reweigh(package, change, name="model.safetensors"):
    tensors = load_file(package / name)
    change(tensors)
    save_file(tensors, package / name)


TENSORS = {
    "missing": lambda t: t.pop("language_model.layers.2.linear_attn.A_log"),
    "not part of this geometry": lambda t: t.update(
        {"language_model.layers.9.mlp.up_proj.weight": torch.ones(2)}
    ),
    "is not part": lambda t: t.update({"lm_head.weight": torch.ones(2)}),
    "config.json says [128]": lambda t: t.update({"language_model.norm.weight": torch.ones(64)}),
    "torch.int8": lambda t: t.update({"language_model.norm.weight": torch.ones(128, dtype=torch.int8)}),
    "torch.int32": lambda t: t.update({"language_model.norm.weight": torch.ones(128, dtype=torch.int32)}),
    "twice": lambda t: t.update({"model.language_model.norm.weight": torch.ones(128)}),
}


@pytest.mark.parametrize("reason", TENSORS)
def test_tensors(reason, package):
    reweigh(package, TENSORS[reason])
    assert reason in refusal(package).message


def test_a_readout_that_is_not_float32(package):
    reweigh(package, lambda t: t.update(weight=t["weight"].bfloat16()), "readout.safetensors")
    assert "torch.bfloat16" in refusal(package).message


@pytest.mark.parametrize(
    "change", [lambda t: t.update(bias=t["weight"].clone()), lambda t: t.update(w=t.pop("weight"))]
)
def test_a_readout_that_is_not_one_tensor(change, package):
    reweigh(package, change, "readout.safetensors")
    assert "expected one tensor named weight" in refusal(package).message


def test_a_readout_of_another_size(package):
    reweigh(package, lambda t: t.update(weight=t["weight"][:254].clone()), "readout.safetensors")
    assert "has shape [254, 128]" in refusal(package).message


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}])
def test_an_index_of_another_shape(index, package):
    (package / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map is no object of file names" in refusal(package).message


def test_an_index_that_points_outside(package):
    (package / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../x.safetensors"}})
    )
    assert "outside the package" in refusal(package).message


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_published_naming_loads_the_same_weights(
    prefix, shards, tmp_path, tiny_checkpoint, checkpoint_tool
):
    variant = checkpoint_tool.Variant(prefix=prefix, shards=shards, extras=True)
    package = checkpoint_tool.write_checkpoint(tmp_path / "variant", variant)
    cpu = torch.device("cpu")
    ours, plain = (
        load_weights(open_package(each), cpu, torch.float32) for each in (package, tiny_checkpoint)
    )
    assert torch.equal(ours.embedding, plain.embedding)
    assert all(torch.equal(a.gate_up, b.gate_up) for a, b in zip(ours.layers, plain.layers, strict=True))
    assert torch.equal(ours.readout, plain.readout)


def test_sensitive_parameters_are_never_rounded(package):
    reweigh(package, lambda t: t.update({"language_model.norm.weight": torch.full((128,), 1 / 3)}))
    weights = load_weights(open_package(package), torch.device("cpu"), torch.bfloat16)
    assert weights.norm[0] == torch.tensor(1 / 3)
    assert weights.layers[0].mixer.A_log.dtype == torch.float32
    assert weights.embedding.dtype == torch.bfloat16


# --- requests --------------------------------------------------------------------------------------


def test_questions_that_cannot_be_rendered(engine):
    cases = [
        (ScoreQuestion(type="score", criteria=["a", "a"]), InvalidQuestion),
        (ScoreQuestion(type="score", criteria=["a", ""]), InvalidQuestion),
        (ScoreQuestion(type="score", criteria=["[1]", [1]]), InvalidQuestion),
        (NoulQuestion(type="noul", instructions="\ud800"), InvalidQuestion),
        (NoulQuestion(type="noul", instructions=10**5_000), InvalidQuestion),
        (ChoiceQuestion(type="choice", criteria={"a": None, "b": [10**5_000]}), InvalidQuestion),
        (
            ChoiceQuestion.model_construct(type="choice", criteria=dict.fromkeys(map(str, range(256)))),
            TooManyOptions,
        ),
    ]
    for question, kind in cases:
        with pytest.raises(kind) as refused:
            engine.prepare("state", {"fine": NoulQuestion(type="noul"), "bad": question})
        assert refused.value.field == "questions.bad"


def test_states_that_cannot_be_read(engine):
    question = {"q": NoulQuestion(type="noul")}
    for state in ("\ud800", {"a": "\udfff"}):
        with pytest.raises(InvalidRequest, match="lone surrogate, U\\+D"):
            engine.prepare(state, question)
    deep: list = []
    for _ in range(5_000):
        deep = [deep]
    for state in ({(1, 2): 3}, {4}, b"bytes", [10**5_000], deep):
        with pytest.raises(InvalidRequest, match="the state is no JSON: ") as refused:
            engine.prepare(state, question)
        assert refused.value.field == "state"
    with pytest.raises(InvalidRequest, match="at least one question"):
        engine.prepare("state", {})
