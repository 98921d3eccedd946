"""Images and videos of one state as they travel: with the state, once for all jobs that share it, and in base64.

They come in base64, and Redis hands out texts; so nobody but the worker that decodes them needs their bytes again.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from d3serve.errors import InvalidMedia
from d3serve.media.headers import read_header
from d3serve.media.sizes import MediaKind

SHOWS: Final = "&"  # how a stored state begins that shows something; no other one does
MAX_FILES: Final = 64  # of a job: as many small pictures as one prompt can hold side by side


@dataclass(frozen=True)
class MediaFile:
    """One file: `digest` is the SHA-256 of its bytes in hex, `most_tokens` what its header says that it may take."""

    kind: MediaKind
    digest: str
    encoded: str
    most_tokens: int = 0

    @classmethod
    def of(cls, kind: MediaKind, data: bytes, encoded: str | None = None) -> Self:
        """A file that was sent as an image or as a video, from its bytes; `encoded`: the same in base64.

        Raises:
            InvalidMedia: it is none, or past a limit; the message is a clause about it.
        """
        tokens = read_header(data, kind).most_tokens
        encoded = base64.b64encode(data).decode() if encoded is None else encoded
        return cls(kind, hashlib.sha256(data).hexdigest(), encoded, tokens)

    @classmethod
    def decoded(cls, kind: MediaKind, encoded: str) -> Self:
        """As `of`, from base64 without spaces or line ends."""
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidMedia("is not base64") from None
        return cls.of(kind, data, encoded)

    def data(self) -> bytes:
        """Its bytes."""
        return base64.b64decode(self.encoded)


def join_state(state: bytes, files: Iterable[MediaFile]) -> bytes:
    """A stored state and what it shows as one text."""
    shown = list(files)
    head = json.dumps([[file.kind, file.digest] for file in shown])
    return "\n".join([SHOWS + head, *(file.encoded for file in shown), ""]).encode() + state


def split_state(stored: str) -> tuple[str, list[MediaFile]]:
    """A stored state, and what it shows."""
    if not stored.startswith(SHOWS):
        return stored, []
    head, _, rest = stored[len(SHOWS) :].partition("\n")
    names = json.loads(head)
    *encoded, state = rest.split("\n", len(names))
    return state, [MediaFile(kind, digest, text) for (kind, digest), text in zip(names, encoded, strict=True)]
