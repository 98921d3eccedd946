"""The stock JavaScript SDK against the API on a socket, unchanged but for the address."""

import json
import os
import shutil
import subprocess

import pytest

from d3serve.api import bounds
from d3serve.api.app import create_app

SDK = "@typesafe-ai/sdk@0.6.0"
SCRIPT = """
import { TypeSafeClient, choice, noul } from "@typesafe-ai/sdk";
const client = new TypeSafeClient();
const questions = process.env.BAD
  ? { team: { type: "choice", criteria: { only: null } } }
  : { team: choice("Which team?", { billing: null, technical: null }), refund: noul("Is it a refund?") };
try {
  const response = await client.systemOne({ state: { text: "I was charged twice." }, questions });
  console.log(JSON.stringify({ model: response.model, answers: response.answers }));
} catch (error) {
  console.log(JSON.stringify({ status: error.status, message: error.message }));
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the SDK from npm. Without Node the tests are skipped, but not in CI."""
    if shutil.which("npm") is None:
        if os.environ.get("CI"):
            pytest.fail("Node is needed in CI: the JavaScript SDK is a client that we promise to serve")
        pytest.skip("needs Node")
    path = tmp_path_factory.mktemp("npm")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent", SDK], cwd=path, check=True, timeout=250
    )
    (path / "ask.mjs").write_text(SCRIPT)
    return path


def ask(folder, address, **environment):
    env = os.environ | {"TYPESAFE_API_KEY": "any-key", "TYPESAFE_BASE_URL": address} | environment
    done = subprocess.run(
        ["node", "ask.mjs"], cwd=folder, env=env, capture_output=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def jobs_made(worker):
    return worker.turns._table.client.zcard(worker.turns._key("jobs", "public"))


def test_the_javascript_sdk_works_unchanged(folder, service, take_turns):
    with take_turns():
        answer = ask(folder, service)
    assert answer["model"] == "vllm-sr/d3-tiny@abc123"
    assert answer["answers"]["team"]["choice"] == "technical"
    assert answer["answers"]["refund"]["noul"] == 0.75


def test_its_retries_are_one_job(folder, settings, serving, take_turns, worker, monkeypatch):
    monkeypatch.setattr(bounds, "SYNC_WAIT_S", 0.5)
    with serving(create_app(settings)) as address, take_turns(delay_s=0.7):
        assert ask(folder, address)["answers"]["refund"]["noul"] == 0.75
    assert jobs_made(worker) == 1


def test_a_refusal_reaches_its_user_in_words_and_is_not_tried_again(folder, service, worker):
    error = ask(folder, service, BAD="1")
    assert error["status"] == 422
    assert "questions.team.criteria" in error["message"]
    assert jobs_made(worker) == 0
