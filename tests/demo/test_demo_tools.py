"""The tools that made the checkpoint: splits without leaks, true answers, and a network that is the engine's twin."""

import dataclasses

import numpy as np
import pytest
import torch
from demo import index, labels, measure
from demo.batches import Tokenizing, TrainingBatches
from demo.circuits import install
from demo.index import Package
from demo.muon import orthogonalise
from demo.package import geometry, write_package
from demo.questions import Asker, draw_state
from demo.training import Model, Training, losses
from demo.words import WordBatches, WordModel

from d3serve.model.engine import DecisionEngine
from d3serve.schemas import ChoiceQuestion

WORDS = ("chess", "mail", "python", "library", "window", "sound", "archive", "matrix", "font", "kernel")


def make_package(number: int) -> Package:
    section = sorted(labels.SECTIONS)[number % len(labels.SECTIONS)]
    word = WORDS[number % len(WORDS)]
    return Package(
        name=f"{word}-{number}", source=f"source-{number // 2}", section=section,
        tags=("role::program", "interface::graphical") if number % 3 else (),
        summary=f"a {word} for {section} number {number}", body=f"It has {word} {number} and more. " * (1 + number % 7),
        depends=(f"lib{word}", "libc6"), dependents=number % 5, architecture="all", size_kb=50 * number,
    )  # fmt: skip


@pytest.fixture(scope="module")
def packages():
    return [make_package(number) for number in range(400)]


@pytest.fixture(scope="module")
def tokenizing(checkpoint, packages):
    return Tokenizing(checkpoint, packages, tag_floor=1)


@pytest.fixture
def model(tokenizing):
    torch.manual_seed(7)
    small = dataclasses.replace(geometry(tokenizing.vocab_size), hidden=64, ffn=96)
    made = Model(small, len(tokenizing.sections), len(tokenizing.tags)).eval()
    with torch.no_grad():
        for p in made.parameters():  # as the package stores it; strong enough that a wrong mask shows
            p.copy_((p * 2 if p.ndim > 1 else p + 0.1 * torch.randn_like(p)).bfloat16())
    return made


def test_no_source_stands_in_two_splits(packages):
    by_split = [{p.source for p in index.split(packages, name)} for name in ("train", "validation", "test")]
    assert all(by_split)
    assert sum(map(len, by_split)) == len(set.union(*by_split))


def test_a_text_of_the_training_split_is_not_held_out(packages):
    held_out = index.split(packages, "test")
    copy = dataclasses.replace(index.split(packages, "train")[0], body=held_out[0].body)
    assert held_out[0] not in index.split([*packages, copy], "test")


def test_every_question_has_its_true_answer_at_its_truth(packages):
    asker, rng = Asker(packages), np.random.default_rng(1)
    for package in packages:
        for _ in range(4):
            asked = asker.section(package, rng)
            options = list(asked.question.criteria)
            assert options[asked.truth] in labels.SECTIONS[package.section][0]
            assert len(set(options)) == len(options) <= 12
            turned = asked.reordered(range(len(options))[::-1])
            assert list(turned.question.criteria)[turned.truth] == options[asked.truth]
            assert asker.ask(package, "size", rng).truth == sum(
                package.size_kb >= bound for bound in (100, 500, 2000, 10000)
            )


def test_yes_and_no_are_asked_alike(packages):
    """Neither the answers as a whole nor the wording of a question gives the answer away."""
    asker, rng = Asker(packages), np.random.default_rng(2)
    asked = [each for _ in range(8) for p in packages if (each := asker.noul(p, rng)) is not None]
    assert abs(np.mean([each.truth for each in asked]) - 0.5) < 0.05
    by_wording = {}
    for each in asked:
        by_wording.setdefault("graphical" in each.question.instructions, []).append(each.truth)
    assert set(by_wording) == {False, True}


def test_states_never_hold_their_labels(packages):
    rng = np.random.default_rng(3)
    for package in packages:
        state = draw_state(package, rng)
        if isinstance(state, dict):
            assert not {"section", "tags", "source"} & set(state)


