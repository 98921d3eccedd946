"""What the command line hands to the processes that it starts."""

import socket
from typing import Any

import pytest
import uvicorn

from d3serve import cli
from d3serve.supervisor import bind


def test_the_api_serves_an_inherited_descriptor_as_the_tcp_socket_that_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken for a unix socket it would go without TCP_NODELAY, and each keep-alive answer would wait 40 ms."""
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda _self, sockets=None: served.extend(sockets or []))
    monkeypatch.setattr(cli, "configure_logging", lambda _settings: None)
    with bind("127.0.0.1", 0) as listener:
        cli.api(redis_url="redis://127.0.0.1:1", fd=listener.detach())
    with served[0] as inherited:
        assert inherited.family == socket.AF_INET
