"""Where a server is and which way leads to it: its address, and the proxy that the environment names for it."""

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from d3serve.errors import InvalidRequest, StorageUnavailable

T = TypeVar("T")
NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)


@dataclass(frozen=True)
class Server:
    """A d3serve server, and the proxy on the way to it; None for a loopback host, whatever the environment says."""

    url: httpx.URL
    proxy: str | None

    @classmethod
    def at(cls, base_url: str) -> Self:
        """The server at `base_url`; a `/v1` at its end, as OpenAI's clients want it, is ours to add.

        Raises:
            InvalidRequest: it is no http or https URL.
        """
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{base_url!r} is no URL: {error}", field="base_url") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequest(f"{base_url!r} must begin with http:// or https://", field="base_url")
        path = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.copy_with(path=path or "/"), _proxy_for(url))

    @property
    def loopback(self) -> bool:
        """Whether it is on this host."""
        return is_loopback(self.url.host)

    def transport(self, kind: Callable[..., T]) -> T:
        """An HTTPTransport or AsyncHTTPTransport on the way to the server.

        Made here, because httpx by itself sends the calls of a loopback host to the environment's proxy.

        Raises:
            InvalidRequest: the proxy is of a kind that cannot be used, or the certificates cannot be read.
        """
        try:
            return kind(proxy=self.proxy)
        except ImportError:
            raise InvalidRequest(
                f"{self._shown_proxy} is a SOCKS proxy: pip install 'httpx[socks]', "
                f"or go without it by NO_PROXY={self.url.host}",
                field="base_url",
            ) from None
        except (ValueError, httpx.InvalidURL):
            raise InvalidRequest(
                f"{self._shown_proxy}, which the environment names, is no http, https or socks5 URL",
                field="base_url",
            ) from None
        except OSError as error:
            raise InvalidRequest(
                f"cannot read the certificates that SSL_CERT_FILE or SSL_CERT_DIR names: {error.strerror}",
                field="base_url",
            ) from None

    def silence(self, error: Exception) -> StorageUnavailable:
        """The error that nobody answered: it names who did not, the server or the proxy before it."""
        who, reason = self._origin, str(error) or type(error).__name__
        if self.proxy and isinstance(error, NOT_CONNECTED):
            who = f"{self._shown_proxy} on the way to {who} (NO_PROXY={self.url.host} goes without it)"
        elif self.proxy:
            who += self.via
        return StorageUnavailable(f"no answer from {who}: {reason}")

    @property
    def via(self) -> str:
        """` through the proxy …`, or nothing: what to say after a server that answered strangely."""
        return f" through {self._shown_proxy}" if self.proxy else ""

    @property
    def _origin(self) -> str:
        return f"{self.url.scheme}://{self.url.netloc.decode()}"

    @property
    def _shown_proxy(self) -> str:
        """The proxy without the password that its URL may hold."""
        try:
            url = httpx.URL(self.proxy or "")
        except httpx.InvalidURL:
            return "the proxy"
        return f"the proxy {url.scheme}://{url.netloc.decode()}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this host by its name: localhost, 127.0.0.0/8, ::1, and the unspecified addresses."""
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # 127.1, as the resolver reads it
        except OSError:
            return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def _proxy_for(url: httpx.URL) -> str | None:
    if is_loopback(url.host):
        return None
    named = getproxies()
    proxy = named.get(url.scheme) or named.get("all")
    if not proxy or proxy_bypass(url.netloc.decode()):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
