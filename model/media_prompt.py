"""The media of a state as tokens: markers, times and pads, and where in the prompt each medium's pads stand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from d3serve.errors import InvalidCheckpoint, InvalidRequest
from d3serve.model.media import MERGE, MediaKind, Medium
from d3serve.model.mrope import Span, media_positions
from d3serve.model.tokenizer import PromptTokenizer
from d3serve.model.vision_config import VisionTokens

# The control tokens that a package's `config.json` numbers, by the names that its tokenizer must give them.
NAMES = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "start": "<|vision_start|>",
    "end": "<|vision_end|>",
}


@dataclass(frozen=True)
class PlacedMedia:
    """A state's media in the block that begins its prompts. `spans` holds, for each medium, its runs of pads."""

    media: tuple[Medium, ...] = field(repr=False)
    spans: tuple[tuple[Span, ...], ...] = field(repr=False)
    tokens: int  # of media, with the markers and times around the pads

    @cached_property
    def runs(self) -> tuple[Span, ...]:
        """All runs of pads, in the order of the prompt."""
        return tuple(span for spans in self.spans for span in spans)

    @property
    def delta(self) -> int:
        """What is added to a token's index, behind the media, to give its position."""
        return sum(span.delta for span in self.runs)

    def positions(self, length: int) -> NDArray[np.int64]:
        """Positions [3, length] of a block that begins the prompt."""
        return media_positions(length, self.runs)

    def shifted(self, by: int) -> "PlacedMedia":
        """The same behind `by` more tokens."""
        moved = tuple(tuple(Span(s.start + by, s.rows, s.columns) for s in spans) for spans in self.spans)
        return PlacedMedia(self.media, moved, self.tokens)


class MediaFormat:
    """Writes media as the models were trained to read them, before the text of the state."""

    def __init__(self, tokenizer: PromptTokenizer, tokens: VisionTokens) -> None:
        """Write with `tokens`, of which a package's configuration and its tokenizer must agree.

        Raises:
            InvalidCheckpoint: they do not.
        """
        for name, text in NAMES.items():
            stated, found = getattr(tokens, name), tokenizer.control_token(text)
            if stated != found:
                raise InvalidCheckpoint(
                    f"config.json: the token of {text} is {stated}; the tokenizer gives {found}",
                    field="config.json",
                )
        self._tokenizer, self._tokens = tokenizer, tokens

    def refuse_pads(self, text: str, error: type[InvalidRequest], field: str) -> None:
        """Refuse a user's text in which a pad would be read as one: it would count as another medium.

        Raises:
            InvalidRequest: of the kind `error`, for `field`.
        """
        pads = (NAMES["image"], NAMES["video"])
        if found := self._tokenizer.reads_control_tokens(text, pads):
            raise error(f"{field} holds {found}, which stands for a medium", field=field)

    def render(self, media: Sequence[Medium]) -> tuple[list[int], PlacedMedia]:
        """Token ids of all images in order, then of all videos, and where in them the pads stand."""
        ordered = sorted(
            media, key=lambda medium: medium.kind
        )  # an image before a video; sorting keeps their order
        ids: list[int] = []
        spans = tuple(self._append(ids, medium) for medium in ordered)
        return ids, PlacedMedia(tuple(ordered), spans, len(ids))

    def _append(self, ids: list[int], medium: Medium) -> tuple[Span, ...]:
        _, rows, columns = medium.grid
        rows, columns, tokens = rows // MERGE, columns // MERGE, self._tokens
        spans = []
        ids.append(tokens.start)
        if medium.kind == "image":
            spans.append(self._pads(ids, medium.kind, rows, columns))
        for seconds in medium.seconds:
            ids += [*self._tokenizer.encode_plain(f"<{seconds:.1f} seconds>"), tokens.start]
            spans.append(self._pads(ids, medium.kind, rows, columns))
            ids.append(tokens.end)
        ids.append(tokens.end)
        return tuple(spans)

    def _pads(self, ids: list[int], kind: MediaKind, rows: int, columns: int) -> Span:
        span = Span(len(ids), rows, columns)
        ids += [self._tokens.pad(kind)] * (rows * columns)
        return span
