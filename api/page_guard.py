"""Keeps web pages out of a server without keys: a caller's browser would call for any page that it opens."""

import ipaddress
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from d3serve.api_keys import is_loopback
from d3serve.errors import Forbidden
from d3serve.settings import Settings

ANY_HOST: Final = "*"


def refuse_web_pages(headers: Headers, settings: Settings) -> None:
    """Admit programs, and the pages and names of hosts that the operator has named.

    A page whose own name was made to lead here (DNS rebinding) has that name as Host, and could read every job; one
    that posts here from elsewhere has its own as Origin; a picture or a script from here on a page has neither, but
    a browser says that it is cross-site. A link that somebody follows shows its page to nobody else. A page of this
    very server, as the console is, has its address as both.

    Raises:
        Forbidden: it is a page; says what admits it.
    """
    if ANY_HOST in settings.allowed_hosts:
        return
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    embedded = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
    for host in filter(None, hosts):
        if not _leads_here(host, settings.allowed_hosts):
            raise _refusal(f"the name {_host_of(f'//{host}') or 'in Host'} is not one of this host's")
    for origin in origins:
        if not _is_named(_host_of(origin), settings.allowed_hosts) and not _is_own(origin, hosts):
            raise _refusal("this is a request of another host's web page")
    if embedded and not origins:
        raise _refusal("this is a part of another host's web page")


def _refusal(reason: str) -> Forbidden:
    return Forbidden(
        f"{reason}; without API keys, add the name to D3SERVE_ALLOWED_HOSTS to admit it, or set D3SERVE_API_KEYS_FILE"
    )


@lru_cache(maxsize=64)  # callers use one name, or a few; strangers may send any
def _leads_here(host: str, allowed: tuple[str, ...]) -> bool:
    name = _host_of(f"//{host}")
    return _is_address(name) or _is_named(name, allowed)


def _is_named(name: str, allowed: tuple[str, ...]) -> bool:
    return is_loopback(name) or name in allowed


def _is_own(origin: str, hosts: list[str]) -> bool:
    """Whether a page came from the address that it calls. A name proves nothing: it may lead elsewhere by now."""
    return _is_address(_host_of(origin)) and origin.partition("://")[2] in hosts


def _is_address(host: str) -> bool:
    """Whether nobody can have made a name of theirs lead here: there is no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
