"""The tools that made the checkpoint: splits without leaks, true answers, and a network that is the engine's twin."""

import dataclasses

import numpy as np
import pytest
import torch
from demo import index, labels, measure, teacher
from demo.batches import WordBatches
from demo.circuits import install
from demo.index import Package
from demo.network import Model
from demo.package import geometry, write_package
from demo.prompts import Tokenizing, batch
from demo.questions import Asked, Asker, draw_state
from demo.teacher import Teacher
from demo.training import Training
from demo.words import WordModel

from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import ChoiceQuestion, NoulQuestion

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
def tokenizing(checkpoint):
    return Tokenizing(checkpoint)


@pytest.fixture(scope="module")
def batches(tokenizing, packages):
    return WordBatches(tokenizing, Asker(packages), Teacher(), packages, 0)


@pytest.fixture
def model(tokenizing):
    torch.manual_seed(7)
    small = dataclasses.replace(geometry(tokenizing.vocab_size), hidden=64, ffn=96)
    made = Model(small).eval()
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
    exam = measure.make_exam(packages, "test", 0, size=8)
    samples = measure.tokenized(tokenizing, exam)
    probabilities = iter(measure.probabilities(measure.answer(model, samples, rows=4), 1.0))
    causal = measure.probabilities(measure.answer(model, samples, causal=True), 1.0)
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


@pytest.fixture(scope="module")
def few(packages, batches):
    """Batches of few states: a step of the full size takes a second on a CPU."""
    exam = measure.make_exam(packages, "test", 4)
    parts = [slice(start, start + 6) for start in range(0, len(exam.packages) - 6, 6)]
    return [batches.encode(exam.packages[part], exam.states[part], exam.asked[part]) for part in parts]


def trained(tokenizing, few, steps):
    torch.manual_seed(5)
    training = Training(WordModel(tokenizing))
    return training, [training.step(few[i % len(few)], 0.5)[0].item() for i in range(steps)]


def test_a_few_steps_learn(tokenizing, few):
    _, losses = trained(tokenizing, few, 30)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2


