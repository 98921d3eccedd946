"""Which servers may hold a job table: by their version and what they do when they are full."""

import contextlib
import socketserver
import threading

import pytest

from d3serve.errors import BrokerUnavailable
from d3serve.settings import Settings
from d3serve.store.connect import check_server


def bulk(text):
    return f"${len(text)}\r\n{text}\r\n".encode()


@contextlib.contextmanager
def a_server(info, hello=b"%1\r\n$5\r\nproto\r\n:3\r\n"):
    """Something that speaks as much of the protocol as a look at it takes; its URL."""

    class Conversation(socketserver.StreamRequestHandler):
        def handle(self):
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    self.rfile.readline()
                    words.append(self.rfile.readline().strip().upper())
                replies = {
                    b"PING": b"+PONG\r\n",
                    b"HELLO": hello,
                    b"INFO": bulk("\r\n".join(f"{k}:{v}" for k, v in info.items())),
                }
                self.wfile.write(replies.get(words[0], b"+OK\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Conversation) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Settings(redis_url=f"redis://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


OLD = {"redis_version": "6.2.14", "maxmemory_policy": "noeviction"}


@pytest.mark.parametrize("may_be_away", [False, True])
def test_an_old_redis_is_refused_by_name(may_be_away):
    with (
        a_server(OLD) as settings,
        pytest.raises(BrokerUnavailable, match=r"Redis 6\.2\.14 at .* too old.*7\.0"),
    ):
        check_server(settings, may_be_away=may_be_away)


@pytest.mark.parametrize("may_be_away", [False, True])
def test_one_so_old_that_it_knows_no_hello_is_too(may_be_away):
    unknown = b"-ERR unknown command `HELLO`, with args beginning with: `3`, \r\n"
    with (
        a_server({"redis_version": "5.0.14"}, unknown) as settings,
        pytest.raises(BrokerUnavailable, match="is too old"),
    ):
        check_server(settings, patience_s=0, may_be_away=may_be_away)


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"redis_version": "7.0.0"}, "Redis 7.0.0"),
        ({"redis_version": "10.2.1"}, "Redis 10.2.1"),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"}, "Valkey 9.1.2"),
    ],
)
def test_newer_ones_and_valkey_are_taken(info, name):
    with a_server(info | {"maxmemory_policy": "noeviction"}) as settings:
        assert check_server(settings) == f"{name} at {settings.redis_url}/0"


@pytest.mark.parametrize("may_be_away", [False, True])
def test_one_that_evicts_is_refused(may_be_away):
    info = {"redis_version": "7.4.1", "maxmemory_policy": "allkeys-lru"}
    with a_server(info) as settings, pytest.raises(BrokerUnavailable, match="would evict waiting jobs"):
        check_server(settings, may_be_away=may_be_away)


def test_one_that_is_away_is_waited_for_by_whoever_can():
    nowhere = Settings(redis_url="redis://127.0.0.1:1")
    assert "nobody yet" in check_server(nowhere, patience_s=0, may_be_away=True)
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        check_server(nowhere, patience_s=0)


def test_a_real_one_is_fit(redis_url):
    assert check_server(Settings(redis_url=redis_url)).startswith(("Valkey ", "Redis "))
