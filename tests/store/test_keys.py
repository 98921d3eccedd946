"""One table spells the keys: nobody else does, and every row is used."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

import d3serve
from d3serve.store.keys import TABLE, Keys, lua_prelude

ROOT = Path(d3serve.__file__).parents[1]
SCRIPTS = {path.name: path.read_text() for path in (files("d3serve.store") / "scripts").iterdir()}
USE = re.compile(r"K\('(\w+)'")


def sources():
    rooms = [ROOT / "d3serve", ROOT / "api", ROOT / "worker"]
    return {
        path: path.read_text() for room in rooms for path in room.rglob("*.py") if "keys.py" not in path.name
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_use_only_keys_of_the_table(name):
    assert set(USE.findall(SCRIPTS[name])) <= TABLE.keys()


def test_every_key_of_the_table_is_used():
    used = {name for text in SCRIPTS.values() for name in USE.findall(text)}
    used |= {name for text in sources().values() for name in TABLE if f'"{name}"' in text}
    assert used == TABLE.keys()


def test_nobody_else_spells_a_key():
    for path, text in sources().items():
        assert "d3:{" not in text.replace("d3:{<namespace>}:", ""), f"{path} spells the prefix"
    for name, text in SCRIPTS.items():
        made = re.findall(r"KEYS\[1\]|'[a-z]+:'", text)
        assert not made, f"{name} spells {made}"


def test_no_two_keys_can_meet():
    stems = [key.stem for key in TABLE.values()]
    for stem in stems:
        assert not [
            other for other in stems if other != stem and stem.endswith(":") and other.startswith(stem)
        ]


def test_all_keys_of_a_queue_live_in_one_hash_slot():
    assert Keys("a")("job", "x") == "d3:{a}:job:x"
    assert Keys("a").broker_prefix + "wake.offline" == Keys("a")("mq", "offline")


def test_scripts_are_written_for_redis_7():
    for name, text in SCRIPTS.items():
        for missing in ("cmsgpack", "bit.", "sha1hex", "#!lua", "redis.pcall", "os.time"):
            code = "\n".join(line.split("--")[0] for line in text.splitlines())
            assert missing not in code, f"{name} uses {missing}"
    assert "no such key" in lua_prelude()
