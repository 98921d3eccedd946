"""The text of a prompt, and where its state block ends.

A prompt is one conversation about one state and one question. Its state block is the lead tokens whose
text ends by the end of the state; a token that joins the state's last character to what follows belongs
to the question block. So ids always come from the whole prompt, never from the state alone.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from d3serve.errors import D3ServeError, InvalidQuestion, InvalidRequest, MaxTokensExceeded, TooManyOptions
from d3serve.model.media import Medium
from d3serve.model.media_prompt import MediaFormat, PlacedMedia
from d3serve.model.token_floor import TokenFloor
from d3serve.model.tokenizer import Encoded, PromptTokenizer
from d3serve.model.vision_config import VisionTokens
from d3serve.schemas.questions import Question, value_text

Tokens = NDArray[np.int32]

EMPTY_STATE = "(empty)"
DEFAULT_INSTRUCTIONS = "Choose the best matching option."
REQUEST = "Reply with only the code of the best option."
AFTER_STATE = "\n\n"
# How json.dumps says that a value is no JSON: a kind of its own, a cycle, an integer of 4,301 digits, nesting.
NO_JSON = (TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class Prompts:
    """One job's prompts: the state block that they share and each question's own block, in order.

    A layout that puts something of the question before the state gives no shared block: `state` is empty
    then, and `own_states` holds each question's.
    """

    state: Tokens
    questions: tuple[Tokens, ...]
    own_states: tuple[Tokens, ...] = ()
    media: PlacedMedia | None = None  # of the state, which all prompts begin with

    @property
    def lengths(self) -> list[int]:
        """Tokens of each question's whole prompt."""
        states = self.own_states or (self.state,) * len(self.questions)
        return [len(state) + len(block) for state, block in zip(states, self.questions, strict=True)]

    def only(self, chosen: Sequence[bool]) -> "Prompts":
        """The prompts of the chosen questions."""
        return replace(
            self,
            questions=tuple(compress(self.questions, chosen)),
            own_states=tuple(compress(self.own_states, chosen)),
        )


def sift(
    questions: Mapping[str, Question], check: Callable[[str], None], partial: bool
) -> tuple[dict[str, Question], dict[str, D3ServeError]]:
    """Part questions into those that pass `check` and the refusals of the others.

    Raises:
        InvalidRequest: the first refusal, unless `partial` asks for the rest and there is any.
    """
    kept, refused = dict(questions), dict[str, D3ServeError]()
    for name in questions:
        try:
            check(name)
        except InvalidRequest as error:
            if not partial:
                raise
            del kept[name]
            refused[name] = error
    if not kept:
        raise next(iter(refused.values()))
    return kept, refused


def check_length(name: str, tokens: int, limit: int) -> None:
    """Refuse a prompt that is too long.

    Raises:
        MaxTokensExceeded: `field` names its question.
    """
    if tokens > limit:
        raise MaxTokensExceeded(
            f"the prompt of question {name!r} has {tokens} tokens, over the limit of {limit}",
            field=f"questions.{name}",
            details={"tokens": tokens, "limit": limit},
        )


def state_text(state: JsonValue) -> str:
    """Render the state itself.

    Raises:
        InvalidRequest: it is no JSON, or no Unicode text.
    """
    try:
        text = EMPTY_STATE if state is None or state == "" else value_text(state)
    except NO_JSON as error:
        raise InvalidRequest(f"the state is no JSON: {error}", field="state") from None
    if surrogate := _lone_surrogate(text):
        raise InvalidRequest(f"the state holds a lone surrogate, {surrogate}", field="state")
    return text


def state_part(state: JsonValue) -> str:
    """Render the user's text up to the question: what all prompts about one state begin with."""
    return f"State:\n{state_text(state)}{AFTER_STATE}"


def question_texts(name: str, question: Question, codes: Sequence[str]) -> tuple[str, list[str]]:
    """Render the instructions and each option.

    Raises:
        TooManyOptions: there are more options than codes.
        InvalidQuestion: a text is no JSON or no Unicode text, two levels of a score read the same, or one is empty.
    """
    field = f"questions.{name}"
    try:
        instructions, options = (
            value_text(question.instructions or DEFAULT_INSTRUCTIONS),
            question.options(),
        )
    except NO_JSON as error:
        raise InvalidQuestion(f"question {name!r} holds what is no JSON: {error}", field=field) from None
    if len(options) > len(codes):
        raise TooManyOptions(
            f"question {name!r} has {len(options)} options; the limit is {len(codes)}", field=field
        )
    if reason := question.unreadable():
        raise InvalidQuestion(f"question {name!r}: {reason}", field=field)
    if surrogate := _lone_surrogate("".join((instructions, *options))):
        raise InvalidQuestion(f"question {name!r} holds a lone surrogate, {surrogate}", field=field)
    return instructions, options