def test_the_trained_network_is_what_the_engine_serves(model, tokenizing, packages, checkpoint, tmp_path):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    kept = {name: p for name, p in weights.items() if name.startswith("backbone.") or name == "readout"}
    write_package(tmp_path / "made", checkpoint, kept, model.backbone.g, 1.0, "card")
    engine = DecisionEngine.load(str(tmp_path / "made"))
    exam = measure.make_exam(packages, "test", 0)
    probabilities = iter(measure.probabilities(measure.answer(model, tokenizing, exam, rows=4), 1.0))
    causal = measure.probabilities(measure.answer(model, tokenizing, exam, causal=True), 1.0)
    served = []
    for state, asked in zip(exam.states, exam.asked, strict=True):
        job = engine.prepare(state, {str(i): each.question for i, each in enumerate(asked)})
        for answer in engine.decide([job])[0].answers.values():
            options = (
                [1 - answer.noul, answer.noul]
                if answer.type == "noul"
                else list(answer.probabilities.values())
            )
            np.testing.assert_allclose(next(probabilities)[: len(options)], options, atol=2e-5)
            served.append(options[0])
    assert np.abs(causal[:, 0] - served).max() > 1e-3, "the comparison would see another mask"


def test_option_marks_are_the_option_lines(tokenizing, packages):
    asker, rng = Asker(packages), np.random.default_rng(4)
    texts = {index: token for token, index in tokenizing.tokenizer._full.get_vocab().items()}
    for package in packages[:40]:
        asked = asker.section(package, rng)
        sample = tokenizing.sample(package, "A state.", [asked])
        lines = "".join(texts[int(token)] for token in sample.blocks[0]).replace("Ġ", " ").split("Ċ")
        ends = [
            "".join(texts[int(t)] for t in sample.blocks[0][: mark + 1]).count("Ċ")
            for mark in sample.options[0]
        ]
        for end, option in zip(ends, asked.question.criteria, strict=True):
            assert any(f": {option}" in line for line in lines[end - 2 : end])


def test_a_few_steps_learn_and_a_saved_state_goes_on(model, tokenizing, packages, tmp_path):
    batches = TrainingBatches(tokenizing, packages[:40], 4000, 0)
    batch = next(iter(batches))
    training = Training(model, 3e-3)
    before = sum(part.item() for part in losses(model, batch, 0.0).values())
    for _ in range(6):
        training._step(batch, 0.3)
    assert sum(part.item() for part in losses(model, batch, 0.0).values()) < before
    training.save(tmp_path)
    other = Training(Model(model.backbone.g, len(tokenizing.sections), len(tokenizing.tags)).eval(), 3e-3)
    other.load(tmp_path)
    averages = {name: average for name, average, _ in training._averages()}
    assert len(averages) > 50
    for name, average, _ in other._averages():
        torch.testing.assert_close(average, averages[name], rtol=0.01, atol=1e-6)
    training._step(batch, 0.3)
    other._step(batch, 0.3)
    for a, b in zip(model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 64, 64), (2, 96, 32), (2, 32, 96)):
        values = torch.linalg.svdvals(
            orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        )
        assert values.quantile(0.1) > 0.5, "all but the few that were near zero"
        assert values.max() < 1.3


def test_none_of_these_is_true_only_when_the_label_is_gone(packages):
    asker, rng = Asker(packages), np.random.default_rng(5)
    seen = set()
    for package in packages * 3:
        asked = asker.ask(package, "role", rng)
        if asked is None:
            continue
        assert isinstance(asked.question, ChoiceQuestion)
        options = list(asked.question.criteria)
        true_word = labels.ROLES["program"]
        seen.add(options[asked.truth] == true_word)
        assert (true_word in options) == (options[asked.truth] == true_word)
    assert seen == {False, True}


def test_the_network_begins_as_the_word_model(tokenizing, packages):
    """The circuits compute what the word model learnt, so its quality is the checkpoint's."""
    torch.manual_seed(3)
    words = WordModel(tokenizing)
    with torch.no_grad():
        words.option *= 4  # as sure as a trained one
        words.ask *= 4
    network = Model(geometry(tokenizing.vocab_size), len(tokenizing.sections), len(tokenizing.tags)).eval()
    install(network, words, tokenizing)
    exam = measure.make_exam(packages, "test", 1)
    got = measure.probabilities(measure.answer(network, tokenizing, exam, rows=4), 1.0)
    batches = WordBatches(tokenizing, packages, 0)
    with torch.no_grad():
        expected = words.logits(*words(batches.encode(exam.packages, exam.states, exam.asked))).numpy()
    apart = np.abs(got - measure.probabilities(expected, 1.0)).max(-1)
    assert np.median(apart) < 0.06, "the network is a little less sure: norms are nearly constant, not quite"
    assert np.quantile(apart, 0.99) < 0.2
    assert (got.argmax(-1) == expected.argmax(-1)).mean() > 0.9
