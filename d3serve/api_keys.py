"""API keys: made once, kept as hashes in a file of JSON lines, looked up in constant time.

A key reads `d3k_<id>_<secret>`. The id finds the line, the secret (256 random bits, so one round of SHA-256
is enough) proves it. The file is read again when it changes: adding or removing a line needs no restart.
"""

import codecs
import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import structlog
from pydantic import Field, ValidationError

from d3serve.errors import InvalidSettings, Unauthorized
from d3serve.schemas.questions import Wire
from d3serve.settings import Settings
from d3serve.text.wording import complaint

Scope = Literal["jobs:read", "jobs:write", "webhooks", "admin"]
ALL_SCOPES: Final[tuple[Scope, ...]] = ("jobs:read", "jobs:write", "webhooks", "admin")
DEFAULT_SCOPES: Final[tuple[Scope, ...]] = ("jobs:read", "jobs:write", "webhooks")
PUBLIC_TENANT: Final = "public"
RECHECK_S: Final = 1.0
REPLACED_WITHIN_S: Final = 5.0  # a file may be away for so long while another takes its place
log = structlog.get_logger("d3serve.api")
_NOBODY: Final = hashlib.sha256(b"nobody").hexdigest()


class ApiKey(Wire):
    """One line of the key file: who holds the key and what it may do, but not the key."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    scopes: list[Scope] = Field(min_length=1)
    requests_per_minute: int | None = Field(default=None, ge=1)


def new_key(
    tenant: str, scopes: Sequence[str] = DEFAULT_SCOPES, requests_per_minute: int | None = None
) -> tuple[str, ApiKey]:
    """A fresh key, to be shown once, and the line to keep.

    Raises:
        InvalidSettings: the tenant or a scope is not one that a key can have.
    """
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    key = f"d3k_{key_id}_{secret}"
    try:
        line = ApiKey.model_validate(
            {
                "id": key_id,
                "sha256": hashlib.sha256(key.encode()).hexdigest(),
                "tenant": tenant,
                "scopes": list(scopes),
                "requests_per_minute": requests_per_minute,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InvalidSettings(f"{name} {complaint(first)}", field=name) from None
    return key, line


class KeyRing:
    """The keys of a file, by id: what the file does not clearly grant is refused."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InvalidSettings: it cannot be read, or a line is no key; names the line.
        """
        self._path = path
        self._checked_at = time.monotonic()
        self._unreadable_since: float | None = None
        self._version = _version(path)
        self._keys = read_keys(path)
        self._warn_if_others_may_write()

    def identify(self, key: str) -> ApiKey:
        """Whose key it is.

        Raises:
            Unauthorized: nobody's; the message tells nothing more.
        """
        if time.monotonic() - self._checked_at >= RECHECK_S:
            self.reread()
        prefix, _, rest = key.partition("_")
        found = self._keys.get(rest.partition("_")[0]) if prefix == "d3k" else None
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        if not hmac.compare_digest(digest, found.sha256 if found else _NOBODY) or found is None:
            raise Unauthorized("the API key is not valid")
        return found

    def holds(self, key: ApiKey) -> bool:
        """Whether the key stands in the file as it did when it was identified."""
        return self._keys.get(key.id) == key

    def reread(self) -> None:
        """Take up a changed file: a damaged line grants nothing, and a file that stays away grants nothing either."""
        self._checked_at = time.monotonic()
        version = _version(self._path)
        if version is not None and version == self._version:
            return
        try:
            self._keys, damaged = _parse(_read(self._path))
        except InvalidSettings as error:
            self._version = None
            self._do_without(error.message)
            return
        self._version, self._unreadable_since = version, None
        for complaint_ in damaged:
            log.error("keys.damaged", reason=f"{self._path} {complaint_}")
        self._warn_if_others_may_write()

    def _do_without(self, reason: str) -> None:
        """Keep the keys read last for the moment that it takes to replace a file, then none."""
        now = time.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
            log.error("keys.unreadable", reason=reason)
        if self._keys and now - self._unreadable_since >= REPLACED_WITHIN_S:
            self._keys = {}
            log.error("keys.none", reason=reason)

    def _warn_if_others_may_write(self) -> None:
        with contextlib.suppress(OSError):
            if self._path.stat().st_mode & 0o022:
                log.warning("keys.others_may_write", path=str(self._path))


def make_key_ring(settings: Settings) -> KeyRing | None:
    """The keys that callers need; None if none are configured, where that is harmless or asked for.

    Raises:
        InvalidSettings: the API would listen beyond this host with no key asked of anyone.
    """
    if settings.api_keys_file is not None:
        return KeyRing(settings.api_keys_file)
    if not is_loopback(settings.host) and not settings.allow_anonymous:
        raise InvalidSettings(
            f"refusing to listen on {settings.host} without API keys: make one with `d3serve new-key` and set "
            "D3SERVE_API_KEYS_FILE, or set D3SERVE_ALLOW_ANONYMOUS=true to serve everyone who can connect",
            field="host",
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this host itself, whoever asks."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def read_keys(path: Path) -> Mapping[str, ApiKey]:
    """The keys in a file, by id.

    Raises:
        InvalidSettings: as for `KeyRing`.
    """
    keys, damaged = _parse(_read(path))
    if damaged:
        raise InvalidSettings(f"{path} {damaged[0]}", field="api_keys_file")
    return keys


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSettings(
            f"cannot read the API keys in {path}: {error.strerror}", field="api_keys_file"
        ) from None


def _parse(text: bytes) -> tuple[dict[str, ApiKey], list[str]]:
    """The keys by id, and what is wrong with lines that hold none; of an id that stands twice, neither counts."""
    keys: dict[str, ApiKey] = {}
    damaged: list[str] = []
    seen: set[str] = set()
    for number, line in enumerate(text.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        try:
            key = ApiKey.model_validate_json(line)
        except ValidationError as error:
            damaged.append(f"line {number}: {error.errors()[0]['msg']}")
            continue
        if key.id in seen:
            damaged.append(f"line {number}: the id {key.id} stands twice")
            keys.pop(key.id, None)
            continue
        seen.add(key.id)
        keys[key.id] = key
    return keys, damaged


def append_key(path: Path, line: ApiKey) -> None:
    """Add a line to the file, which only its owner may read.

    Raises:
        InvalidSettings: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        text = json.dumps(line.model_dump()) + "\n"
        with path.open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            unended = file.read() not in (b"", b"\n")  # written by hand
            file.write((b"\n" if unended else b"") + text.encode())
    except OSError as error:
        raise InvalidSettings(f"cannot write {path}: {error.strerror}", field="file") from None


def _version(path: Path) -> tuple[int, int, int] | None:
    """What differs when the file does; None while there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
