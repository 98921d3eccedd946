"""`d3serve submit` as a process of its own: in a pipe, and with many lines."""

import json
import subprocess

import pytest
from submissions import NOUL, command

DONE = {
    "id": "job_1", "status": "succeeded", "done": True, "attempt": 1,
    "result": {"answers": {"q": {"type": "noul", "noul": 0.5}}, "usage": {"questions": 1, "input_tokens": 20}},
}  # fmt: skip


async def answers(scope, receive, send):
    """An API that has answered as soon as it is asked."""
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        body = json.dumps({"status": "ok"} if scope["path"] == "/healthz" else DONE).encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_a_table_from_standard_input_is_answered_on_standard_output(service, take_turns):
    table = "custom_id,state\na,one\nb,two\n"
    pipe = command(("-", "-"), service, "--csv", "--yes-no", "Is it spam?")
    with take_turns():
        done = subprocess.run(pipe, input=table, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {name: row["line"] for name, row in rows.items()} == {"a": 2, "b": 3}
    assert rows["a"]["result"]["answers"]["Is it spam?"]["noul"] == 0.75


def test_the_rows_are_in_order_too_where_a_pipe_ends_in_a_file(service, take_turns, tmp_path):
    lines = "".join(json.dumps({"state": f"s{i}", "questions": {"q": NOUL}}) + "\n" for i in range(20))
    with take_turns():
        done = subprocess.run(
            command(("-", tmp_path / "out"), service, "--in-order"),
            input=lines, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        refused = subprocess.run(
            command(("-", "-"), service, "--in-order"),
            input=lines, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    numbers = [json.loads(row)["line"] for row in (tmp_path / "out").read_text().splitlines()]
    assert numbers == list(range(1, 21))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--in-order needs an --out that is a file" in refused.stderr


# `ru_maxrss` of a child begins with that of its parent, so it tells its own peak.
TELLS_PEAK = """
import sys
from d3serve.commands.main import main
try:
    main()
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_more_lines_take_hardly_more_memory(serving, tmp_path):
    """What waits, what was asked and what was answered stays in files: in memory is an index."""
    peaks = []
    with serving(answers) as url:
        for count in (100, 600):
            requests, out = tmp_path / f"{count}.jsonl", tmp_path / f"{count}.out"
            with requests.open("w") as file:
                for number in range(count):
                    line = {"custom_id": str(number), "state": "x" * 100_000, "questions": {"q": NOUL}}
                    file.write(json.dumps(line) + "\n")
            python, _, _, *arguments = command((requests, out), url, "--in-order", "--at-once", "16")
            done = subprocess.run(
                [python, "-c", TELLS_PEAK, *arguments],
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert out.read_bytes().count(b"\n") == count
            peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 20, f"MiB at most: {peaks}; 500 lines are 48 MiB"
