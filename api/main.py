"""The process `d3serve api`."""

import socket
from collections.abc import Callable

from d3serve.api.serving import make_server
from d3serve.logs import configure_logging
from d3serve.settings import Settings
from d3serve.tracing import start_tracing


def api_main(settings: Settings, listen: Callable[[], socket.socket]) -> None:
    """Serve HTTP until a signal stops it, on the socket that `listen` opens once the settings are accepted.

    Raises:
        InvalidSettings: as for `create_app`.
        StartupError: the port is taken.
    """
    configure_logging(settings)
    start_tracing("api")
    server = make_server(settings)
    server.run(sockets=[listen()])
