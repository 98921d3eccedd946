"""One guarded POST: the connection goes to an address that was judged, never to a name, never through a proxy."""

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpcore

from d3serve.egress import EgressPolicy
from d3serve.errors import InvalidRequest

MAX_REPLY_BYTES: Final = 4 * 1024  # enough for a reason in the log; a receiver cannot fill our memory


@dataclass(frozen=True)
class Reply:
    """What a receiver said."""

    status: int
    retry_after: str | None


class SendFailed(Exception):
    """No reply: the message says why, in words for the delivery log."""


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Resolves, judges every address, connects to the first that answers; TLS still names the host."""

    def __init__(self, policy: EgressPolicy) -> None:
        self._policy = policy
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface, here and below
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection, or raise InvalidRequest before any packet leaves."""
        last: Exception = httpcore.ConnectError(f"{host} does not resolve")
        for address in await self._policy.resolve(host, port):
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: no URL leads to a socket file."""
        raise httpcore.ConnectError(path)

    async def sleep(self, seconds: float) -> None:
        """Wait between httpcore's own tries."""
        await self._inner.sleep(seconds)


class Outbound:
    """POSTs to receivers. No redirect is followed; each call opens its own connection and is judged anew."""

    def __init__(self, policy: EgressPolicy, timeout_s: float) -> None:
        self._policy = policy
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Send `body`.

        Raises:
            SendFailed: the address is not allowed, nobody answered in time, or the reply is no HTTP.
        """
        try:
            self._policy.check_url(url)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(url, headers, body)
        except InvalidRequest as error:
            raise SendFailed(f"refused: {error.message}") from None
        except TimeoutError:
            raise SendFailed(f"no answer within {self._timeout_s:g} s") from None
        except (OSError, ssl.SSLError, httpcore.NetworkError, httpcore.TimeoutException) as error:
            raise SendFailed(f"cannot connect: {type(error).__name__} {error}"[:200]) from None
        except httpcore.ProtocolError as error:
            raise SendFailed(f"the receiver does not speak HTTP: {error}"[:200]) from None

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        sent = {"Host": urlsplit(url).netloc, "Connection": "close", **headers}
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=GuardedBackend(self._policy), max_connections=1
        )
        async with pool, pool.stream("POST", url, headers=list(sent.items()), content=body) as response:
            read = 0
            async for part in response.aiter_stream():
                read += len(part)
                if read > MAX_REPLY_BYTES:
                    break
            found = [value for name, value in response.headers if name.lower() == b"retry-after"]
            return Reply(response.status, found[0].decode("latin-1") if found else None)
