"""An API that is told to stop answers whoever waits, at once, and never with a 500."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from d3serve.commands.descriptors import ENOUGH
from d3serve.up.supervisor import listening

pytestmark = pytest.mark.anyio
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


@pytest.fixture
def api(settings, request):
    """An API process without a worker, and its address; ended with the test."""
    with listening("127.0.0.1", 0, 1) as (listener,):
        number = listener.fileno()
        env = os.environ | settings.model_copy(update={"log_level": "warning"}).to_env()
        command = [
            sys.executable,
            "-m",
            "d3serve",
            "api",
            "--fd",
            str(number),
            *getattr(request, "param", []),
        ]
        process = subprocess.Popen(command, env=env, pass_fds=(number,), stderr=subprocess.PIPE, text=True)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        httpx.get(f"{address}/healthz", timeout=60)  # the socket listens already: it waits in its queue
        yield process, address
    finally:
        process.kill()
        process.communicate()


async def _stream(client, path, begun):
    """The lines of an event stream, to its end."""
    lines = []
    async with client.stream("GET", path, headers={"Accept": "text/event-stream"}) as answer:
        async for line in answer.aiter_lines():
            begun.set()
            lines.append(line)
        return answer.status_code, lines


def _stalled(address):
    """A request whose body does not come."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    return connection


def _rest(connection):
    """All that comes until the server closes."""
    received = b""
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(60)
        while part := connection.recv(2**16):
            received += part
    return received


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_whoever_waits_is_answered_when_the_signal_comes(stop, api):
    """Twelve calls of each kind got a bare 500 after 5 s, on every deploy."""
    process, address = api
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        job = (await client.post("/v1/jobs", json=BODY)).json()
        path = job["urls"]["self"]
        polls = [
            asyncio.create_task(client.get(path, params={"wait": 30})),
            asyncio.create_task(client.get(path, params={"wait": 30, "include": "result"})),
        ]
        submits = [asyncio.create_task(client.post("/v1/jobs", json=BODY, headers={"Prefer": "wait=30"}))]
        calls = [
            asyncio.create_task(client.post("/v1/systemone", json=BODY)),
            asyncio.create_task(client.post("/v1/systemone", json=BODY, headers={"Prefer": "wait=30"})),
            asyncio.create_task(client.post("/v1/decisions", json=BODY)),
        ]
        begun = asyncio.Event()
        stream = asyncio.create_task(_stream(client, job["urls"]["events"], begun))
        await begun.wait()
        while len((await client.get("/v1/jobs")).json()["data"]) < 4:  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # all of them wait by now; one that comes too late is refused a connection
        process.send_signal(stop)
        answers = await asyncio.gather(*polls, *submits, *calls)
        status, lines = await stream
    assert [one.status_code for one in answers] == [200, 200, 202, 503, 503, 503]
    assert {one.json()["status"] for one in answers[:3]} == {"queued"}
    for answer in answers[3:]:
        assert answer.json()["code"] == "shutting_down"
        assert int(answer.headers["retry-after"]) >= 0
    assert status == 200
    assert "event: queued" in lines
    _, errors = await asyncio.to_thread(process.communicate, None, 60)
    assert "Traceback" not in errors
    assert "Exception in ASGI" not in errors


async def test_a_request_that_cannot_end_in_time_is_told_to_come_back(api):
    process, address = api
    connection = await asyncio.to_thread(_stalled, address)
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    received = await asyncio.to_thread(_rest, connection)
    assert received.startswith(b"HTTP/1.1 503")
    assert b"shutting_down" in received
    _, errors = await asyncio.to_thread(process.communicate, None, 60)
    assert "Exception in ASGI" not in errors


def test_processes_may_open_as_many_files_as_they_are_allowed_to():
    """256 is what macOS starts with, and 1,024 elsewhere."""
    shell = 'ulimit -Sn 256; exec "$@"'
    code = (
        "import resource, sys; sys.argv[1:] = ['models']\n"
        "from d3serve.commands.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    soft, hard = map(int, done.stdout.split()[-2:])
    assert soft == min(hard, ENOUGH)
