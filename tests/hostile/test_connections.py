"""Hostile connections of every kind at once: an honest caller is served all the while, in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import attack
from hostile.odd_bodies import MIB, request

pytestmark = pytest.mark.timeout(300)
SECONDS = 9
WORST_P99_S = 2.0  # the goal is 0.2 s on a quiet machine; this is for one that does other things too
MOST_MEMORY_BYTES = 2**30


def attacked(api, probe, seconds, *kinds):
    """Attack the API while `probe` asks; what the attackers sent."""
    job = json.loads(api.call("POST", "/v1/jobs", json.dumps(request()))[2])["id"]
    command = [sys.executable, Path(attack.__file__), str(api.port), job, str(seconds), *kinds]
    with probe:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 120)
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", ["/healthz", "/v1/jobs"])
def test_an_honest_caller_is_served_among_sixty_four_hostile_ones(path, start_api, probing):
    api = start_api()
    before = api.memory_bytes()
    probe = probing(api, path)
    sent = attacked(api, probe, SECONDS)
    peak = api.memory_bytes("VmHWM")
    print(f"\n{probe}; memory {before / MIB:.0f} MiB before, at most {peak / MIB:.0f} MiB; {sent}")  # noqa: T201
    assert probe.failures == []
    assert probe.percentile(0.99) < WORST_P99_S, str(probe)
    assert peak < MOST_MEMORY_BYTES
    assert all(sent.get(f"{kind}, connections", 0) >= attack.EACH for kind in attack.KINDS), sent
    for kind in ("trailers", "extensions", "unread body"):
        assert sent[f"{kind}, connections"] > attack.EACH, f"connections that send {kind} are not cut: {sent}"
    assert "unforeseen" not in api.logged()


def test_a_process_with_few_descriptors_serves_those_who_ask(start_api, probing):
    """A thousand connections that had sent one byte too many once reset everybody else's."""
    api = start_api(before=["sh", "-c", 'ulimit -n 160; exec "$@"', "sh"])
    probe = probing(api, "/v1/jobs")
    sent = attacked(api, probe, 5, "slow head", "idle", "slow body", "stream", "stream")
    assert probe.failures == [], sent
    assert "unforeseen" not in api.logged()
    assert "out_of_descriptors" not in api.logged()
