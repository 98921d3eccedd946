"""A new kind of question is one class, beside the others: every other file serves it as it is."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KIND = '''
class PairAnswer(Wire):
    """Which of two."""

    type: Literal["pair"] = "pair"
    second: float

    def row(self) -> Row:
        return Row("second" if self.second > 0.5 else "first", self.second)


class PairQuestion(Kind):
    """Compare two texts."""

    limit = "texts_per_pair"

    type: Literal["pair"]
    instructions: JsonValue = None
    criteria: list[JsonValue] = Field(min_length=2, max_length=2)

    def options(self) -> list[str]:
        return [value_text(text) for text in self.criteria]

    def answer(self, probabilities: Sequence[float]) -> PairAnswer:
        return PairAnswer(second=probabilities[1])

    def faults(self) -> Iterator[Fault]:
        for index, text in enumerate(self.criteria):
            if text is None:
                yield Fault(("criteria", index), "is no text to compare")


Question = Annotated[ChoiceQuestion | NoulQuestion | ScoreQuestion | PairQuestion, Field(discriminator="type")]
Answer = Annotated[
    ChoiceAnswer | NoulAnswer | ScoreAnswer | PairAnswer | ErrorAnswer, Field(discriminator="type")
]
'''
SERVED = """
import json
from rich.console import Console
from d3serve.api.app import create_app
from d3serve.api.validation import check_request
from d3serve.commands.ask import show
from d3serve.errors import InvalidRequest
from d3serve.model.prompt import question_part
from d3serve.schemas import DecisionResponse
from d3serve.settings import Settings
from d3serve.store.encode import decode_questions, encode_request
from d3serve.worker.fake_engine import FakeEngine

def asked(*texts):
    questions = {"q": {"type": "pair", "instructions": "Which is older?", "criteria": list(texts)}}
    return check_request({"model": "fake", "state": "s", "questions": questions}, Settings())

for wrong in (("a", None), ("a", "a"), ("a", "b", "c")):
    try:
        asked(*wrong)
    except InvalidRequest as error:
        print(error.message)
questions = decode_questions(encode_request(asked("an oak", "a birch")).questions.decode())
print(question_part("q", questions["q"], ["A", "B"]))
engine = FakeEngine.load("fake:")
[decided] = engine.decide([engine.prepare("s", questions)])
response = DecisionResponse(model="fake", answers=decided.answers, usage=decided.usage)
show({"status": "succeeded", "result": json.loads(response.model_dump_json())}, Console(width=100))
print("PairQuestion" in create_app(Settings()).openapi()["components"]["schemas"])
"""


def test_a_kind_that_is_added_in_one_file_is_served_by_all_others(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "d3serve", tmp_path / "d3serve", symlinks=True)
    for room in ("api", "worker", "model", "kernels"):
        shutil.copytree(ROOT / room, tmp_path / room)
    path = tmp_path / "d3serve" / "schemas" / "questions.py"
    text = path.read_text()
    seam = text.index("KINDS: Final")
    text = text[:seam] + KIND + text[seam:]
    path.write_text(
        text.replace('"levels_per_score": MAX_LEVELS', '"levels_per_score": MAX_LEVELS, "texts_per_pair": 2')
    )
    done = subprocess.run(
        [sys.executable, "-c", SERVED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert "questions.q.criteria.1 is no text to compare" in told
    assert 'has two options that both read "a"' in told
    assert "holds 3; there may be 2 to 2 texts per pair" in told
    assert "Which is older?\n\nOptions:\nA: an oak\nB: a birch" in told
    assert "first" in told or "second" in told
    assert told.endswith("True\n")
