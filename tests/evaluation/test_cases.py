"""Files of labelled cases: what is read, and what is refused by line and name."""

import json

import pytest
from making import write_lines

from d3serve.errors import InvalidRequest, RequestError
from d3serve.evaluation.cases import read_cases, read_questions

QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Which team?",
        "criteria": {"billing": None, "shipping": None},
    },
    "refund": {"type": "noul", "instructions": "A refund?"},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "today"]},
}
LINE = {"state": "I was charged twice.", "labels": {"team": "billing", "refund": True, "urgency": "today"}}


def refusal(path, *lines, questions=QUESTIONS):
    with pytest.raises(RequestError) as refused:
        read_cases(write_lines(path / "cases.jsonl", lines), questions)
    return refused.value.message


def test_labels_become_places_among_the_options(tmp_path):
    lines = [LINE, {"state": {"a": 1}, "id": "two", "labels": {"urgency": 0}}]
    one, two = read_cases(write_lines(tmp_path / "cases.jsonl", lines), QUESTIONS)
    assert one.labels == {"team": 0, "refund": 1, "urgency": 1}
    assert one.options["refund"] == ("no", "yes")
    assert (one.name, two.name) == ("line 1", "two")
    assert two.request() == {"state": {"a": 1}, "questions": QUESTIONS}


def test_a_table_says_the_same(tmp_path):
    table = tmp_path / "cases.csv"
    table.write_text(
        "\ufeffid,state,team,refund,urgency,remark\n"
        '1,"I was charged\ntwice, ""again"".",billing,Yes,today,x\n'
        "2,Where is it?,shipping,0,0,\n"
        "3,Hm.,,no,,\n"
    )
    one, two, three = read_cases(table, QUESTIONS)
    assert one.shows == {"state": 'I was charged\ntwice, "again".'}
    assert one.labels == {"team": 0, "refund": 1, "urgency": 1}
    assert two.labels == {"team": 1, "refund": 0, "urgency": 0}
    assert two.number == 4  # where it stands in the file
    assert three.labels == {"refund": 0}


def test_questions_given_beside_the_file_take_the_place_of_those_in_it(tmp_path):
    path = write_lines(tmp_path / "cases.jsonl", [LINE | {"questions": QUESTIONS}])
    reworded = {"refund": {"type": "noul", "instructions": "Money back?"}}
    [case] = read_cases(path, reworded)
    assert case.questions == QUESTIONS | reworded


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"labels": {"team": "biling"}}, ["line 2", "labels.team", '"billing", "shipping"', '"biling"']),
        ({"labels": {"refund": "yes"}}, ["labels.refund must be true or false"]),
        ({"labels": {"refund": 1}}, ["labels.refund must be true or false"]),
        (
            {"labels": {"urgency": 2}},
            ["labels.urgency must be the text of a level, or its place from 0 to 1"],
        ),
        ({"labels": {"urgency": True}}, ["labels.urgency must be the text of a level"]),
        ({"labels": {"urgency": "soon"}}, ["labels.urgency must be the text"]),
        ({"labels": {"tone": "calm"}}, ["labels.tone is the label of no question"]),
        ({"labels": {}}, ["no label"]),
        ({"labels": None}, ["labels must be an object"]),
        ({"label": {}}, ['"label" is no field of a case']),
        ({"questions": {"x": {"type": "nul"}}}, ["questions: x"]),
        ({"questions": []}, ["questions must be an object"]),
        ({"id": [1]}, ["id must be"]),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_name(tmp_path, line, words):
    told = refusal(tmp_path, LINE, LINE | line)
    assert all(word in told for word in ["line 2", *words]), told


def test_several_wrong_lines_are_told_at_once(tmp_path):
    told = refusal(tmp_path, *[LINE | {"labels": {"team": str(n)}} for n in range(9)])
    assert "line 1" in told
    assert "line 3" in told
    assert "and 6 more" in told


def test_what_is_no_strict_json_is_refused(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(LINE) + '\n{"state": "x", "state": "y"}\n[1]\n{"state": NaN}\n')
    with pytest.raises(InvalidRequest) as refused:
        read_cases(path, QUESTIONS)
    for words in ("line 2: the line: the key", "line 3: the line is no JSON object", "line 4: the line: NaN"):
        assert words in refused.value.message


def test_a_state_is_missing_or_everything_is(tmp_path):
    assert "holds no state" in refusal(tmp_path, {"labels": {"refund": True}})
    assert "holds no case" in refusal(tmp_path)


def test_a_level_that_is_a_number_must_not_be_taken_for_a_place(tmp_path):
    stars = {"stars": {"type": "score", "instructions": "?", "criteria": ["1", "2", "3"]}}
    assert "write the level as a text" in refusal(
        tmp_path, {"state": "", "labels": {"stars": 2}}, questions=stars
    )
    [case] = read_cases(write_lines(tmp_path / "a.jsonl", [{"state": "", "labels": {"stars": "2"}}]), stars)
    assert case.labels == {"stars": 1}
    (tmp_path / "a.csv").write_text("state,stars\nx,2\n")
    assert read_cases(tmp_path / "a.csv", stars)[0].labels == {"stars": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("state,team,refund\nx,billing,yes\n", 'no column "urgency"'),
        ("state,team,team,refund,urgency\n", 'two columns "team"'),
        ("team,refund,urgency\n", 'no column "state"'),
        ("state,team,refund,urgency\nx,billing\n", "line 2: has 2 cells"),
        ("state,team,refund,urgency\nx,billing,maybe,0\n", "line 2: labels.refund"),
        ('state,team,refund,urgency\n"x,billing,yes,0\n', "line 2"),
        ("", "no column"),
    ],
)
def test_a_table_is_read_as_strictly(tmp_path, text, words):
    (tmp_path / "cases.csv").write_text(text)
    with pytest.raises(InvalidRequest, match=words):
        read_cases(tmp_path / "cases.csv", QUESTIONS)


def test_a_table_needs_its_questions(tmp_path):
    (tmp_path / "cases.csv").write_text("state,team\n")
    with pytest.raises(InvalidRequest, match="--questions"):
        read_cases(tmp_path / "cases.csv")


def test_two_cases_of_one_state_are_two(tmp_path):
    one, two = read_cases(write_lines(tmp_path / "cases.jsonl", [LINE, LINE]), QUESTIONS)
    assert one.digest != two.digest
    moved = read_cases(write_lines(tmp_path / "other.jsonl", [LINE | {"state": "z"}, LINE]), QUESTIONS)
    assert moved[1].digest == one.digest


def test_images_are_found_beside_the_file_of_cases(tmp_path):
    line = LINE | {"images": ["a.png", "data:image/png;base64,AAAA"]}
    [case] = read_cases(write_lines(tmp_path / "cases.jsonl", [line]), QUESTIONS)
    assert case.shows["images"] == [str(tmp_path / "a.png"), "data:image/png;base64,AAAA"]


def test_a_file_of_questions_must_hold_some(tmp_path):
    path = tmp_path / "questions.json"
    for text in ("{}", "[]", '{"q": {"type": "choice"}}'):
        path.write_text(text)
        with pytest.raises(RequestError, match=r"questions\.json"):
            read_questions(path)