def question_part(name: str, question: Question, codes: Sequence[str]) -> str:
    """Render the user's text from the question on.

    Raises:
        TooManyOptions, InvalidQuestion: as `question_texts`.
    """
    instructions, options = question_texts(name, question, codes)
    coded = [f"{code}: {text}" for code, text in zip(codes, options, strict=False)]
    return "\n".join(["Question:", instructions, "", "Options:", *coded, "", REQUEST])


def build_prompts(
    tokenizer: PromptTokenizer,
    codes: Sequence[str],
    state: JsonValue,
    questions: Mapping[str, Question],
    media: Sequence[int] = (),
) -> Prompts:
    """Tokenize every question's whole prompt and split each into state block and question block.

    The first prompt is read whole. For the others its ids up to `Question:` are used again, which gives the
    same ids as reading them whole: `Question` begins a pre-token after any state, since the two newlines
    before it end whatever run precedes them and letters never join a newline, and byte-pair merges stay
    inside a pre-token. With another pre-tokenizer, or should the first prompt not bear it out, every prompt is
    read whole.

    Raises:
        InvalidRequest: the state is no JSON, or no Unicode text.
        InvalidQuestion: a question cannot be rendered; `field` names it.
    """
    head = state_part(state)
    tails = [question_part(name, question, codes) for name, question in questions.items()]
    first = tokenizer.encode(head + tails[0], media)
    size = _state_tokens(first, head)
    seam = bisect_right(first.ends, len(head))
    proven = tokenizer.splits_before_letters and first.ends[seam - 1] == len(head)
    encoded = tokenizer.encode_tails(tails) if proven else []
    if proven and first.ids[seam:] == encoded[0]:
        joined = first.ids[size:seam]
        blocks = [joined + ids for ids in encoded]
    else:
        blocks = [_own_block(tokenizer, head, tail, first.ids[:size], media) for tail in tails]
    return Prompts(
        state=np.array(first.ids[:size], dtype=np.int32),
        questions=tuple(np.array(block, dtype=np.int32) for block in blocks),
    )


class PromptFormat(Protocol):
    """Renders and tokenizes prompts of one layout: what an engine asks of it."""

    floor: TokenFloor

    def texts(self, name: str, question: Question) -> tuple[str, list[str]]:
        """Render a question's instructions and options; refuse what cannot be asked of any state."""

    def build(
        self, state: JsonValue, questions: Mapping[str, Question], media: Sequence[Medium] = ()
    ) -> Prompts:
        """Render, tokenize and split the prompts of questions that `texts` has taken.

        `media` are what the state shows; only a format with a vision tower behind it is given any.
        """


class PublicFormat:
    """The layout that is publicly described."""

    def __init__(
        self, tokenizer: PromptTokenizer, codes: Sequence[str], vision: VisionTokens | None = None
    ) -> None:
        """Render with `codes` before the options, and media with the tokens of `vision`, if there is a tower.

        Raises:
            InvalidCheckpoint: the tokenizer has other tokens for media.
        """
        self.tokenizer = tokenizer
        self.floor = tokenizer.floor
        self._codes = codes
        self._media = None if vision is None else MediaFormat(tokenizer, vision)

    def texts(self, name: str, question: Question) -> tuple[str, list[str]]:
        """As `question_texts`."""
        return question_texts(name, question, self._codes)

    def build(
        self, state: JsonValue, questions: Mapping[str, Question], media: Sequence[Medium] = ()
    ) -> Prompts:
        """As `build_prompts`.

        Raises:
            InvalidRequest: a text holds a token that stands for a medium, and is read as the token.
        """
        if not media or self._media is None:
            return build_prompts(self.tokenizer, self._codes, state, questions)
        self._media.refuse_pads(state_text(state), InvalidRequest, "state")
        for name, question in questions.items():
            texts = self.texts(name, question)
            self._media.refuse_pads("\n".join((texts[0], *texts[1])), InvalidQuestion, f"questions.{name}")
        ids, placed = self._media.render(media)
        prompts = build_prompts(self.tokenizer, self._codes, state, questions, ids)
        return replace(prompts, media=placed.shifted(self.tokenizer.lead_tokens))


def _own_block(
    tokenizer: PromptTokenizer, head: str, tail: str, state: list[int], media: Sequence[int]
) -> list[int]:
    encoded = tokenizer.encode(head + tail, media)
    size = _state_tokens(encoded, head)
    if encoded.ids[:size] != state:
        raise InvalidRequest("two questions give this state different tokens", field="state")
    return encoded.ids[size:]


def _state_tokens(encoded: Encoded, head: str) -> int:
    """How many lead tokens end by the end of the state; ends never fall, so the count is a bisection."""
    return bisect_right(encoded.ends, len(head) - len(AFTER_STATE))


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None
