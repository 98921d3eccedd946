"""Questions about packages whose answers the index knows, in the wire's own types.

Every draw takes a NumPy generator, so a seed fixes everything: wording, options, their order.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from demo import labels
from demo.index import Package
from numpy.typing import NDArray

from d3serve.schemas.questions import ChoiceQuestion, NoulCriteria, NoulQuestion, Question, ScoreQuestion

Rng = np.random.Generator

OPTIONS = 12
MAX_STATE_CHARACTERS = 1400
SECTION_ASKS = (
    "Which section does this package belong to?", "What is this package about?", "Pick the category that fits best.",
    "Where in the archive would you file this?", "Which topic fits this description?", "What kind of software is this?",
    "Choose the section of the package.", "Which of these describes the package best?", "Category?", None,
)  # fmt: skip
LANGUAGE_ASKS = (
    "Which programming language is it written in or for?", "What is the programming language here?",
    "Pick the language of the software.", "Language?",
)  # fmt: skip
ROLE_ASKS = (
    "What does the package hold?",
    "What kind of package is it?",
    "Which role does the package play?",
)
INTERFACE_ASKS = ("How does a user work with it?", "Which interface does it have?", "What does its user see?")
SUMMARY_ASKS = (
    "Which summary belongs to this text?",
    "Which headline fits?",
    "Pick the short description of this package.",
)
NAME_ASKS = (
    "What is this package called?",
    "Which name fits this package?",
    "Which package is described here?",
)
DEPENDS_ASKS = (
    "Which of these does it depend on?",
    "Which one must be installed first?",
    "Which is a dependency of it?",
)
IS_ASKS = (
    "Is this {}?",
    "Is the package {}?",
    "The package is {}.",
    "Would you say that it is {}?",
    "Is it {}?",
)
DOES_ASKS = (
    "Does it {}?",
    "Does this package {}?",
    "The package can {}.",
    "Would it {}?",
    "Is it true that it does {}?",
)
SIZE_ASKS = (
    "How big is the package once installed?",
    "How much disk space does it take?",
    "Rate its installed size.",
)
NEEDS_ASKS = (
    "How many other packages does it need?",
    "How many dependencies has it?",
    "Rate how much it depends on others.",
)
NEEDED_ASKS = (
    "How many packages depend on it?",
    "How widely is it used by other packages?",
    "How central is it to other packages?",
)
SIZE_BOUNDS, SIZE_LEVELS = (100, 500, 2000, 10000), (
    ("under 100 KB", "100 to 500 KB", "500 KB to 2 MB", "2 to 10 MB", "over 10 MB"),
    ("tiny", "small", "medium", "large", "very large"),
)  # fmt: skip
NEEDS_BOUNDS, NEEDS_LEVELS = (1, 3, 7, 15), (
    ("none", "1 or 2", "3 to 6", "7 to 14", "15 or more"),
    ("needs nothing", "needs very little", "needs a few packages", "needs many packages", "needs very many packages"),
)  # fmt: skip
NEEDED_BOUNDS, NEEDED_LEVELS = (1, 3, 10), (
    ("none", "1 or 2", "3 to 9", "10 or more"),
    ("nobody needs it", "rarely needed", "needed by several", "needed by many"),
)  # fmt: skip
NONE_OF_THESE = ("none of these", "something else", "other")


@dataclass(frozen=True)
class Asked:
    """A question, the index of its true option, and which family it belongs to."""

    question: Question
    truth: int
    family: str

    def reordered(self, order: Sequence[int]) -> "Asked":
        """The same choice with its options in another order; `order` lists old indices."""
        items = list(self.question.criteria.items()) if isinstance(self.question, ChoiceQuestion) else []
        question = self.question.model_copy(update={"criteria": dict(items[index] for index in order)})
        return Asked(question, list(order).index(self.truth), self.family)


class Asker:
    """Draws states and questions; other packages of the same list lend their texts as distractors."""

    def __init__(self, packages: Sequence[Package]) -> None:
        self._packages = packages
        self._properties = labels.properties()
        self._held: dict[str, tuple[list[int], list[int]]] = {}
        self._weights = self._balance()
        names = {name for package in packages for name in package.depends}
        self._dependencies = sorted(names)
        self._families: dict[str, Callable[[Package, Rng], Asked | None]] = {
            "section": self.section, "language": self._language, "role": self._role, "interface": self._interface,
            "summary": self._summary, "name": self._name, "depends": self._depends, "noul": self.noul,
            "size": self._size, "needs": self._needs, "needed": self._needed,
        }  # fmt: skip

    def ask(self, package: Package, family: str, rng: Rng) -> Asked | None:
        """A question of one family, or None where the index knows no answer."""
        return self._families[family](package, rng)

    def section(self, package: Package, rng: Rng, count: int | None = None) -> Asked | None:
        """The section among `count` (default: 2 to 12) readable names, with descriptions or without."""
        if package.section not in labels.SECTIONS:
            return None
        count = count or (OPTIONS if rng.random() < 0.4 else int(rng.integers(2, OPTIONS + 1)))
        wording = int(rng.integers(3))
        others = [section for section in labels.SECTIONS if section != package.section]
        picked = [package.section, *_pick(rng, others, count - 1)]
        words = [labels.section_words(section, wording) for section in picked]
        described = rng.random() < 0.3
        return _choice(
            rng, SECTION_ASKS, [(name, text if described else None) for name, text in words], "section"
        )

    def noul(self, package: Package, rng: Rng) -> Asked | None:
        """A yes/no property; yes and no are equally likely."""
        truth = int(rng.random() < 0.5)
        pool = self._known(package)[truth]
        if not pool:
            return None
        weights = self._weights[truth][pool]
        prop = self._properties[int(rng.choice(pool, p=weights / weights.sum()))]
        phrase = _one(rng, prop.phrases)
        asks = IS_ASKS if prop.is_a else DOES_ASKS
        criteria = None
        if rng.random() < 0.2:
            true, false = (
                (f"it is {phrase}", f"it is not {phrase}")
                if prop.is_a
                else (f"it does {phrase}", f"it does not {phrase}")
            )
            criteria = NoulCriteria(true=true, false=false)
        question = NoulQuestion(type="noul", instructions=_one(rng, asks).format(phrase), criteria=criteria)
        return Asked(question, truth, "noul")

    def _known(self, package: Package) -> tuple[list[int], list[int]]:
        """Indices of the properties that are false and those that are true of a package."""
        if package.name not in self._held:
            held = [prop.holds(package) for prop in self._properties]
            no, yes = ([i for i, value in enumerate(held) if value is wanted] for wanted in (False, True))
            self._held[package.name] = (no, yes)
        return self._held[package.name]

    def held(self, package: Package) -> NDArray[np.float32]:
        """Every property of a package: 1 true, 0 false, -1 where the index does not say."""
        row = np.full(len(self._properties), -1.0, dtype=np.float32)
        for value, indices in enumerate(self._known(package)):
            row[indices] = value
        return row

    def _balance(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weights to draw a property with, for a no and for a yes.

        Rare properties are drawn more often than they hold; a no is asked as often as a yes of the same
        property, so that the wording of a question tells nothing about its answer.
        """
        known = [self._known(package) for package in self._packages]
        size = len(self._properties)
        no, yes = (np.bincount([i for pair in known for i in pair[side]], minlength=size) for side in (0, 1))
        yes_weights = np.maximum(yes, 1) ** -0.5
        asked = np.zeros(size)
        for _, pool in known:
            asked[pool] += yes_weights[pool] / max(yes_weights[pool].sum(), 1e-9)
        return asked / np.maximum(no, 1), yes_weights

    def _language(self, package: Package, rng: Rng) -> Asked | None:
        words = {*labels.LANGUAGES.values(), *labels.SECTION_LANGUAGE.values()}
        return _labelled(rng, LANGUAGE_ASKS, labels.language(package), words, "language")

    def _role(self, package: Package, rng: Rng) -> Asked | None:
        truth = labels.single(package, "role", labels.ROLES)
        return _labelled(rng, ROLE_ASKS, truth, labels.ROLES.values(), "role")

    def _interface(self, package: Package, rng: Rng) -> Asked | None:
        truth = labels.single(package, "interface", labels.INTERFACES)
        return _labelled(rng, INTERFACE_ASKS, truth, labels.INTERFACES.values(), "interface")

    def _summary(self, package: Package, rng: Rng) -> Asked | None:
        return self._match(package, rng, SUMMARY_ASKS, lambda each: each.summary, "summary")

    def _name(self, package: Package, rng: Rng) -> Asked | None:
        return self._match(package, rng, NAME_ASKS, lambda each: each.name, "name")

    def _match(
        self, package: Package, rng: Rng, asks: Sequence[str], text: Callable[[Package], str], family: str
    ) -> Asked | None:
        """Which text is the package's own, among those of other packages."""
        size, count = len(self._packages), int(rng.integers(1, 8))
        others = rng.integers(size, size=count)
        if rng.random() < 0.3:  # neighbours in the index have like names: harder to tell apart
            others = (others[0] + np.arange(count)) % size
        texts = {text(package): None} | {text(self._packages[int(index)]): None for index in others}
        return _choice(rng, asks, list(texts.items()), family) if len(texts) > 1 and "" not in texts else None

    def _depends(self, package: Package, rng: Rng) -> Asked | None:
        if not package.depends:
            return None
        others = rng.integers(len(self._dependencies), size=int(rng.integers(1, 6)))
        names = {self._dependencies[int(index)]: None for index in others}
        options = {_one(rng, package.depends): None} | {n: None for n in names if n not in package.depends}
        return _choice(rng, DEPENDS_ASKS, list(options.items()), "depends") if len(options) > 1 else None

    def _size(self, package: Package, rng: Rng) -> Asked:
        return _score(rng, SIZE_ASKS, SIZE_LEVELS, bisect_right(SIZE_BOUNDS, package.size_kb), "size")

    def _needs(self, package: Package, rng: Rng) -> Asked:
        return _score(
            rng, NEEDS_ASKS, NEEDS_LEVELS, bisect_right(NEEDS_BOUNDS, len(package.depends)), "needs"
        )

    def _needed(self, package: Package, rng: Rng) -> Asked:
        return _score(
            rng, NEEDED_ASKS, NEEDED_LEVELS, bisect_right(NEEDED_BOUNDS, package.dependents), "needed"
        )


