"""The bundled checkpoint answers what it is asked about drawings that it has not seen; its texts stay as they were."""

import json

import numpy as np
import pytest
import torch
from demo import picture_exam
from demo.looking import TOWER, Tower, read_network
from demo.network import Shown
from demo.picture_prompts import Prompts, ask
from demo.pictures import COLOURS, HELD_OUT, SHAPES, WORDS, draw
from demo.prompts import Tokenizing
from demo.tower_package import CARD, write_card, write_tower
from safetensors.torch import load_file

from d3serve.model.engine import DecisionEngine
from d3serve.model.media import Medium
from d3serve.model.vision_weights import VisionAllocator

PICTURES = 20  # of each kind: more is for the card
SEED = 99


@pytest.fixture(scope="module")
def answered(engine):
    return {
        held_out: picture_exam.sit(
            engine, np.random.default_rng([SEED, held_out]), PICTURES, held_out=held_out
        )
        for held_out in (False, True)
    }


@pytest.fixture(scope="module")
def scores(answered):
    return picture_exam.report({str(key): each for key, each in answered.items()})


def test_four_way_questions_about_new_drawings(scores):
    assert scores["all"]["all"]["accuracy"] >= 0.85


@pytest.mark.parametrize("name", WORDS)
def test_every_kind_of_question(scores, name):
    assert scores["all"][name]["accuracy"] >= 0.75


def test_pairs_of_shape_and_colour_that_were_never_drawn(scores):
    assert scores["True"]["all"]["accuracy"] >= 0.8


def test_it_is_hardly_less_sure_than_it_is_right_and_never_surer(scores):
    surer = scores["all"]["all"]["confidence"] - scores["all"]["all"]["accuracy"]
    assert -0.12 <= surer <= 0.03


def test_the_picture_is_what_is_looked_at(engine):
    """With grey in its place the same questions come out at chance."""
    grey = Medium("image", "grey", np.full((1, 3, 256, 256), 128, dtype=np.uint8))
    rng, right, count = np.random.default_rng(SEED), 0, 0
    for number in range(12):
        asked = {name: ask(name, word, rng, offered=4) for name, word in draw(rng, 64, 64).truths.items()}
        questions = {name: one.question for name, one in asked.items()}
        [job] = engine.decide([engine.prepare(f"drawing {number}", questions, media=[grey])])
        for name, answer in job.answers.items():
            right += list(asked[name].question.criteria).index(answer.choice) == asked[name].truth
            count += 1
    assert right / count <= 0.5


def test_its_card_tells_what_was_measured(checkpoint):
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assert card.count("## Pictures") == 1
    assert "docs/records/2026-11-30-demo-pictures.md" in card


def test_the_tower_writes_words_alone(checkpoint):
    """Circuits mark rows in other dimensions; of those a picture's rows hold the constant that all rows hold."""
    tensors = load_file(checkpoint / "model.safetensors")
    tower = Tower(torch.device("cpu"))
    tower.load(tensors)
    pictures = np.stack(
        [draw(np.random.default_rng(n), 256, 256).pixels.transpose(2, 0, 1) for n in range(2)]
    )
    features = tower.features(pictures).detach()
    written = features.abs().amax(dim=(0, 1)) > 0
    assert set(written.nonzero()[:, 0].tolist()) == {*range(64), 216, 238}
    assert bool((features[..., 216] == 16).all())


def test_no_held_out_pair_is_drawn_for_training():
    assert len(HELD_OUT) == len(SHAPES) == len(COLOURS)
    rng = np.random.default_rng(SEED)
    drawn = [draw(rng, 64, 64).truths for _ in range(300)]
    assert not {(each["shape"], each["colour"]) for each in drawn} & HELD_OUT
    held = [draw(rng, 64, 64, held_out=True).truths for _ in range(30)]
    assert {(each["shape"], each["colour"]) for each in held} <= HELD_OUT


def test_a_question_holds_its_true_answer():
    rng = np.random.default_rng(SEED)
    for name, words in WORDS.items():
        for word in words:
            asked = ask(name, word, rng)
            assert list(asked.question.criteria)[asked.truth] == word
            assert len(asked.question.criteria) in {4, len(words)}


def test_what_is_trained_is_what_is_served(checkpoint, engine):
    """The same numbers as the engine's: features, states around them, the frozen network."""
    tokenizing = Tokenizing(checkpoint)
    network = read_network(checkpoint, tokenizing.vocab_size)
    tower, rng = Tower(torch.device("cpu")), np.random.default_rng(SEED)
    tower.load(load_file(checkpoint / "model.safetensors"))
    prompts = Prompts(tokenizing, np.random.default_rng(1), torch.device("cpu"))
    drawing = draw(rng, 320, 256)
    pixels = np.ascontiguousarray(drawing.pixels.transpose(2, 0, 1))[None]
    numbers, _ = prompts.numbers([drawing.truths], rng)
    with torch.no_grad():
        features = tower.features(pixels)
        batch, pads = prompts.batch(numbers, features.shape[1], _Always(2))
        logits = network(batch, shown=Shown(pads, features))
    decision = json.loads((checkpoint / "decision_config.json").read_text())
    expected = (logits / decision["temperature"]).softmax(-1)[0]
    asked = [prompts.asked[int(number)].question for number in numbers[0]]
    media = [Medium("image", "one", pixels)]
    [job] = engine.decide(
        [engine.prepare(prompts.state(2), dict(zip("ab", asked, strict=True)), media=media)]
    )
    for row, answer in zip(expected, job.answers.values(), strict=True):
        found = list(answer.probabilities.values())
        np.testing.assert_allclose(row[: len(found)], found, atol=2e-5)


class _Always:
    """Chooses the same state every time."""

    def __init__(self, state):
        self._state = state

    def integers(self, _high, size):
        return np.full(size, self._state)


def test_a_package_gets_a_tower_and_keeps_its_texts(checkpoint, tmp_path):
    before = load_file(checkpoint / "model.safetensors")
    drawn = VisionAllocator(TOWER, torch.device("cpu"), torch.bfloat16)
    drawn.weights()
    tower = {f"visual.{name}": torch.zeros_like(p) for name, p in drawn.targets.items()}
    write_tower(checkpoint, tower, tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(after[name], p) for name, p in before.items() if not name.startswith("visual."))
    assert {name for name in after if name.startswith("visual.")} == set(tower)
    assert DecisionEngine.load(str(tmp_path)).info.modalities == ("text", "image")
    result = {
        "questions": 8,
        "accuracy": 0.5,
        "interval": (0.2, 0.8),
        "confidence": 0.5,
        "nll": 1.0,
        "ece": 0.1,
    }
    write_card(tmp_path, {"all": dict.fromkeys(("all", *WORDS), result)})
    write_card(tmp_path, {"all": dict.fromkeys(("all", *WORDS), result)})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count(CARD.splitlines()[0]) == 1
    assert "## Where the data comes from" in card
