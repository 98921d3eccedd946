"""How few tokens a text can have, told without a tokenizer: what exceeds a limit even so is refused unread.

A tokenizer takes about a second for 2 MB and holds a processor meanwhile, so a text that cannot fit must not reach
it. A bound that guesses would refuse what fits: text in padded columns has 17 to 28 bytes a token, rulers more.
"""

import string
from dataclasses import dataclass, replace
from typing import Final, Self

# Of the vocabulary's 248,044 tokens the longest is 128 spaces; the longest without spaces and punctuation, and what
# Unicode composition can make of it, has 48 bytes. A test reads them all.
BYTES_PER_TOKEN: Final = 128
DENSE_BYTES_PER_TOKEN: Final = 48
_SPARSE: Final = (string.punctuation + " \t\r\n").encode()


@dataclass(frozen=True)
class Size:
    """How long some texts are in UTF-8, and how much of it is neither space nor punctuation."""

    size_bytes: int
    dense_bytes: int

    @property
    def least_tokens(self) -> int:
        """How many tokens they have at the very least, one after the other."""
        return max(-(-self.size_bytes // BYTES_PER_TOKEN), -(-self.dense_bytes // DENSE_BYTES_PER_TOKEN))

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            size_bytes=self.size_bytes + other.size_bytes,
            dense_bytes=self.dense_bytes + other.dense_bytes,
        )

    def __str__(self) -> str:
        return f"{self.size_bytes:,} bytes, at least {self.least_tokens} tokens"


def surely_within(tokens: int, *texts: str) -> bool:
    """Whether `size_of` could only tell that texts have at least so many tokens, or fewer: then it need not look."""
    most_bytes = sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
    return most_bytes <= DENSE_BYTES_PER_TOKEN * tokens


def size_of(*texts: str) -> Size:
    """The size of texts, taken together."""
    encoded = [text.encode() for text in texts]
    dense = sum(len(text.translate(None, _SPARSE)) for text in encoded)
    return Size(sum(map(len, encoded)), dense)
