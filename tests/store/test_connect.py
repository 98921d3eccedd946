"""Which replies of Redis mean "not now", and what a client is told of them."""

import pytest
import redis
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from d3serve.errors import StorageUnavailable
from d3serve.store.connect import NotNow, connection_class, storage_errors

NOT_NOW = {
    "MISCONF Errors writing to the AOF file: No space left on device": "MISCONF",
    "MISCONF Errors writing to the AOF file: x script: 5f2, on @user_script:30.": "MISCONF",
    "ERR Error running script (call to f_5f2): @user_script:30: -MISCONF Redis is configured to": "MISCONF",
    "NOREPLICAS Not enough good replicas to write.": "NOREPLICAS",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": "UNBLOCKED",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": "BUSY",
    "READONLY You can't write against a read only replica.": "ReadOnlyError",
    "MASTERDOWN Link with MASTER is down": "MasterDownError",
    "CLUSTERDOWN Hash slot not served": "ClusterDownError",
    "TRYAGAIN Multiple keys request during rehashing of slot": "TryAgainError",
}
AWAY = {
    "LOADING Redis is loading the dataset in memory": "BusyLoadingError",
    "NOAUTH Authentication required.": "AuthenticationError",
    "WRONGPASS invalid username-password pair or user is disabled.": "AuthenticationError",
    "ERR max number of clients reached": "ConnectionError",
    "NOPERM this user has no permissions to run the 'evalsha' command": "NoPermissionError",
    "EXECABORT Transaction discarded because of previous errors.": "ExecAbortError",
    "OOM command not allowed when used memory > 'maxmemory'.": "full",
}
BUGS = [
    "ERR unknown command",
    "WRONGTYPE Operation against a key",
    "BUSYGROUP Consumer Group name",
]


def reads(monkeypatch, reply):
    def refuse(*_, **__):
        raise BaseParser.parse_error(reply)

    monkeypatch.setattr(redis.Connection, "read_response", refuse)
    connection_class("redis")().read_response()


@pytest.mark.parametrize(("reply", "word"), [*NOT_NOW.items(), *AWAY.items()])
def test_what_may_pass_is_a_storage_that_is_unavailable(monkeypatch, reply, word):
    with pytest.raises(StorageUnavailable) as told, storage_errors():
        reads(monkeypatch, reply)
    assert told.value.message.split()[-1] == word, (
        "no more of it: what a server says of itself is not for clients"
    )


@pytest.mark.parametrize("reply", NOT_NOW)
async def test_what_may_pass_is_a_lost_connection(monkeypatch, reply):
    with pytest.raises(NotNow):
        reads(monkeypatch, reply)

    async def refuse(*_, **__):
        raise BaseParser.parse_error(reply)

    monkeypatch.setattr(redis.asyncio.Connection, "read_response", refuse)
    with pytest.raises(NotNow):
        await connection_class("redis", asynchronous=True)().read_response()


@pytest.mark.parametrize("reply", BUGS)
def test_a_bug_is_none_of_it(monkeypatch, reply):
    with pytest.raises(ResponseError), storage_errors():
        reads(monkeypatch, reply)


pytestmark = pytest.mark.anyio
