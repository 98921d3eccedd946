"""A script is sent with the shared functions that it calls, and no more."""

import re
from typing import get_args

import pytest

from d3serve.store import lua

LUA = {
    "and", "elseif", "error", "function", "if", "in", "ipairs", "not", "or", "pairs", "return", "tonumber", "type",
    "unpack",
}  # fmt: skip
CALL = re.compile(r"(?<![.\w])([A-Za-z_]\w*) ?\(")


@pytest.mark.parametrize("name", get_args(lua.ScriptName))
def test_a_script_has_every_function_that_it_calls(name):
    text = re.sub(r"--.*|'[^'\n]*'", "", lua.script(name))
    made = set(re.findall(r"local (?:function )?(\w+)", text))
    assert set(CALL.findall(text)) <= made | LUA


def test_a_script_that_ends_no_job_goes_without_what_ends_them():
    assert "local function finish" not in lua.script("submit")
    assert "local function finish" in lua.script("commit")
