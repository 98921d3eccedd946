"""`d3serve evaluate` as it is run: against a served API with an engine that knows one answer."""

import json
import signal
import subprocess
import sys

import pytest
import warm
from making import write_lines
from typer.testing import CliRunner

from d3serve.client import Client
from d3serve.commands import extras
from d3serve.commands.main import app
from d3serve.errors import InvalidRequest
from d3serve.evaluation.judged import read_results

QUESTION = {"type": "noul", "instructions": "x"}


@pytest.fixture
def cases(tmp_path, request):
    if "worker" in request.fixturenames or "service" in request.fixturenames:
        request.getfixturevalue("worker").show_itself(
            revision=None
        )  # jobs of a revision are not for every worker
    lines = [
        {"state": f"s{n}", "id": n, "questions": {"q": QUESTION}, "labels": {"q": n % 4 != 0}}
        for n in range(12)
    ]
    return write_lines(tmp_path / "cases.jsonl", lines)


def evaluated(*arguments):
    """The command in this process, and its report; the API beside it logs to the same output."""
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if "--json" not in arguments or done.exit_code not in {0, 1} or "{\n" not in done.stdout:
        return done, None
    return done, json.loads(done.stdout[done.stdout.index("{\n") :])


def kept_file(folder):
    [kept] = folder.glob("cases.answers-*.jsonl")
    return kept


def test_answers_are_measured_and_asked_once(cases, service, take_turns, worker):
    with take_turns():
        done, told = evaluated(cases, "--json", "--url", service)
        assert done.exit_code == 0, done.output
        assert told["figures"][0]["accuracy"]["part"] == 9
        assert told["answers"]["models"] == [worker.model.full_name]
    done, again = evaluated(cases, "--json", "--url", service)  # nobody would answer now
    assert again == told


def test_a_run_that_was_killed_is_taken_up(cases, service, take_turns, worker):
    command = [sys.executable, "-m", "d3serve", "evaluate", str(cases), "--url", service, "--at-once", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        while not (turn := worker.claim()).jobs:
            assert run.poll() is None
        worker.finish(turn)
        while not any(read_results(file) for file in cases.parent.glob("cases.answers-*.jsonl")):
            assert run.poll() is None
        run.send_signal(signal.SIGKILL)
    before = len(read_results(kept_file(cases.parent)))
    assert 0 < before < 12
    with take_turns():
        done, told = evaluated(cases, "--json", "--url", service)
    assert done.exit_code == 0, done.output
    assert len(told["answers"]["judged"]) == 12
    assert worker.turns._table.client.zcard(worker.turns._key("jobs", "public")) == 12


def test_other_weights_of_the_same_name_are_asked_anew(cases, service, take_turns, worker):
    with take_turns():
        evaluated(cases, "--url", service)
        worker.show_itself(identity="trained again", revision=None)
        with Client(service) as client:
            while client.models()[0]["identity"] != "trained again":  # the API remembers them for a second
                pass
        done, _ = evaluated(cases, "--json", "--url", service)
        assert done.exit_code == 0, done.output
    assert len(list(cases.parent.glob("cases.answers-*.jsonl"))) == 2
    assert worker.turns._table.client.zcard(worker.turns._key("jobs", "public")) == 24


def test_a_case_that_cannot_be_answered_is_left_out_and_told(cases, service, take_turns):
    lines = [json.loads(line) for line in cases.read_text().splitlines()]
    lines[4]["state"] = 7  # no state: the server refuses it
    write_lines(cases, lines)
    with take_turns():
        done, told = evaluated(cases, "--json", "--url", service)
    assert done.exit_code == 1
    assert told["answers"]["missing"] == ["4: invalid_request"]
    assert told["figures"][0]["accuracy"]["whole"] == 11


def test_an_earlier_report_and_an_answers_file_are_compared_with(cases, service, take_turns):
    with take_turns():
        _, first = evaluated(cases, "--json", "--url", service)
    earlier = cases.parent / "earlier.json"
    earlier.write_text(json.dumps(first))
    for other in (earlier, kept_file(cases.parent)):
        done, told = evaluated(cases, "--json", "--url", service, "--against", other)
        assert done.exit_code == 0, done.output
        assert told["against"]["verdict"] == "no difference: both give the same answers"


def test_another_server_is_asked_itself(cases, service, take_turns):
    same = service.replace("127.0.0.1", "localhost")
    with take_turns():
        done, told = evaluated(cases, "--json", "--url", service, "--against", same)
    assert done.exit_code == 0, done.output
    assert told["against"]["verdict"] == "no difference: both give the same answers"
    assert (told["against"]["first"], told["against"]["second"]) == (service, same)
    assert len(list(cases.parent.glob("cases.answers-*.jsonl"))) == 2


def test_a_page_that_cannot_be_written_is_told(cases, service, take_turns):
    with take_turns():
        done, _ = evaluated(cases, "--url", service, "--html", cases.parent / "none" / "page.html")
    with pytest.raises(InvalidRequest, match="cannot write"):
        raise done.exception


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cost", "cheap"], "as in 5:1"),
        (["--questions", "none.json"], "cannot read none.json"),
        (["--against", "none.json"], "cannot read none.json"),
        (["--url", "http://127.0.0.1:1"], "Start a server"),
    ],
)
def test_wrong_usage_is_told_in_one_line_before_anything_is_asked(cases, arguments, words):
    done = warm.d3serve("evaluate", str(cases), *arguments)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert words in line


def test_a_missing_extra_is_named_in_one_line(cases, monkeypatch, capsys):
    monkeypatch.setitem(extras.EXTRA_OF, "no_such_library", "eval")
    monkeypatch.setattr(sys, "argv", ["d3serve", "evaluate", str(cases)])
    from d3serve.commands.main import main

    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "pip install 'd3serve[eval]'" in capsys.readouterr().err


def test_the_command_line_loads_without_the_extra():
    code = (
        "import sys, d3serve.commands.main;"
        "found = {'numpy', 'scipy', 'sklearn', 'matplotlib', 'narwhals', 'pandas'} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
