"""How few tokens a text can have, told without a tokenizer: what exceeds a limit even so is refused unread.

A tokenizer takes about a second for 2 MB and holds a processor meanwhile, so a text that cannot fit must not reach
it. A bound that guesses would refuse what fits: text in padded columns has 17 to 28 bytes a token, rulers more.
"""

import string
from typing import Final

# Of the vocabulary's 248,044 tokens the longest is 128 spaces; the longest without spaces and punctuation, and what
# Unicode composition can make of it, has 48 bytes. A test reads them all.
BYTES_PER_TOKEN: Final = 128
DENSE_BYTES_PER_TOKEN: Final = 48
_SPARSE: Final = (string.punctuation + " \t\r\n").encode()


def least_tokens(text: bytes) -> int:
    """How many tokens `text`, in UTF-8, has at the very least."""
    dense = len(text.translate(None, _SPARSE))
    return max(-(-len(text) // BYTES_PER_TOKEN), -(-dense // DENSE_BYTES_PER_TOKEN))
