"""What `ask` and its siblings print: any answer, in any encoding, on a pipe or a full disk, whole or told as lost."""

import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import d3serve
from d3serve.commands import ask
from d3serve.commands.questions import read_object
from d3serve.commands.terminal import plain, screen
from d3serve.errors import D3ServeError, InvalidRequest

NAMES = ["Is :key: leaked?", "日本語の質問", "x" * 300, "[/x] \x1b]0;PWN\x07", "a\u2028b\u202ec", "🔑 é"]
USAGE = {"input_tokens": 1, "computed_tokens": 1, "state_tokens": 1, "state_cached": False}
JOB = {
    "id": "job_1", "status": "succeeded", "done": True, "attempt": 1,
    "result": {
        "model": "m:smile:", "usage": USAGE,
        "answers": {
            name: {"type": "choice", "choice": name, "probabilities": {name: 1.0}, "confidence": 1.0} for name in NAMES
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server that has one finished job, whatever is asked."""

    class Finished(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            kind, text = "application/json", json.dumps(JOB)
            if self.path.endswith("/events"):
                kind, text = "text/event-stream", "event: done\ndata: null\n\n"
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = answer  # noqa: N815 - the library's spelling

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Finished)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(*arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **env: str) -> Any:
    command = [sys.executable, "-m", "d3serve", *arguments]
    # Unbuffered, nothing would be left to be written when the process ends.
    clean = {n: v for n, v in os.environ.items() if not n.startswith("D3SERVE_") and n != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stdout=stdout, stderr=stderr, check=False, timeout=60, env=clean | env)


def asked(server: str, *more: str, **options: Any) -> Any:
    return run("ask", "--state", "x", "--yes-no", "y", "--url", server, *more, **options)


def test_a_table_that_is_no_terminal_cuts_and_changes_nothing(server: str) -> None:
    done = asked(server, COLUMNS="40")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "m:smile:" in out
    for name in NAMES[:3] + NAMES[5:]:
        assert out.count(f" {name} ") == 2, name
    assert out.count(r"[/x] \x1b]0;PWN\x07") == 2
    assert out.count(r"a\u2028b\u202ec") == 2


def test_a_terminal_shows_every_letter_too() -> None:
    for name in NAMES:
        narrow = Console(file=io.StringIO(), width=60, emoji=False, force_terminal=True, color_system=None)
        answers = {name: JOB["result"]["answers"][name]}  # type: ignore[index]
        ask.show(
            {"status": "succeeded", "result": {"model": "m", "usage": USAGE, "answers": answers}}, narrow
        )
        text = narrow.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
        assert text.count("x") >= 2 * name.count("x")


ENCODINGS = [
    {"PYTHONIOENCODING": "cp1252"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "cp932"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.parametrize("env", ENCODINGS, ids=lambda env: "-".join(env.values()))
def test_a_letter_that_the_encoding_lacks_is_shown_by_its_code(env: dict[str, str], server: str) -> None:
    done = asked(server, **env)
    assert (done.returncode, done.stderr) == (0, b"")
    encoding = env.get("PYTHONIOENCODING", "ascii")
    for name in NAMES[1], NAMES[5]:
        assert done.stdout.count(name.encode(encoding, "backslashreplace")) == 2
    done = asked(server, "--json", **env)
    assert json.loads(done.stdout.decode("ascii")) == JOB
    assert run("ask", "--help", **env).returncode == 0


def test_json_is_the_job_as_the_api_tells_it(server: str) -> None:
    done = asked(server, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == JOB
    assert NAMES[1].encode() in done.stdout, "readable where it can be"


def everything_that_prints(server: str) -> list[list[str]]:
    question = ["ask", "--state", "x", "--yes-no", "y", "--url", server]
    return [question, [*question, "--json"], ["models"], ["--version"]]


def test_an_output_on_a_full_disk_is_one_line(server: str) -> None:
    for arguments in everything_that_prints(server):
        with Path("/dev/full").open("wb") as full:
            done = run(*arguments, stdout=full)
        assert done.returncode == 2, arguments
        assert done.stderr == b"error cannot write the output: No space left on device\n"


def test_a_reader_that_goes_away_ends_the_command_quietly(server: str) -> None:
    for arguments in everything_that_prints(server):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = run(*arguments, stdout=writing)
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (1, b""), arguments


def test_a_message_that_cannot_be_written_is_lost_and_nothing_else(server: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = asked(server, "--json", stderr=full)
        assert (done.returncode, json.loads(done.stdout)) == (0, JOB)
        assert asked("http://127.0.0.1:9", stderr=full).returncode == 2


def test_an_error_shows_what_it_names_letter_for_letter() -> None:
    done = run("ask", "[red]:key:\x1b]0;PWN\x07\nx")
    assert done.stderr == b"error cannot read [red]:key:\\x1b]0;PWN\\x07\\nx: No such file or directory\n"


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "नमस्ते", "e\u0301", "שלום", "[a][b]"])
def test_what_belongs_to_a_text_is_left_in_it(text: str) -> None:
    shown = io.StringIO()
    screen(shown).print(plain(text))
    assert shown.getvalue() == f"{text}\n"


def test_the_version_is_told() -> None:
    assert run("--version").stdout.decode() == f"d3serve {d3serve.__version__}\n"


CHOICES = {
    "When does it open?: 9:30 | 10:30 | later": ("When does it open?", ["9:30", "10:30", "later"]),
    "Which file?: C:\\new | D:\\old | none": ("Which file?", ["C:\\new", "D:\\old", "none"]),
    "Which site?: http://a.b:80/x | https://c.d": ("Which site?", ["http://a.b:80/x", "https://c.d"]),
    "Which ratio: 1:2 | 2:1": ("Which ratio", ["1:2", "2:1"]),
    "Is it open at 9:30: yes | no": ("Is it open at 9:30", ["yes", "no"]),
    "Which?: a | b: c | d: e": ("Which?", ["a", "b: c", "d: e"]),
    "どのチーム？：請求 | 配送": ("どのチーム？", ["請求", "配送"]),
    "Quelle équipe ? : achats|ventes": ("Quelle équipe ?", ["achats", "ventes"]),
    "Which address?:\n::1 | fe80::1": ("Which address?", ["::1", "fe80::1"]),
    r"Which ratio\: a or b: 1\: 2 | 2\: 1": ("Which ratio: a or b", ["1: 2", "2: 1"]),
    r"Severity: P1\: outage | P2: slow": ("Severity", ["P1: outage", "P2: slow"]),
    r"Which sign?: \| | \\ | a\|b": ("Which sign?", ["|", "\\\\", "a|b"]),
}

REFUSED = {
    "Severity?: P1: outage | degraded | fine": "any of 2 colons",
    "Which team?: billing: charges, refunds | shipping": "any of 2 colons",
    "Note: is it spam?: yes | no": "any of 2 colons",
    "比率：1：2 | 2：1": "any of 2 colons",
    "We open at 9:30 | 10:30": "write 'question: option",
    "Is A | B right: yes | no": "write 'question: option",
    "Which?:a | b": "write 'question: option",
    "Which one": "write 'question: option",
    "Which one:": "write 'question: option",
    "Which one: a": "write 'question: option",
    "Which one: | a": "is empty",
    "Which one: a | ": "is empty",
    "Which one: a || b": "is empty",
    "Yes?: yes | yes | no": "stands twice",
    ": a | b": "a question is empty",
    "": "write 'question: option",
}


@pytest.mark.parametrize("flag", ["choice", "score"])
@pytest.mark.parametrize("text", CHOICES)
def test_the_question_that_was_written_is_the_one_that_is_asked(flag: str, text: str) -> None:
    asked = {"choice": (), "score": ()} | {flag: (text,)}
    ((name, question),) = ask.build_request("x", (), **asked)["questions"].items()
    assert (name, list(question["criteria"])) == CHOICES[text]
    assert question["instructions"] == name


@pytest.mark.parametrize("flag", ["choice", "score"])
@pytest.mark.parametrize("text", REFUSED)
def test_a_question_that_could_be_another_is_refused(flag: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=REFUSED[text]):
        ask.build_request("x", (), **({"choice": (), "score": ()} | {flag: (text,)}))


def test_the_explicit_way_that_a_refusal_names_asks_that_question() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask.build_request("x", (), ("Don't?: P1: [x] é | fine",), ())
    echo = subprocess.run(
        ["sh", "-c", "printf %s " + caught.value.message.split("--questions ")[1]],
        capture_output=True,
        check=True,
    )
    questions = ask.build_request("x", (), (), (), echo.stdout.decode())["questions"]
    assert questions == {
        "Don't?": {"type": "choice", "criteria": {"P1: [x] é": None, "fine": None}, "instructions": "Don't?"}
    }


def test_questions_may_stand_in_a_file_and_a_byte_order_mark_before_them(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('\ufeff{"spam": {"type": "noul"}}')
    asked = ask.build_request("x", (), (), (), str(tmp_path / "q.json"))
    assert asked["questions"] == {"spam": {"type": "noul"}}
    with pytest.raises(InvalidRequest, match="cannot read"):
        ask.build_request("x", (), (), (), str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', "[]", "{", "[" * 5000, '{"a": NaN}', '{"a": "\\ud800"}']
)
def test_json_is_read_as_strictly_as_the_api_reads_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(text)
    with pytest.raises(D3ServeError, match="holds no JSON"):
        read_object(tmp_path / "request.json", field="request")
    with pytest.raises(D3ServeError, match="holds no JSON"):
        ask.build_request("x", (), (), (), text)


def test_a_key_is_read_from_a_file_and_a_bad_one_is_one_line(server: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("d3k_x\n")
    assert asked(server, D3SERVE_API_KEY_FILE=str(key)).returncode == 0
    for text in ("d3k_x\nd3k_y", "d3k_é"):
        key.write_text(text)
        done = asked(server, "--api-key-file", str(key))
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
        assert b"the API key holds" in done.stderr
    assert b"cannot read the API key" in asked(server, "--api-key-file", str(tmp_path)).stderr


def test_a_server_that_is_not_there_is_told_with_the_command_that_starts_one() -> None:
    done = asked("http://127.0.0.1:9")
    assert done.returncode == 2
    assert b"no answer from http://127.0.0.1:9" in done.stderr
    assert b"d3serve up" in done.stderr
