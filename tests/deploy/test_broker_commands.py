"""The broker's command line in the compose file and in the manifests, run with a real server."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
import yaml

import d3serve
from d3serve.up.broker import find_server
from d3serve.up.supervisor import bind

ROOT = Path(d3serve.__file__).parents[1]


def commands() -> dict[str, list[str]]:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["broker"]["command"]
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "base" / "broker.yaml").read_text())
    [broker] = [document for document in documents if document["kind"] == "StatefulSet"]
    [container] = broker["spec"]["template"]["spec"]["containers"]
    return {"compose": [word.replace("$$", "$") for word in compose], "kubernetes": container["command"]}


@contextmanager
def running(command: list[str], folder: Path, password: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, with the server of this machine on a free port."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    text = command[-1].replace("valkey-server -", f"{find_server()} - --port {port} --bind 127.0.0.1")
    text = text.replace("/data", str(folder))
    process = subprocess.Popen(
        [*command[:-1], text],
        env={"REDISCLI_AUTH": password, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def connected(port: int, password: str) -> redis.Redis:
    client = redis.Redis(port=port, password=password, decode_responses=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(redis.ConnectionError):
            client.ping()
            return client
        time.sleep(0.02)
    raise AssertionError("the broker does not answer")


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_it_asks_for_the_password_shows_it_to_nobody_never_evicts_and_keeps_its_file(where, tmp_path):
    with running(commands()[where], tmp_path, "a0b1") as (process, port):
        with connected(port, "a0b1") as client:
            config = client.config_get("*")
        assert (config["maxmemory-policy"], config["appendonly"], config["save"]) == ("noeviction", "yes", "")
        assert int(config["maxmemory"]) == 2 * 2**30
        with redis.Redis(port=port) as nobody, pytest.raises(redis.AuthenticationError):
            nobody.ping()
        shown = Path(f"/proc/{process.pid}/cmdline")
        if shown.exists():
            assert b"valkey-server" in shown.read_bytes(), (
                "the shell has given way to it, so it gets the signals"
            )
            assert b"a0b1" not in shown.read_bytes()
    assert list(tmp_path.rglob("*.aof"))


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_without_a_password_it_does_not_start(where, tmp_path):
    with running(commands()[where], tmp_path, "") as (process, _):
        assert process.wait(30) != 0
