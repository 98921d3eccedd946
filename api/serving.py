"""One API process: the application behind uvicorn, on connections with bounds, with an end that nobody waits for."""

import functools
import gc
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from d3serve.api.app import create_app
from d3serve.api.bounded_connection import BoundedConnection
from d3serve.api.connections import Connections, connections_allowed
from d3serve.settings import Settings

YOUNG_OBJECTS = 10_000  # requests under way hold more than 700, at which Python looks for garbage
STOP_WAITERS_S = 5  # what still runs then has been told to end, or cannot be told: a body that comes slowly


class GracefulServer(uvicorn.Server):
    """uvicorn, except that waiting calls are answered when the process is told to stop, and not cut off later."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wake whoever waits, then stop as uvicorn does."""
        self._app.state.parts.store.release_waiters()
        await super().shutdown(sockets)


def make_server(settings: Settings) -> GracefulServer:
    """The server of an API process, ready to run.

    Raises:
        InvalidSettings: as for `create_app`.
    """
    app = create_app(settings)
    http: Any = functools.partial(  # uvicorn names a class, and only calls it
        BoundedConnection,
        open_connections=Connections(connections_allowed()),
        max_body_bytes=settings.max_body_bytes,
    )
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",  # it would take the connection over, and read it without bounds
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_WAITERS_S,
    )
    config.load()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.freeze()  # what is loaded by now stays: looking through it for garbage stopped every request for 40 ms at a time
    return GracefulServer(config, app)
