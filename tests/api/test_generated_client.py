"""A client that a stock generator makes of the OpenAPI document works, unchanged, for all that people do."""

import importlib
import json
import subprocess
import sys

import pytest

from d3serve.api.app import create_app
from d3serve.api_keys import append_key, new_key
from d3serve.settings import Settings

OPERATIONS = 36


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The generated package, and what the generator had to say."""
    folder = tmp_path_factory.mktemp("generated")
    document, config = folder / "openapi.json", folder / "config.yaml"
    document.write_text(json.dumps(create_app(Settings()).openapi()))
    config.write_text("post_hooks: []\n")  # no formatting
    command = [
        "--path",
        document,
        "--config",
        config,
        "--output-path",
        folder / "d3generated",
        "--meta",
        "none",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", *map(str, command)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    try:
        yield folder / "d3generated", done.stdout + done.stderr
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def generated(made):  # noqa: ARG001 - it lies on the path by then
    """A module of the generated package, by its name there."""
    return lambda name: importlib.import_module(f"d3generated.{name}")


@pytest.fixture
def served(settings, tmp_path, serving, take_turns):
    """The address of an API that asks for keys, beside a worker; a key, and the job options of nobody."""
    file = tmp_path / "keys.jsonl"
    key, line = new_key("acme")
    append_key(file, line)
    with serving(create_app(settings.model_copy(update={"api_keys_file": file}))) as address, take_turns():
        yield address, key


def test_every_operation_becomes_a_function_with_a_type_for_its_answer(made):
    folder, told = made
    assert "WARNING" not in told.upper(), told
    functions = [path for path in folder.glob("api/*/*.py") if path.name != "__init__.py"]
    assert len(functions) == OPERATIONS
    for path in functions:
        source = path.read_text()
        assert "Problem" in source, path.name
        if path.stem not in ("delete", "delete_endpoint", "events", "file_content", "metrics"):
            assert "json()" in source.replace("Problem.from_dict(response.json())", ""), path.name


def test_it_authenticates_submits_waits_and_reads_a_result(served, generated):
    address, key = served
    models, jobs = generated("models"), "api.jobs"
    asked = models.DecisionRequest.from_dict({
        "model": "jev-latest", "state": "I was charged twice.", "job": {"metadata": {"note": "x"}},
        "questions": {
            "refund": {"type": "noul", "instructions": "Is it a refund?"},
            "team": {"type": "choice", "criteria": {"billing": None, "shipping": "parcels"}},
        },
    })  # fmt: skip
    with generated("client").AuthenticatedClient(address, key) as client:
        told = generated(f"{jobs}.submit").sync_detailed(
            client=client, body=asked, prefer="wait=30", idempotency_key="once", x_request_id="mine"
        )
        assert (told.status_code, told.headers["preference-applied"]) == (200, "wait=30")
        assert told.headers["x-request-id"] == "mine"
        job = told.parsed
        assert (job.status, job.done, job.request.questions, job.progress.stage) == (
            "succeeded",
            True,
            2,
            "finished",
        )
        assert job.result.answers["refund"].noul == 0.75
        assert job.metadata["note"] == "x"
        result = generated(f"{jobs}.result").sync(job.id, client=client)
        assert result.answers["team"].choice == "shipping"
        assert result.usage.questions == 2
        polled = generated(f"{jobs}.poll").sync_detailed(job.id, client=client)
        seen = generated(f"{jobs}.poll").sync_detailed(
            job.id, client=client, if_none_match=polled.headers["etag"]
        )
        assert (polled.parsed.id, seen.status_code) == (job.id, 304)
        page = generated(f"{jobs}.list_jobs").sync(client=client, status="succeeded")
        assert [one.id for one in page.data] == [job.id]
        assert generated("api.service.models").sync(client=client).models[0].name == "vllm-sr/d3-tiny"
        assert generated(f"{jobs}.delete").sync_detailed(job.id, client=client).status_code == 204


def test_it_speaks_both_dialects_of_a_synchronous_call(served, generated):
    address, key = served
    models = generated("models")
    openai = models.OpenAIDecisionRequest.from_dict({
        "model": "jev-latest", "input": "I was charged twice.",
        "questions": [{"type": "choice", "name": "spam", "choices": [{"value": "no"}, {"value": True}]}],
    })  # fmt: skip
    with generated("client").AuthenticatedClient(address, key) as client:
        decision = generated("api.decisions.decisions").sync(client=client, body=openai)
        assert (type(decision).__name__, decision.answers[0].name) == ("OpenAIDecision", "spam")
        assert decision.answers[0].choice is True


def test_a_refusal_arrives_as_the_one_error_body(served, generated):
    address, key = served
    models, submit = generated("models"), generated("api.jobs.submit")
    asked = models.DecisionRequest.from_dict({
        "model": "gpt-9", "state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}
    })  # fmt: skip
    for token, status, code in ((key, 404, "model_not_found"), ("d3k_nobody_s", 401, "unauthorized")):
        with generated("client").AuthenticatedClient(address, token) as client:
            told = submit.sync_detailed(client=client, body=asked)
        assert (told.status_code, told.parsed.code) == (status, code)
        assert told.parsed.error.message == told.parsed.detail
