"""A server on this host that says of each path whether it has it, and nothing else."""

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def answering(path: str, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server that has `path` alone; every answer carries `headers`."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == path else 404)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
