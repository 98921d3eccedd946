"""What a logistic regression says of packages that it was not fitted on: soft labels for the training split.

A section is often a matter of taste; out-of-fold probabilities tell how sure one can be, which the label alone
does not. Folds go by source package, so that a library never teaches its own headers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from demo.index import Package
from demo.labels import SECTIONS
from demo.questions import OPTIONS, Asked, draw_state, state_text
from numpy.typing import NDArray

FOLDS = 5
STRENGTH = 10.0  # of the regression: as the baseline's


TRUST = 0.5  # share of a target that the regression's probabilities make
NAMES = {name: index for index, (names, _) in enumerate(SECTIONS.values()) for name in names}
PLACES = {section: index for index, section in enumerate(SECTIONS)}


class Teacher:
    """What training aims at: the truth, softened by the taught probabilities where there are any."""

    def __init__(self, taught: Mapping[str, NDArray[np.float32]] | None = None) -> None:
        self._taught = taught or {}

    def section(self, package: Package) -> NDArray[np.float32]:
        """Target over all of SECTIONS; zeros where the package's is unnamed."""
        target = np.zeros(len(SECTIONS), dtype=np.float32)
        if package.section in PLACES:
            target[PLACES[package.section]] = 1.0
            self._soften(target, self._taught.get(package.name))
        return target

    def answer(self, package: Package, asked: Asked) -> NDArray[np.float32]:
        """Target over a question's options, padded to OPTIONS."""
        target = np.zeros(OPTIONS, dtype=np.float32)
        target[asked.truth] = 1.0
        taught = self._taught.get(package.name) if asked.family == "section" else None
        if taught is not None:
            offered = [NAMES[name] for name in asked.question.criteria]  # type: ignore[union-attr]
            self._soften(target[: len(offered)], taught[offered])
        return target

    @staticmethod
    def _soften(target: NDArray[np.float32], taught: NDArray[np.float32] | None) -> None:
        if taught is not None and (total := taught.sum()) > 0:
            target *= 1 - TRUST
            target += TRUST * taught / total


def teach(packages: Sequence[Package], seed: int) -> NDArray[np.uint8]:
    """Each package's probabilities of SECTIONS in 255ths [packages, sections]; zeros where its section is unnamed.

    Args:
        packages: the training split.
        seed: of the states that are drawn, one a package.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: PLC0415 - only this step needs it
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    rng, names = np.random.default_rng(seed), list(SECTIONS)
    texts = np.array([state_text(draw_state(p, rng)) for p in packages], dtype=object)  # type: ignore[arg-type]
    sections = np.array([names.index(p.section) if p.section in SECTIONS else -1 for p in packages])
    folds = np.array([fold(package) for package in packages])
    taught = np.zeros((len(packages), len(names)), dtype=np.uint8)
    for held in range(FOLDS):
        bag = TfidfVectorizer(sublinear_tf=True, min_df=2)
        seen, unseen = (sections >= 0) & (folds != held), (sections >= 0) & (folds == held)
        fitted = LogisticRegression(C=STRENGTH, max_iter=100).fit(
            bag.fit_transform(texts[seen]), sections[seen]
        )
        found = np.zeros((int(unseen.sum()), len(names)))
        found[:, fitted.classes_] = fitted.predict_proba(bag.transform(texts[unseen]))
        taught[unseen] = np.round(255 * found)
        right = float((found.argmax(-1) == sections[unseen]).mean())
        print(f"fold {held + 1} of {FOLDS}: {right:.3f} of all {len(names)} sections right", flush=True)
    return taught


def fold(package: Package) -> int:
    """By the source package, apart from the hash that makes the splits."""
    return hashlib.sha256(f"fold {package.source}".encode()).digest()[0] % FOLDS


def save(taught: NDArray[np.uint8], path: Path) -> None:
    """Write what `teach` gave."""
    np.savez_compressed(path, taught=taught)


def load(path: Path, packages: Sequence[Package]) -> Teacher:
    """A teacher of the packages that `teach` was given."""
    taught = np.load(path)["taught"].astype(np.float32) / 255
    return Teacher({package.name: row for package, row in zip(packages, taught, strict=True)})
