"""`d3serve ask --dry-run`: what a job would read, for people and as JSON; no job is made."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from d3serve.commands import ask
from d3serve.commands.main import app
from d3serve.settings import Settings
from d3serve.store import counting


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
    return Settings(redis_url=redis_url, namespace="dry-run", max_offline_tokens=300)


@pytest.fixture
def counted(service, worker, counter):  # noqa: ARG001 - one shows itself, the other counts
    """Runs the command against a served API whose worker counts."""

    def run(*arguments):
        command = ["ask", "--url", service, "--dry-run", *arguments]
        return CliRunner().invoke(app, command, env={"COLUMNS": "120"}, catch_exceptions=False)

    yield run
    assert httpx.get(f"{service}/v1/jobs", trust_env=False).json()["data"] == [], "it sends no job"


def test_people_read_tokens_lane_and_time(counted):
    done = counted("--state", "a parcel", "--yes-no", "Is it late?", "--yes-no", "Is it lost?")
    assert done.exit_code == 0, done.output
    for told in ("Is it late?", "Is it lost?", "whole prompt", "lane interactive", "at today's rate"):
        assert told in done.output


def test_programs_read_what_the_api_says(counted):
    done = counted("--state", "a parcel", "--yes-no", "Is it late?", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output[done.output.index("{\n") :])  # the API's log is in this process
    assert told["fits"]
    assert told["total_tokens"] == told["input_tokens"] > told["state_tokens"]


def test_what_would_be_refused_is_an_exit_code_and_its_reason(counted):
    done = counted("--state", "so " * 1000, "--yes-no", "Is it late?")
    assert done.exit_code == 1
    assert "refused max_tokens_exceeded" in done.output


def test_without_a_worker_it_ends_and_says_why(service, worker, monkeypatch):  # noqa: ARG001 - it counts nothing
    monkeypatch.setattr(counting, "WITHIN_S", 1.0)
    monkeypatch.setattr(ask, "COUNT_PATIENCE_S", 0.5)
    waited, answer = [], counting.CountDesk._answer

    def asked(desk, request_id):
        waited.append(request_id)
        return answer(desk, request_id)

    monkeypatch.setattr(counting.CountDesk, "_answer", asked)
    command = ["ask", "--url", service, "--dry-run", "--state", "a parcel", "--yes-no", "Is it late?"]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert done.exit_code != 0
    assert "no worker has counted this within 1 s" in str(done.exception) + done.output
    assert len(waited) <= 2, "it was asked for a minute"
