"""The address of a Redis-protocol server, read once for everybody who connects to it.

`redis://`, `rediss://`: `[user[:password]@]host[:port][/db]`; `unix://[user[:password]@]/path?db=N`;
`sentinel://[user[:password]@]host:port,host:port/master[/db]`. Names, passwords and paths are percent-encoded.

redis-py and kombu read URLs differently: one decodes a path, the other splits it at `;`, and each takes options that
the other takes for an error or for something else. So neither is given a URL, and options that are not taken by both
are refused: timeouts, pools and the protocol are ours to set.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

DEFAULT_PORT: Final = 6379
SCHEMES: Final = ("redis", "rediss", "unix", "sentinel")
FORMS: Final = "redis://[user:password@]host:port/db, rediss://…, unix:///path?db=N or sentinel://host:port,host:port/master/db"
ESCAPED: Final = "write # as %23, ? as %3F, / as %2F and @ as %40 inside a password or a path"
TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
TLS_OPTIONS: Final = TLS_FILES | {"ssl_cert_reqs", "ssl_check_hostname"}


@dataclass(frozen=True)
class RedisURL:
    """Where a server is and who we are to it; `str` of it may be shown, since it holds no password."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    master: str | None = None
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ValueError: what is wrong with it, in words that quote no part of it but the names of options.
        """
        if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            raise ValueError("must begin with redis://, rediss://, unix:// or sentinel://")
        if "#" in url:
            raise ValueError(f"has a # in it: {ESCAPED}")
        try:
            parts = urlsplit(url)
            hosts = _hosts(parts)
        except ValueError:  # a port that is no number is often the end of a password, and is not shown
            raise ValueError(f"is not of the form {FORMS}; {ESCAPED}") from None
        login = parts.netloc.rpartition("@")[0].partition(":")
        found: dict[str, Any] = {
            "username": unquote(login[0]) or None,
            "password": unquote(login[2]) or None,
            **_options(parts),
        }
        places = [unquote(place) for place in parts.path.split("/")[1:]]
        match parts.scheme:
            case "unix" if len(parts.path) > 1 and parts.path.startswith("/") and not parts.hostname:
                return cls("unix", path=unquote(parts.path, errors="surrogateescape"), **found)
            case "redis" | "rediss" if len(places) <= 1 and len(hosts) == 1:
                return cls(parts.scheme, hosts, **{"db": _db("".join(places)), **found})
            case "sentinel" if places and places[0] and len(places) <= 2 and all(name for name, _ in hosts):
                return cls("sentinel", hosts, master=places[0], **{"db": _db("".join(places[1:])), **found})
        raise ValueError(f"is not of the form {FORMS}; {ESCAPED}")

    def __str__(self) -> str:
        """The URL without its login."""
        if self.path is not None:
            return unix_url(self.path) + (f"?db={self.db}" if self.db else "")
        hosts = ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in self.hosts)
        return f"{self.scheme}://{hosts}/{quote(self.master) + '/' if self.master else ''}{self.db}"

    @property
    def login(self) -> dict[str, Any]:
        """The database and who we are, as redis-py's connections take them."""
        return {"db": self.db, "username": self.username, "password": self.password}

    @property
    def place(self) -> dict[str, Any]:
        """Where the server is, as redis-py's connections take it; not for sentinels, which are asked."""
        if self.path is not None:
            return {"path": self.path}
        (host, port), *_ = self.hosts
        return {"host": host, "port": port, **dict(self.tls)}


def unix_url(path: str | Path) -> str:
    """The URL of a server that listens on a socket file, whatever the file is called."""
    return f"unix://{quote(os.fsencode(path))}"


def _hosts(parts: SplitResult) -> tuple[tuple[str, int], ...]:
    if parts.scheme != "sentinel":
        return ((unquote(parts.hostname or "localhost"), parts.port or DEFAULT_PORT),)
    hosts = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{host}")
        hosts.append((one.hostname or "", int(one.port or "")))
    return tuple(hosts)


def _options(parts: SplitResult) -> dict[str, Any]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True, separator="&"))
    taken = {"redis": {"db"}, "unix": {"db"}, "rediss": {"db"} | TLS_OPTIONS}.get(parts.scheme, set())
    if "@" in parts.query:  # the end of a password that has a ? in it
        raise ValueError(f"is not of the form {FORMS}; {ESCAPED}")
    if unknown := sorted(options.keys() - taken):
        ours = ", ".join(sorted(taken)) or "none"
        raise ValueError(
            f"has the option {unknown[0]}, which is not taken; options of {parts.scheme}: {ours}"
        )
    for name in sorted(TLS_FILES & options.keys()):
        if not options[name].startswith("/"):  # processes leave the folder that it would be relative to
            raise ValueError(f"has an {name} that is no absolute path")
    found: dict[str, Any] = {"db": _db(options.pop("db"))} if "db" in options else {}
    tls: dict[str, Any] = dict(options)
    if "ssl_check_hostname" in tls:
        checks = {"true": True, "false": False}.get(options["ssl_check_hostname"].lower())
        if checks is None:
            raise ValueError("has an ssl_check_hostname that is neither true nor false")
        tls["ssl_check_hostname"] = checks
    return {**found, "tls": tuple(sorted(tls.items()))}


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"has a database that is no number; the form is {FORMS}")
    return int(text)
