"""Where this service may connect to on a client's word: public addresses, and those that the operator allows.

Pure: a URL is judged by its text, an address by our own list of networks, so that no version of Python decides.
Names are looked up where the connection is made, and every address that they lead to is judged there.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from d3serve.errors import InvalidRequest, InvalidSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(map(ipaddress.ip_network, texts))


# Link-local, and the metadata services that have an address elsewhere: AWS, Azure, Alibaba, Oracle, Google, Scaleway.
NEVER: Final = _networks(
    "169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32",
    "fd00:c1::a9fe:a9fe/128", "fd20:ce::254/128", "fd00:42::42/128",
)  # fmt: skip
# IANA's registries of special addresses; of IPv6 only 2000::/3 is given out at all.
NOT_PUBLIC: Final = _networks(
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
    "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
)  # fmt: skip
UNICAST: Final = ipaddress.ip_network("2000::/3")
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
NAT64_LOCAL: Final = ipaddress.ip_network("64:ff9b:1::/48")
ISATAP: Final = (0x00005EFE, 0x02005EFE)
NAME: Final = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
MAX_NAME_CHARS: Final = 253
OPENED_BY: Final = "the setting D3SERVE_WEBHOOK_ALLOW, as '[\"10.0.0.0/8\"]', opens networks to webhooks"


class Destination(NamedTuple):
    """Where a URL leads: `address` if its host is one, however it is spelled."""

    secure: bool
    host: str
    port: int
    address: Address | None


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

    def check_url(self, url: str) -> Destination:
        """Where a URL leads that may be called as far as its text tells; no name is looked up.

        Raises:
            InvalidRequest: not https (http where networks are allowed), credentials, a port of another
                service, no host, or an address that is not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"not a URL: {error}", field="url") from None
        schemes = ("https", "http") if self._allowed else ("https",)
        if parts.scheme not in schemes:
            more = "" if self._allowed else f"; {OPENED_BY}, to http too"
            raise InvalidRequest(f"must be {' or '.join(schemes)}{more}", field="url")
        if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise InvalidRequest("must name a host, in ASCII", field="url")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("must not hold credentials", field="url")
        if port is not None and (port == 0 or (port < 1024 and port not in (80, 443))):
            raise InvalidRequest(f"must not use port {port}", field="url")
        found = destination(url)
        if found.address is not None and not self.allows(found.address, secure=found.secure):
            told = f"{found.host} is no address that webhooks may reach"
            never = any(_within(face, NEVER) for face in _faces(found.address))
            raise InvalidRequest(told if never else f"{told}; {OPENED_BY}", field="url")
        if found.address is None and not (NAME.fullmatch(found.host) and len(found.host) <= MAX_NAME_CHARS):
            raise InvalidRequest("must name a host that a name server could know", field="url")
        return found

    def allows(self, address: Address, *, secure: bool = True) -> bool:
        """Whether a connection to the address may be opened; unencrypted, only into the allowed networks."""
        faces = _faces(address)
        if any(_within(face, NEVER) for face in faces):
            return False
        if _within(faces[0], self._allowed):
            return True
        return secure and all(_within(face, self._allowed) or _is_public(face) for face in faces)


def destination(url: str) -> Destination:
    """Where a URL leads, spelled one way: what counts as one receiver has one. `url` was checked once."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host = (parts.hostname or "").lower().removesuffix(".")
    address = _literal(host)
    port = parts.port if parts.port is not None else (443 if secure else 80)
    return Destination(secure, host if address is None else str(address), port, address)


def _literal(host: str) -> Address | None:
    """The address that a host is, in any spelling that the C library reads; `localhost` is one by its standard."""
    if host == "localhost" or host.endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    try:
        if ":" in host:
            address = ipaddress.IPv6Address(host.partition("%")[0])
            return address.ipv4_mapped or address
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def _faces(address: Address) -> tuple[Address, ...]:
    """What a packet to the address may reach: itself, or what it only stands for, first; then what it embeds."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    value = int(address)
    low = ipaddress.IPv4Address(value & 0xFFFFFFFF)
    if address.ipv4_mapped or address in NAT64:
        return (low,)
    inner: list[Address] = list(address.teredo or ())
    if address.sixtofour:
        inner.append(address.sixtofour)
    if value >> 32 == 0 or (value >> 32) & 0xFFFFFFFF in ISATAP:
        inner.append(low)
    if address in NAT64_LOCAL:  # RFC 6052: at the end, or around bits 64 to 71
        inner += [low, ipaddress.IPv4Address((value >> 64 & 0xFFFF) << 16 | value >> 40 & 0xFFFF)]
    return (address, *inner)


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == net.version and address in net for net in networks)


def _is_public(address: Address) -> bool:
    return not _within(address, NOT_PUBLIC) and (address.version == 4 or address in UNICAST)
