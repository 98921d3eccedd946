"""Loads the scripts and runs them: EVALSHA first, EVAL where the server has forgotten them."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from redis.exceptions import NoScriptError

from d3serve.store.connect import AsyncClient, Client
from d3serve.store.keys import lua_prelude

ScriptName = Literal[
    "submit",
    "claim",
    "more",
    "renew",
    "progress",
    "commit",
    "free",
    "reap",
    "cancel",
    "retry",
    "delete",
    "stored",
    "hook_claim",
    "hook_open",
    "hook_postpone",
    "hook_settle",
    "tell",
    "count",
    "serve",
    "rate",
    "ahead",
]
Argument = str | int | float | bytes


class Script(NamedTuple):
    """A script's whole text and the name that the server gives it."""

    text: str
    sha: str


@cache
def script(name: ScriptName) -> Script:
    """The script with the key table and the shared functions before it."""
    folder = files("d3serve.store") / "scripts"
    parts = [lua_prelude()] + [
        (folder / f"{part}.lua").read_text("utf-8") for part in ("lib", "events", name)
    ]
    text = "\n".join(parts)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def run_script(client: Client, name: ScriptName, prefix: str, *args: Argument) -> Any:
    """Run a script on the keys under `prefix`; atomic."""
    text, sha = script(name)
    try:
        return client.evalsha(sha, 1, prefix, *args)
    except NoScriptError:
        return client.eval(text, 1, prefix, *args)


async def run_script_async(client: AsyncClient, name: ScriptName, prefix: str, *args: Argument) -> Any:
    """The same for an asyncio client."""
    text, sha = script(name)
    try:
        return await client.evalsha(sha, 1, prefix, *args)
    except NoScriptError:
        return await client.eval(text, 1, prefix, *args)