@pytest.fixture
def one_thread():
    """Gradients of looked-up rows are added in the order in which threads come to them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_saved_training_continues_exactly(tokenizing, few, tmp_path):
    training, _ = trained(tokenizing, few, 3)
    training.save(tmp_path)
    torch.manual_seed(6)
    other = Training(WordModel(tokenizing))
    other.load(tmp_path)
    assert other.steps == training.steps == 3
    for one in few[:2]:
        for each in (training, other):
            torch.manual_seed(8)  # what a step forgets
            each.step(one, 0.5)
    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_a_batch_holds_its_questions_and_their_answers(tokenizing, packages, batches):
    """Shuffled options, their lines and the truth stay together."""
    exam = measure.make_exam(packages, "test", 3)
    made = batches.encode(exam.packages, exam.states, exam.asked)
    texts = {index: token for token, index in tokenizing.tokenizer._full.get_vocab().items()}
    for row, asked in enumerate(measure.flat(exam)):
        lines = made.lines[made.options[row, : made.counts[row]]]
        weights = made.line_weights[made.options[row, : made.counts[row]]]
        read = [
            "".join(texts[int(token)] for token, weight in zip(*pair, strict=True) if weight).replace(
                "Ġ", " "
            )
            for pair in zip(lines, weights, strict=True)
        ]
        true = asked.question.options()[asked.truth]
        assert f": {true}".endswith(read[int(made.truths[row])]), "the newest tokens of a long line"
        assert made.targets[row].argmax() == made.truths[row] == asked.truth
        assert (made.targets[row, made.counts[row] :] == 0).all()


def test_the_layer_of_neighbours_sees_and_writes_nothing_else(tokenizing, few):
    """So its weights do in the network, beside flags and means, what they did in training."""
    training, _ = trained(tokenizing, few, 3)
    words = training.model
    vectors, kept = torch.randn(2, 40, 64) * 0.3, torch.ones(2, 40, dtype=torch.bool)
    assert (words.neighbours(vectors, kept) - vectors).abs().max() > 1e-3, "it has learnt"
    for name, p in words.neighbours.layer.named_parameters():
        if name.endswith(("out_proj.weight", "down_proj.weight")):
            assert (p[64:] == 0).all()
        elif name.endswith(("_proj.weight", "qkv.weight", "proj_z.weight", "proj_a.weight", "proj_b.weight")):
            assert (p[:, 64:216] == 0).all()
            assert (p[:, 217:] == 0).all()


def test_soft_labels_are_out_of_fold(packages):
    """Sections drawn at random, told by words that only one source has: nobody else's words give them away."""
    rng = np.random.default_rng(9)
    drawn = rng.choice(["games", "mail", "fonts", "kernel"], size=len(packages))
    told = [
        dataclasses.replace(
            p,
            source=f"s{i // 5}",
            section=str(drawn[i // 5]),
            summary=f"word{i // 5}",
            body=f"mark{i // 5} " * 5,
        )
        for i, p in enumerate(packages)
    ]
    taught = teacher.teach(told, 1)
    places = [teacher.PLACES[package.section] for package in told]
    assert (taught.argmax(-1) == places).mean() < 0.5
    np.testing.assert_allclose(taught.sum(-1, dtype=int), 255, atol=len(labels.SECTIONS) / 2)


def test_soft_labels_stay_with_their_options(packages):
    probabilities = np.random.default_rng(0).dirichlet(np.ones(len(labels.SECTIONS))).astype(np.float32)
    package = packages[3]
    taught = Teacher({package.name: probabilities})
    asked = Asker(packages).section(package, np.random.default_rng(1), 12)
    names = list(asked.question.criteria)
    soft = np.array([probabilities[teacher.NAMES[name]] for name in names])
    expected = teacher.TRUST * soft / soft.sum() + (1 - teacher.TRUST) * (np.arange(12) == asked.truth)
    np.testing.assert_allclose(taught.answer(package, asked), expected, rtol=1e-5)
    assert Teacher().answer(package, asked).tolist() == (np.arange(12) == asked.truth).tolist()
    assert taught.section(package).sum() == pytest.approx(1.0)


def test_calibration_finds_the_temperature():
    """Labels drawn from a softmax at 1.6 are calibrated by 1.6, and the error measure tells the two apart."""
    rng = np.random.default_rng(4)
    logits = rng.normal(scale=3.0, size=(20_000, 12)).astype(np.float32)
    real = measure.probabilities(logits, 1.6)
    truths = (real.cumsum(-1) > rng.random((len(real), 1))).argmax(-1)
    assert measure.calibrate(logits, truths) == pytest.approx(1.6, abs=0.05)
    assert measure.calibration_error(real, truths) < 0.015
    assert measure.calibration_error(measure.probabilities(logits, 1.0), truths) > 0.1


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


def test_the_network_is_the_word_model(tokenizing, packages, batches):
    """The circuits compute what the word model learnt, so its quality is the checkpoint's."""
    torch.manual_seed(3)
    words = WordModel(tokenizing)
    with torch.no_grad():
        words.option *= 4  # as sure as a trained one
        words.ask *= 4
        words.vectors *= 3
        words.weights.normal_(std=0.3)
        layer = words.neighbours.layer
        for p in (layer.linear_attn.out_proj.weight, layer.mlp.down_proj.weight):
            p.add_(torch.randn_like(p), alpha=0.01)
        words.neighbours.confine()
    network = Model(geometry(tokenizing.vocab_size)).eval()
    install(network, words, tokenizing)
    exam = measure.make_exam(packages, "test", 1)
    got = measure.probabilities(measure.answer(network, measure.tokenized(tokenizing, exam), rows=4), 1.0)
    with torch.no_grad():
        expected = words.logits(*words(batches.encode(exam.packages, exam.states, exam.asked))).numpy()
    apart = np.abs(got - measure.probabilities(expected, 1.0)).max(-1)
    assert np.median(apart) < 0.06, "the network is a little less sure: norms are nearly constant, not quite"
    assert np.quantile(apart, 0.95) < 0.2


def test_line_ends_of_a_state_hold_no_words(tokenizing):
    """They gather their line like a question's, and give it back: the state's mean is of its own words."""
    torch.manual_seed(3)
    words = WordModel(tokenizing)
    with torch.no_grad():
        words.vectors *= 3
    network = Model(geometry(tokenizing.vocab_size)).eval()
    install(network, words, tokenizing)
    held = []
    network.backbone.layers[0].register_forward_hook(lambda _module, _inputs, out: held.extend(out))
    question = NoulQuestion(type="noul", instructions="Is this a game?")
    made = batch([tokenizing.sample("A chess game.\n\nIt plays\nwell", [Asked(question, 1, "noul")])])
    with torch.no_grad():
        network(made)
    states, questions = held
    ends = [row for row, token in enumerate(made.states[0].tolist()) if tokenizing.ends_line(token)]
    assert len(ends) >= 4
    assert states[0, ends, :64].abs().max() < 0.1
    rows = [row for row, token in enumerate(made.questions[0, 0].tolist()) if tokenizing.ends_line(token)]
    assert questions[0, rows, :64].abs().max() > 0.2
