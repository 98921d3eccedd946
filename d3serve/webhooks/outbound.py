"""One guarded POST: the connection goes to an address that was judged, never to a name, never through a proxy."""

import asyncio
import contextlib
import ipaddress
import ssl
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpcore

from d3serve.errors import InvalidRequest
from d3serve.webhooks.egress import OPENED_BY, Destination, EgressPolicy
from d3serve.webhooks.names import CROWDED_S, TIMEOUT_S, Names, TryLater

PER_ADDRESS: Final = (
    16  # connections of a tenant to one address: many names may lead to one that is not theirs
)
MAX_REPLY_BYTES: Final = 4 * 1024  # read out of courtesy; a receiver cannot hold us with more


@dataclass(frozen=True)
class Reply:
    """What a receiver said."""

    status: int
    retry_after: str | None


class SendFailed(Exception):
    """No reply: the message says why, in words for the delivery log."""


class JudgedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to the first address that answers, whatever the name says by now; TLS still names the host."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection."""
        last: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in self._addresses:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last

    async def sleep(self, seconds: float) -> None:
        """Wait between httpcore's own tries."""
        await self._inner.sleep(seconds)


class Outbound:
    """POSTs to receivers. No redirect is followed; each call opens its own connection and is judged anew."""

    def __init__(self, policy: EgressPolicy, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._policy = policy
        self._names = Names()
        self._open: Counter[tuple[str, str]] = Counter()
        self._tls = ssl.create_default_context()

    async def post(self, tenant: str, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Send `body` for a tenant.

        Raises:
            SendFailed: the address is not allowed, nobody answered in time, or the reply is no HTTP.
            TryLater: its name or its address has enough of this tenant for now, so nothing was sent.
        """
        try:
            addresses = await self._addresses(tenant, self._policy.check_url(url))
            with self._place(tenant, addresses[0]):
                async with asyncio.timeout(self.timeout_s):
                    return await self._post(url, addresses, headers, body)
        except InvalidRequest as error:
            raise SendFailed(f"refused: {error.message}") from None
        except TimeoutError:
            raise SendFailed(f"no answer within {self.timeout_s:g} s") from None
        except (OSError, ssl.SSLError, httpcore.NetworkError, httpcore.TimeoutException) as error:
            raise SendFailed(f"cannot connect: {type(error).__name__} {error}"[:200]) from None
        except httpcore.ProtocolError as error:
            raise SendFailed(f"the receiver does not speak HTTP: {error}"[:200]) from None

    @contextlib.contextmanager
    def _place(self, tenant: str, address: str) -> Iterator[None]:
        if self._open[tenant, address] >= PER_ADDRESS:
            raise TryLater(CROWDED_S)
        self._open[tenant, address] += 1
        try:
            yield
        finally:
            self._open[tenant, address] -= 1
            self._open += Counter()  # forgets who has none

    async def _addresses(self, tenant: str, to: Destination) -> list[str]:
        """The addresses to try, all of them allowed; a name that leads inside and one that leads nowhere look alike."""
        if to.address is not None:
            return [str(to.address)]
        try:
            found = await self._names.addresses(tenant, to.host, to.port)
        except TimeoutError:
            raise SendFailed(f"the name {to.host} did not resolve within {TIMEOUT_S:g} s") from None
        except OSError:
            found = []
        judged = [ipaddress.ip_address(one.partition("%")[0]) for one in found]
        if not judged or not all(self._policy.allows(one, secure=to.secure) for one in judged):
            raise SendFailed(
                f"refused: the name {to.host} leads to no address that webhooks may reach; {OPENED_BY}"
            )
        return found

    async def _post(
        self, url: str, addresses: Sequence[str], headers: Mapping[str, str], body: bytes
    ) -> Reply:
        sent = {"Host": urlsplit(url).netloc, "Connection": "close", **headers}
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=JudgedAddresses(addresses), max_connections=1
        )
        async with pool, pool.stream("POST", url, headers=list(sent.items()), content=body) as response:
            read = 0
            async for part in response.aiter_stream():
                read += len(part)
                if read > MAX_REPLY_BYTES:
                    break
            found = [value for name, value in response.headers if name.lower() == b"retry-after"]
            return Reply(response.status, found[0].decode("latin-1") if found else None)
