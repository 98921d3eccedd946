"""How many tokens a text has at least, told from its bytes in milliseconds.

Encoding a text of 47 MB takes minutes; that it is far too long can be known before. Nothing is refused that
might fit: a token covers at most so many bytes of each kind as the vocabulary's longest of that kind.
"""

from unicodedata import normalize

from tokenizers import Tokenizer as RustTokenizer

SPACES = b" \t\n\v\f\r"
WORDS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
BEYOND_ASCII = bytes(range(128, 256))
REST = bytes(set(range(128)) - set(SPACES) - set(WORDS))  # runs of marks: rulers, brackets
LONGEST_CHARACTER_BYTES = 4  # in UTF-8, and no token is less than a byte
OTHERS = [bytes(set(range(256)) - set(kind)) for kind in (SPACES, WORDS, BEYOND_ASCII, REST)]


class TokenFloor:
    """The lower bound for one tokenizer, whose vocabulary is spelled in bytes."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        """Measure the vocabulary."""
        self._longest = [1] * len(OTHERS)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for token in tokenizer.get_vocab():
            self._measure(token.encode() if token in added else _spelled(token))

    def _measure(self, token: bytes) -> None:
        for kind, others in enumerate(OTHERS):
            if len(token) > self._longest[kind]:
                self._longest[kind] = max(self._longest[kind], len(token.translate(None, others)))

    def over(self, limit: int, text: str) -> int | None:
        """Tokens that `text` has at least, if that is over `limit`."""
        if len(text) * LONGEST_CHARACTER_BYTES <= limit:
            return None
        least = self.of(text)
        return least if least > limit else None

    def of(self, text: str) -> int:
        """Tokens that `text` has at least."""
        raw = normalize("NFC", text).encode()  # as the tokenizer does: a letter and its mark may be one
        counts = [len(raw.translate(None, others)) for others in OTHERS]
        return max(-(-count // longest) for count, longest in zip(counts, self._longest, strict=True))


def _byte_of() -> dict[str, int]:
    """The byte that each letter of the vocabulary's alphabet stands for: GPT-2's table."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _byte_of()


def _spelled(token: str) -> bytes:
    return bytes(BYTES[letter] for letter in token if letter in BYTES)
