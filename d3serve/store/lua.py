"""The scripts' texts."""

import re
from functools import cache
from importlib.resources import files
from typing import Final, Literal

from d3serve.store import tally
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
    "idle",
    "rate",
    "ahead",
]


# Every run makes the functions before a script anew: what ends jobs takes SUBMIT, which ends none, a tenth of its time.
ENDS: Final = ("ends", "events")
_KEY: Final = re.compile(r"\bK\('(\w+)'")
_FUNCTION: Final = re.compile(r"^(?:local function )?(\w+)(?: = function)?\(", re.MULTILINE)


@cache
def script(name: ScriptName) -> str:
    """The script with the key table, and of the shared functions those that it may need, before it."""
    own = _part(name)
    ends_jobs = any(f"{function}(" in own for part in ENDS for function in _FUNCTION.findall(_part(part)))
    shared = [tally.lua_prelude(), *map(_part, ENDS)] if ends_jobs else []
    text = "\n".join([_part("lib"), *shared, own])
    return f"{lua_prelude(_KEY.findall(text))}\n{text}"


def _part(name: str) -> str:
    return (files("d3serve.store") / "scripts" / f"{name}.lua").read_text("utf-8")
