"""Where this service may connect to on a client's word: public addresses, and those that the operator allows.

A name is judged by every address that it resolves to, and the connection then goes to a judged address, not
to the name again. Link-local addresses (cloud metadata among them) are never allowed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import SplitResult, urlsplit

from d3serve.errors import InvalidRequest, InvalidSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

RESOLVE_TIMEOUT_S: Final = 5.0
RESOLVERS: Final = 32
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
# Link-local, and the metadata services of AWS and Azure that have an address elsewhere.
NEVER: Final = tuple(
    map(ipaddress.ip_network, ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "168.63.129.16/32"))
)


class EgressPolicy:
    """Judges URLs and addresses; `allowed` are networks reachable although they are not public."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        """Read the networks in CIDR form.

        Raises:
            InvalidSettings: one of them is no network.
        """
        try:
            self._allowed: tuple[Network, ...] = tuple(ipaddress.ip_network(one) for one in allowed)
        except ValueError as error:
            raise InvalidSettings(f"D3SERVE_WEBHOOK_ALLOW: {error}", field="webhook_allow") from None
        # A name server that never answers holds a thread for half a minute: not one that others wait for.
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolver")

    def check_url(self, url: str) -> SplitResult:
        """The parts of a URL that may be called as far as its text tells.

        Raises:
            InvalidRequest: not https (http where private networks are allowed), credentials, a port of
                another service, or no host.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"not a URL: {error}", field="url") from None
        schemes = ("https", "http") if self._allowed else ("https",)
        if parts.scheme not in schemes:
            raise InvalidRequest(f"must be {' or '.join(schemes)}", field="url")
        if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise InvalidRequest("must name a host, in ASCII", field="url")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("must not hold credentials", field="url")
        if port is not None and port < 1024 and port not in (80, 443):
            raise InvalidRequest(f"must not use port {port}", field="url")
        return parts

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a host, all of them allowed.

        Raises:
            InvalidRequest: one of them is not, whichever; or the host is no name that could resolve.
            OSError: it does not resolve.
        """
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await asyncio.get_running_loop().run_in_executor(
                    self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                )
        except UnicodeError:  # an empty label, or one of more than 63 characters
            raise InvalidRequest("must name a host that a name server could know", field="url") from None
        texts = list(dict.fromkeys(str(row[4][0]) for row in found))
        for text in texts:
            if not self.allows(ipaddress.ip_address(text.partition("%")[0])):
                raise InvalidRequest(f"{host} leads to an address that is not public", field="url")
        return texts

    def allows(self, address: Address) -> bool:
        """Whether a connection to the address may be opened; what it embeds or maps to decides."""
        inner = _embedded(address)
        if any(inner.version == net.version and inner in net for net in NEVER):
            return False
        if any(inner.version == net.version and inner in net for net in self._allowed):
            return True
        site_local = isinstance(inner, ipaddress.IPv6Address) and inner.is_site_local
        return inner.is_global and not (inner.is_multicast or inner.is_reserved or site_local)


def _embedded(address: Address) -> Address:
    """The IPv4 address inside a mapped, 6to4, NAT64 or Teredo one; others as they are."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped:
        return address.ipv4_mapped
    if address.sixtofour:
        return address.sixtofour
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo:
        return address.teredo[1]
    return address