def draw_state(package: Package, rng: Rng, *, leave_out: Iterable[str] = ()) -> str | dict[str, Any]:
    """The package as a state: text, or one JSON object of its fields, without the fields in `leave_out`."""
    fields = _fields(package)
    kept = {name: value for name, value in fields.items() if value and name not in set(leave_out)}
    if rng.random() < 0.35:
        dropped = set(
            _pick(
                rng, [name for name in kept if name not in {"summary", "description"}], int(rng.integers(4))
            )
        )
        return {name: value for name, value in kept.items() if name not in dropped}
    lines = [kept[name] for name in ("summary", "description") if name in kept]
    if "name" in kept and rng.random() < 0.5:
        lines[:1] = [f"{kept['name']} - {lines[0]}" if lines else kept["name"]]
    return "\n".join(lines)


def _fields(package: Package) -> dict[str, Any]:
    return {
        "name": package.name,
        "summary": package.summary,
        "description": _shorten(package.body),
        "depends": list(package.depends[:12]),
        "architecture": package.architecture,
        "installed_size_kb": package.size_kb,
    }


def _shorten(text: str) -> str:
    """Long descriptions keep their beginning, up to the end of a word."""
    return text if len(text) <= MAX_STATE_CHARACTERS else text[:MAX_STATE_CHARACTERS].rsplit(" ", 1)[0]


