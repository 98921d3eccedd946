"""The scripts' texts."""

from functools import cache
from importlib.resources import files
from typing import Literal

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


@cache
def script(name: ScriptName) -> str:
    """The script with the key table and the shared functions before it."""
    folder = files("d3serve.store") / "scripts"
    return "\n".join(
        [lua_prelude(), *((folder / f"{part}.lua").read_text("utf-8") for part in ("lib", "events", name))]
    )
