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
    "piece_put",
    "piece_move",
    "piece_drop",
    "file_add",
    "file_drop",
    "batch_add",
    "batch_claim",
    "batch_step",
    "batch_cancel",
    "batch_drop",
]


# Every run makes the functions before a script anew: what ends jobs takes SUBMIT, which ends none, a tenth of its time.
SHARED: Final = (("ends", "events"), ("pieces",))
_KEY: Final = re.compile(r"\bK\('(\w+)'")
_FUNCTION: Final = re.compile(r"^(?:local function )?(\w+)(?: = function)?\(", re.MULTILINE)


@cache
def script(name: ScriptName) -> str:
    """The script with the key table, and of the shared functions those that it may need, before it."""
    own = _part(name)
    needed = [part for parts in SHARED if any(_calls(own, part) for part in parts) for part in parts]
    counts = [tally.lua_prelude()] if "ends" in needed else []
    text = "\n".join([_part("lib"), *counts, *map(_part, needed), own])
    return f"{lua_prelude(_KEY.findall(text))}\n{text}"


def _calls(own: str, part: str) -> bool:
    return any(f"{function}(" in own for function in _FUNCTION.findall(_part(part)))


def _part(name: str) -> str:
    return (files("d3serve.store") / "scripts" / f"{name}.lua").read_text("utf-8")
