"""A byte-level BPE of a few thousand tokens in the files of the real package: Qwen's words, our text."""

import json
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path
from string import ascii_uppercase

from make_tiny_checkpoint import ADDED_TOKENS, PATTERN, SPECIAL_TOKENS, write_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from d3serve.model.tokenizer import PromptTokenizer, answer_codes

CODES = 255


def train_vocabulary(texts: Iterable[str], size: int, folder: Path) -> None:
    """Train `size` tokens on `texts`, add what the format needs, and write the tokenizer's files to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, min_frequency=3, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair) for pair in model["merges"]]
    for code in map("".join, islice(product(ascii_uppercase, repeat=2), CODES - len(ascii_uppercase))):
        if code not in vocab:  # last in rank: a code is a token, and words keep their own merges
            vocab[code] = len(vocab)
            merges.append((code[0], code[1]))
    added = {token: len(vocab) + index for index, token in enumerate((SPECIAL_TOKENS + ADDED_TOKENS).split())}
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab, merges, added, "Qwen2Tokenizer")


def load_vocabulary(folder: Path) -> tuple[PromptTokenizer, list[tuple[str, int]], int]:
    """The prompt tokenizer that serves, the answer codes with their ids, and the number of tokens."""
    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    rust = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    bare = json.loads(rust.to_str()) | {"post_processor": None}
    codes = list(islice(answer_codes(Tokenizer.from_str(json.dumps(bare))), CODES))
    return PromptTokenizer(rust, "plain"), codes, len(loaded)


def line_ends(folder: Path) -> list[int]:
    """Ids of the tokens that end with a newline."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    newline = "Ċ"  # how byte-level BPE writes the byte 10
    return [index for token, index in tokenizer["model"]["vocab"].items() if token.endswith(newline)]
