"""Prompts rendered by a package's own `d3_format.py`, for layouts that have no public description.

Runs the package's code, so only on request. That one module is loaded: nothing beside it in the package can
be imported from it by name. What it renders is tokenized as the reference does, and split where the state's
text ends; the place of the state is found by rendering once more with a marker in its stead.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from pydantic import JsonValue
from tokenizers import Tokenizer as RustTokenizer

from d3serve.errors import InvalidCheckpoint, InvalidQuestion, InvalidRequest, UnsupportedModality
from d3serve.model.media import Medium
from d3serve.model.package import Package
from d3serve.model.prompt import PromptFormat, Prompts, PublicFormat, Tokens, question_texts, state_text
from d3serve.model.token_floor import TokenFloor
from d3serve.model.tokenizer import (
    SpecialTokens,
    load_tokenizer,
    transformers_tokenizer,
)
from d3serve.model.vision_config import VisionTokens
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion, Question

FILE = "d3_format.py"
MARKER = "\u2060d3serve state\u2060"  # word joiners: no text holds this by accident
PROBES: Mapping[str, Question] = {
    "choice": ChoiceQuestion(type="choice", instructions="Which?", criteria={"a": None, "b": "c"}),
    "noul": NoulQuestion(type="noul", instructions="Is it?"),
}


def choose_format(
    package: Package, special_tokens: SpecialTokens, vision: VisionTokens | None = None
) -> PromptFormat:
    """Build what renders and tokenizes a package's prompts: ours, or its own for a layout that is not ours.

    With `vision`, ours writes media too.

    Raises:
        InvalidCheckpoint: as `load_tokenizer`, or as `RemoteFormat`.
    """
    if package.decision.prompt_layout is None:
        return PublicFormat(load_tokenizer(package, special_tokens), package.decision.codes, vision)
    return RemoteFormat(
        package.folder, transformers_tokenizer(package), package.decision.codes, special_tokens
    )


class RemoteFormat:
    """Renders and splits prompts through a package's own module."""

    def __init__(
        self, folder: Path, tokenizer: Any, codes: Sequence[str], special_tokens: SpecialTokens
    ) -> None:
        """Load the module and probe it.

        Args:
            folder: the package.
            tokenizer: the transformers tokenizer, which the module's `render` takes.
            codes: the answer codes.
            special_tokens: `plain` refuses texts with control tokens, since here they cannot be told from
                the template's own.

        Raises:
            InvalidCheckpoint: there is no such module, it fails, or it shows no place of the state.
        """
        self._module = _load(folder / FILE)
        self._tokenizer = tokenizer
        self._rust: RustTokenizer = tokenizer.backend_tokenizer
        self._codes = list(codes)
        self.floor = TokenFloor(self._rust)
        self._control = [token.content for token in self._rust.get_added_tokens_decoder().values()]
        self._refuse_control = special_tokens == "plain"
        try:
            leads = {self._around(question)[0] for question in PROBES.values()}
        except Exception as error:  # whatever foreign code raises
            raise InvalidCheckpoint(f"{FILE} fails on a probe: {error}", field=FILE) from error
        self.shares_state = len(leads) == 1

    def build(
        self, state: JsonValue, questions: Mapping[str, Question], media: Sequence[Medium] = ()
    ) -> Prompts:
        """Render, tokenize and split each question's prompt; the questions have passed `texts`.

        Raises:
            UnsupportedModality: there are media, whose place in such a layout nobody has described.
            InvalidRequest: the state is no JSON or no Unicode text, or holds a control token.
            InvalidQuestion: a question cannot be rendered; `field` names it.
        """
        if media:
            raise UnsupportedModality(f"the layout of {FILE} takes text only", field="state")
        text = state_text(state)
        self._check(text, InvalidRequest("the state holds a control token of this model", field="state"))
        states, blocks = [], []
        for name, question in questions.items():
            lead, block = self._split(name, question, state, text)
            states.append(lead)
            blocks.append(block)
        if self.shares_state and all(np.array_equal(states[0], each) for each in states):
            return Prompts(states[0], tuple(blocks))
        return Prompts(states[0][:0], tuple(blocks), own_states=tuple(states))

    def texts(self, name: str, question: Question) -> tuple[str, list[str]]:
        """Render instructions and options, as far as any layout must; refuse what cannot be asked of any state.

        Raises:
            InvalidQuestion: it holds a control token, or no layout could ask it; `field` names it.
        """
        texts = question_texts(name, question, self._codes)
        refusal = InvalidQuestion(
            f"question {name!r} holds a control token of this model", field=f"questions.{name}"
        )
        self._check(question.model_dump_json(), refusal)
        return texts

    def _split(self, name: str, question: Question, state: JsonValue, text: str) -> tuple[Tokens, Tokens]:
        field = f"questions.{name}"
        try:
            before, after = self._around(question)
            rendered = self._render(state, question)
        except Exception as error:  # whatever foreign code raises
            message = f"question {name!r} cannot be rendered by the checkpoint's {FILE}: {error}"
            raise InvalidQuestion(message, field=field) from error
        if rendered != before + text + after:
            raise InvalidRequest(
                f"the checkpoint's {FILE} does not show where this state ends", field="state"
            )
        (encoding,) = self._rust.encode_batch(
            [rendered], add_special_tokens=False
        )  # other threads run meanwhile
        size = bisect_right([end for _, end in encoding.offsets], len(before) + len(text))
        ids = np.array(encoding.ids, dtype=np.int32)
        return ids[:size], ids[size:]

    def _around(self, question: Question) -> tuple[str, str]:
        """The text before and after the state in this question's prompt."""
        parts = self._render(MARKER, question).split(MARKER)
        if len(parts) != 2:
            raise ValueError(f"it renders the state {len(parts) - 1} times; its place must be one")
        return parts[0], parts[1]

    def _render(self, state: JsonValue, question: Question) -> str:
        asked = question.plain()
        rendered = self._module.render(self._tokenizer, state, asked, self._codes)
        if not isinstance(rendered, str):
            raise TypeError(f"render returned {type(rendered).__name__}, not a text")
        return rendered

    def _check(self, text: str, refusal: InvalidRequest) -> None:
        if self._refuse_control and any(token in text for token in self._control):
            raise refusal


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidCheckpoint(
            f"{path.name} is missing from {path.parent}; it renders this layout", field=FILE
        )
    spec = spec_from_file_location("d3serve_remote_format", path)
    if spec is None or spec.loader is None:
        raise InvalidCheckpoint(f"{path} is no Python module", field=FILE)
    module = module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a package stays as it was downloaded
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever foreign code raises
        raise InvalidCheckpoint(f"{path.name} cannot be imported: {error}", field=FILE) from error
    finally:
        sys.dont_write_bytecode = written
    if not callable(getattr(module, "render", None)):
        raise InvalidCheckpoint(
            f"{path.name} has no function render(tokenizer, state, question, codes)", field=FILE
        )
    return module
