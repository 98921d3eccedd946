"""The bundled checkpoint: the same bytes every time, small, and loaded by transformers as it stands."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from d3serve.model.package import open_package
from d3serve.model.tokenizer import load_tokenizer, transformers_tokenizer


def test_it_is_written_the_same_every_time(tiny_checkpoint, tmp_path, checkpoint_tool):
    again = checkpoint_tool.write_checkpoint(tmp_path)
    names = sorted(path.name for path in tiny_checkpoint.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (tiny_checkpoint / name).read_bytes(), name


def test_it_is_small(tiny_checkpoint):
    assert sum(path.stat().st_size for path in tiny_checkpoint.iterdir()) < 4 * 2**20


@pytest.mark.parametrize(
    ("named", "built"),
    [
        ("Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("Qwen2TokenizerFast", "Qwen2Tokenizer"),
        ("Qwen3_5Tokenizer", "Qwen3_5Tokenizer"),
        ("TokenizersBackend", "TokenizersBackend"),
    ],
)
def test_the_tokenizer_is_the_class_that_transformers_builds(named, built, tmp_path, checkpoint_tool):
    variant = checkpoint_tool.Variant(tokenizer_class=named)
    package = open_package(checkpoint_tool.write_checkpoint(tmp_path, variant))
    assert type(transformers_tokenizer(package)).__name__ == built
    assert load_tokenizer(package, "plain").splits_before_letters


@pytest.mark.parametrize("named", ["Qwen2Tokenizer", "Qwen3_5Tokenizer", "Qwen2TokenizerFast", None])
def test_it_is_what_auto_tokenizer_builds(named, tmp_path, checkpoint_tool):
    """The shortcut past AutoTokenizer gives its class and its every setting, and is taken only where it does."""
    package = checkpoint_tool.write_checkpoint(tmp_path, checkpoint_tool.Variant(tokenizer_class=named or ""))
    if named is None:
        stated = json.loads((package / "tokenizer_config.json").read_text())
        del stated["tokenizer_class"]
        (package / "tokenizer_config.json").write_text(json.dumps(stated))
    automatic = AutoTokenizer.from_pretrained(str(package), local_files_only=True)
    built = transformers_tokenizer(open_package(package))
    assert type(built) is type(automatic)
    assert built.backend_tokenizer.to_str() == automatic.backend_tokenizer.to_str()
    assert built.chat_template == automatic.chat_template


def test_another_pre_tokenizer_is_not_taken_for_qwens(tmp_path, checkpoint_tool):
    package = checkpoint_tool.write_checkpoint(
        tmp_path, checkpoint_tool.Variant(tokenizer_class="TokenizersBackend")
    )
    described = json.loads((package / "tokenizer.json").read_text())
    described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s?\S+|\s+"
    (package / "tokenizer.json").write_text(json.dumps(described))
    assert not load_tokenizer(open_package(package), "plain").splits_before_letters


def test_a_chat_template_may_stand_in_the_tokenizers_configuration(tmp_path, checkpoint_tool):
    package = checkpoint_tool.write_checkpoint(tmp_path)
    values = json.loads((package / "tokenizer_config.json").read_text())
    values["chat_template"] = (package / "chat_template.jinja").read_text()
    (package / "tokenizer_config.json").write_text(json.dumps(values))
    (package / "chat_template.jinja").unlink()
    load_tokenizer(open_package(package), "plain")


def test_transformers_reads_it(tiny_checkpoint):
    config = AutoConfig.from_pretrained(str(tiny_checkpoint))
    assert config.text_config.layer_types.count("full_attention") == 2
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_checkpoint))
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer("AB", add_special_tokens=False).input_ids == [tokenizer.convert_tokens_to_ids("AB")]
    assert len(tokenizer) == config.text_config.vocab_size