def state_text(state: str | dict[str, Any]) -> str:
    """A state as the prompt shows it."""
    return state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)


def _labelled(
    rng: Rng, asks: Sequence[str], truth: str | None, words: Iterable[str], family: str
) -> Asked | None:
    """A choice among label words; one time in ten the true word is replaced by a none-of-these option."""
    if truth is None:
        return None
    others = sorted(set(words) - {truth})
    picked = _pick(rng, others, min(len(others), int(rng.integers(1, OPTIONS))))
    first = truth
    if rng.random() < 0.1:
        first = _one(rng, NONE_OF_THESE)
    elif rng.random() < 0.15:
        picked[-1] = _one(rng, NONE_OF_THESE)
    return _choice(rng, asks, [(word, None) for word in (first, *picked)], family)


def _choice(
    rng: Rng, asks: Sequence[str | None], options: Sequence[tuple[str, str | None]], family: str
) -> Asked:
    """Shuffle the options, the first of which is true."""
    order = rng.permutation(len(options))
    criteria: dict[str, Any] = {options[int(index)][0]: options[int(index)][1] for index in order}
    question = ChoiceQuestion(type="choice", instructions=_one(rng, asks), criteria=criteria)
    return Asked(question, int(np.flatnonzero(order == 0)[0]), family)


def _score(rng: Rng, asks: Sequence[str], levels: Sequence[Sequence[str]], truth: int, family: str) -> Asked:
    question = ScoreQuestion(type="score", instructions=_one(rng, asks), criteria=list(_one(rng, levels)))
    return Asked(question, truth, family)


def _one(rng: Rng, items: Sequence[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def _pick(rng: Rng, items: Sequence[str], count: int) -> list[str]:
    return [items[int(index)] for index in rng.choice(len(items), size=min(count, len(items)), replace=False)]
