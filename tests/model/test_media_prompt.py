"""Media as tokens, on the published Qwen3.5 vocabulary: put together apart, they are those of the whole text."""

import numpy as np
import pytest
from oracle import shown

from d3serve.errors import InvalidCheckpoint, InvalidQuestion, InvalidRequest
from d3serve.model.media import Medium
from d3serve.model.media_prompt import NAMES, MediaFormat
from d3serve.model.mrope import Span, axes, media_positions
from d3serve.model.prompt import PublicFormat, question_part, state_part
from d3serve.model.tokenizer import CLOSING, OPENING, ROLE, PromptTokenizer
from d3serve.model.vision_config import VisionTokens
from d3serve.schemas.questions import NoulQuestion

CODES = ["A", "B"]
QUESTIONS = {
    "yes": NoulQuestion(type="noul", instructions="Is it urgent?"),
    "no": NoulQuestion(type="noul", instructions="\n Not?"),
}
STATES = ["abc", "Paid twice.", "a\n", "", {"a": [1]}, "\u0301e", " x", "\n\nx", "日本語。"]
SECONDS = (0.25, 1.45, 1.55, 9.94, 9.96, 99.94, 99.96, 299.0)


def image(height: int, width: int) -> Medium:
    return Medium("image", f"{height} {width}", np.zeros((1, 3, height, width), dtype=np.uint8))


def video(height: int, width: int, *seconds: float) -> Medium:
    return Medium("video", "v", np.zeros((2 * len(seconds), 3, height, width), dtype=np.uint8), seconds)


MEDIA = {
    "an image": (image(64, 96),),
    "two images": (image(32, 32), image(64, 320)),
    "a video": (video(32, 64, *SECONDS),),
    "both": (video(64, 64, 0.25), image(32, 96), video(32, 32, 12.0, 14.0)),
}


@pytest.fixture(scope="module", params=["Qwen2Tokenizer", "Qwen3_5Tokenizer"])
def reference(request, real_tokenizer):
    return real_tokenizer(request.param)


def tokens_of(reference) -> VisionTokens:
    return VisionTokens(**{name: reference.convert_tokens_to_ids(text) for name, text in NAMES.items()})


@pytest.fixture(scope="module")
def forms(reference) -> dict[str, PublicFormat]:
    """The layout by how it reads control tokens in texts."""
    return {
        way: PublicFormat(PromptTokenizer(reference.backend_tokenizer, way), CODES, tokens_of(reference))
        for way in ("plain", "reference")
    }


@pytest.mark.parametrize("special_tokens", ["plain", "reference"])
@pytest.mark.parametrize("media", MEDIA)
def test_ids_are_those_of_the_whole_text(reference, forms, media, special_tokens):
    form = forms[special_tokens]
    for state in STATES:
        prompts = form.build(state, QUESTIONS, MEDIA[media])
        for (name, question), block in zip(QUESTIONS.items(), prompts.questions, strict=True):
            text = state_part(state) + question_part(name, question, CODES)
            whole = reference(OPENING + ROLE + shown(MEDIA[media]) + text + CLOSING).input_ids
            assert [*prompts.state, *block] == whole, (state, name)


@pytest.mark.parametrize("media", MEDIA)
def test_the_state_block_is_longer_by_the_media_and_by_nothing_else(forms, media):
    form = forms["plain"]
    for state in STATES:
        bare, showing = form.build(state, QUESTIONS), form.build(state, QUESTIONS, MEDIA[media])
        assert len(showing.state) - len(bare.state) == showing.media.tokens
        assert [list(block) for block in showing.questions] == [list(block) for block in bare.questions]


def test_tokens_are_counted_as_published(reference, forms):
    """Two markers a medium; of a frame pair two more and its time: 6 tokens, 7 from 10 s on, 8 from 100 s on."""
    form = MediaFormat(forms["plain"].tokenizer, tokens_of(reference))
    assert form.render([image(448, 704)])[1].tokens == 2 + 14 * 22
    for seconds, expected in zip(SECONDS, (6, 6, 6, 6, 7, 7, 8, 8), strict=True):
        assert form.render([video(256, 320, seconds)])[1].tokens == 2 + expected + 2 + 8 * 10, seconds


def test_spans_are_where_the_pads_are(reference, forms):
    tokens = tokens_of(reference)
    prompts = forms["plain"].build("abc", QUESTIONS, MEDIA["both"])
    found = {
        kind: np.flatnonzero(prompts.state == getattr(tokens, kind)).tolist() for kind in ("image", "video")
    }
    placed: dict[str, list[int]] = {"image": [], "video": []}
    for medium, spans in zip(prompts.media.media, prompts.media.spans, strict=True):
        assert sum(span.stop - span.start for span in spans) == medium.pads
        placed[medium.kind] += [row for span in spans for row in range(span.start, span.stop)]
    assert placed == found
    assert [medium.kind for medium in prompts.media.media] == ["image", "video", "video"]


def test_the_delta_of_the_published_run():
    """Grids of 14 x 22, 14 x 20 and 56 x 32 patches, and three frame pairs of 16 x 20: -756 in all."""
    spans, start = [], 3
    for rows, columns in ((7, 11), (7, 10), (28, 16), (8, 10), (8, 10), (8, 10)):
        spans.append(Span(start, rows, columns))
        start = spans[-1].stop + 5
    length = start + 10
    positions = media_positions(length, spans)
    assert sum(span.delta for span in spans) == -756
    assert positions[:, -1].tolist() == [length - 1 - 756] * 3
    assert positions.max() == length - 1 - 756


def test_axes_interleave_while_their_sections_last():
    assert axes((11, 11, 10), 32).tolist() == [0, 1, 2] * 10 + [0, 1]
    assert axes((2, 1, 1), 4).tolist() == [0, 1, 2, 0]
    assert axes((11, 11, 10), 4).tolist() == [0, 1, 2, 0]


def test_a_pad_in_a_text_is_text_unless_control_tokens_are_read(reference, forms):
    state, asked = "see <|image_pad|>", {"q": NoulQuestion(type="noul", instructions="<|video_pad|>?")}
    prompts = forms["plain"].build(state, asked, MEDIA["an image"])
    assert np.count_nonzero(prompts.state == tokens_of(reference).image) == 6
    reading = forms["reference"]
    with pytest.raises(InvalidRequest, match=r"state holds <\|image_pad\|>") as refused:
        reading.build(state, QUESTIONS, MEDIA["an image"])
    assert refused.value.field == "state"
    with pytest.raises(InvalidQuestion) as refused:
        reading.build("x", asked, MEDIA["an image"])
    assert refused.value.field == "questions.q"
    assert len(reading.build(state, asked).state)  # without media it stands for nothing


def test_a_tokenizer_with_other_control_tokens_is_refused(reference, forms):
    tokens = tokens_of(reference)
    wrong = VisionTokens(tokens.video, tokens.image, tokens.start, tokens.end)
    with pytest.raises(InvalidCheckpoint, match=r"image_pad.* is \d+; the tokenizer gives \d+"):
        MediaFormat(forms["plain"].tokenizer, wrong)
