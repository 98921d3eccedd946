"""Packages that were made to hang a load or to fill the memory, and one whose convolution is stored in FP32."""

import json
import os
import resource
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.chat_template_utils import render_jinja_template

from d3serve.errors import InvalidCheckpoint
from d3serve.model import chat_template
from d3serve.model.checkpoint import require_memory
from d3serve.model.engine import DecisionEngine
from d3serve.model.manifest import check_package
from d3serve.model.package import open_package


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "readout.safetensors",
        "config.json",
        "decision_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(package, name):
    (package / name).unlink()
    os.mkfifo(package / name)
    with pytest.raises(InvalidCheckpoint, match=name):
        DecisionEngine.load(str(package), device="cpu")
    if "token" not in name:
        with pytest.raises(InvalidCheckpoint, match=name):
            check_package(package)


HOSTILE_TEMPLATES = {
    "loops without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "one long operation": "{% set n = 10 ** 10 ** 8 %}{{ n }}",
    "a constant to fold": "{{ 'x' * 10 ** 11 }}",
    "a text that doubles": "{% set n = namespace(x='x') %}{% for i in 'a' * 90 %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a filter that pads": "{{ 'x' | center(10 ** 11) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "nesting": "{% if 1 %}" * 20_000,
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_template_that_takes_too_much_is_refused(package, name, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    (package / "chat_template.jinja").write_text(HOSTILE_TEMPLATES[name])
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidCheckpoint, match=r"chat_template\.jinja"):
        DecisionEngine.load(str(package), device="cpu")
    assert time.process_time() - began < 10, "the process that loads does none of it"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "in KiB"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }} {{ 'é<' | tojson(indent=2) }}",
        "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m }}{% break %}{% endfor %}\n",
        "{{ eos_token }}{% generation %} {{ messages[0].role }}\n{% endgeneration %}\n{{ strftime_now('%Y') }}",
        "{{ nothing }}{{ tools is none }}{{ documents is none }}{{ enable_thinking }}{{ add_generation_prompt }}",
    ],
)
def test_templates_read_as_transformers_reads_them(template):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "é"}]
    given = {"eos_token": "<|im_end|>", "enable_thinking": False, "add_generation_prompt": True}
    theirs, _ = render_jinja_template([messages], chat_template=template, **given)
    ours = chat_template.render(template, {**given, "messages": messages, "tools": None, "documents": None})
    assert ours == theirs[0]


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "decision_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "vocab.json",
    ],
)
def test_a_file_of_text_without_end_is_refused(package, name):
    with (package / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(InvalidCheckpoint, match=name):
        DecisionEngine.load(str(package), device="cpu")


def edit_sizes(package, sizes):
    config = json.loads((package / "config.json").read_text())
    config["text_config"] |= sizes
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    (package / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 10**30, 0, -1, 1.5, "8", None, True, [8]])
@pytest.mark.parametrize(
    "name",
    [
        "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size", "num_attention_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    ],
)  # fmt: skip
def test_sizes_out_of_all_proportion_are_refused(package, name, value):
    edit_sizes(package, {name: value})
    with pytest.raises(InvalidCheckpoint, match=rf"{name}|config\.json"):
        DecisionEngine.load(str(package), device="cpu")


def test_more_layers_than_files_hold_are_refused_before_one_is_made(package):
    edit_sizes(package, {"num_hidden_layers": 10**6, "layer_types": ["linear_attention"] * 10**6})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidCheckpoint, match="the files hold"):
        DecisionEngine.load(str(package), device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "in KiB"


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 2**31 - 1}, {"vocab_size": 2**31 - 1, "hidden_size": 2**20}]
)
def test_drawn_weights_that_no_memory_holds_are_refused(package, sizes):
    edit_sizes(package, sizes)
    with pytest.raises(InvalidCheckpoint, match="of device memory"):
        DecisionEngine.load(str(package), device="cpu", load_format="random")


def test_parameters_are_those_that_are_allocated(tiny_checkpoint):
    geometry = open_package(tiny_checkpoint).geometry
    readout = 255 * geometry.hidden * 4
    require_memory(geometry, torch.float32, free_bytes=4 * geometry.parameters + readout)
    with pytest.raises(InvalidCheckpoint):
        require_memory(geometry, torch.float32, free_bytes=4 * geometry.parameters + readout - 1)


def test_a_convolution_in_fp32_is_not_rounded(package):
    tensors = load_file(package / "model.safetensors")
    name = next(name for name in tensors if name.endswith("conv1d.weight"))
    exact = tensors[name].float() * (1 + 2**-12)
    save_file({**tensors, name: exact}, package / "model.safetensors")
    engine = DecisionEngine.load(str(package), device="cpu", dtype="bfloat16")
    convolutions = [
        layer.mixer.conv for layer in engine.backbone.weights.layers if hasattr(layer.mixer, "conv")
    ]
    assert any(torch.equal(conv, exact[:, 0]) for conv in convolutions)
