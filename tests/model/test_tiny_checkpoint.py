"""The bundled checkpoint: the same bytes every time, small, and loaded by transformers as it stands."""

from transformers import AutoConfig, AutoTokenizer


def test_it_is_written_the_same_every_time(tiny_checkpoint, tmp_path, checkpoint_tool):
    again = checkpoint_tool.write_checkpoint(tmp_path)
    names = sorted(path.name for path in tiny_checkpoint.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (tiny_checkpoint / name).read_bytes(), name


def test_it_is_small(tiny_checkpoint):
    assert sum(path.stat().st_size for path in tiny_checkpoint.iterdir()) < 4 * 2**20


def test_transformers_reads_it(tiny_checkpoint):
    config = AutoConfig.from_pretrained(str(tiny_checkpoint))
    assert config.text_config.layer_types.count("full_attention") == 2
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_checkpoint))
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer("AB", add_special_tokens=False).input_ids == [tokenizer.convert_tokens_to_ids("AB")]
    assert len(tokenizer) == config.text_config.vocab_size
