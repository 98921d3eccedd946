"""The process `d3serve api`."""

import socket

from d3serve.api.serving import make_server
from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.up import supervisor


def api_main(settings: Settings, *, fd: int | None = None) -> None:
    """Serve HTTP on the listening socket `fd`, or on one of its own, until a signal stops it.

    Raises:
        InvalidSettings: as for `create_app`.
        StartupError: the port is taken.
    """
    configure_logging(settings)
    server = make_server(settings)
    # As a socket, not `fd=`: uvicorn takes a descriptor for a unix one, and without TCP_NODELAY answers wait 40 ms.
    listener = socket.socket(fileno=fd) if fd is not None else supervisor.bind(settings.host, settings.port)
    server.run(sockets=[listener])
