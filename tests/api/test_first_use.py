"""What a newcomer gets wrong first, and what the API and the clients tell them about it."""

import httpx
import pytest

from d3serve.api import bounds
from d3serve.api.served import configured_name
from d3serve.api_keys import append_key, new_key
from d3serve.client import AsyncClient, Client
from d3serve.client.protocol import POLL_S
from d3serve.errors import InvalidJSON, InvalidRequest, InvalidSettings, StorageUnavailable
from d3serve.settings import Settings
from d3serve.text.strict_json import read_json

QUESTIONS = {"q": {"type": "noul", "instructions": "x"}}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("limit=0", "limit", 'limit must be greater than or equal to 1, not "0"'),
        ("limit=many", "limit", 'limit must be an integer, not "many"'),
        ("created_after=monday", "created_after", 'created_after must be a number, not "monday"'),
        ("status=done", "status", 'not "done"'),
        (
            "stauts=failed",
            "stauts",
            '"stauts" is no filter; there are status, model, created_after, limit, cursor',
        ),
        ("metadata=1", "metadata", "metadata[key]"),
    ],
)
async def test_a_filter_that_is_not_understood_is_refused_with_its_value(query, field, words, client):
    answer = await client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == field
    assert words in answer.json()["detail"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("metadata", "field", "words"),
    [
        ({"a": "x" * 513}, "job.metadata.a", "has 513 characters; there may be at most 512"),
        ({"k" * 65: ""}, "job.metadata", "which has 65 characters; there may be at most 64"),
        ({"": ""}, "job.metadata", 'has a key "", which has 0 characters; there must be at least 1'),
    ],
)
async def test_a_text_of_the_wrong_length_is_told_with_its_length(metadata, field, words, client):
    body = {"model": "jev-latest", "state": "", "questions": QUESTIONS, "job": {"metadata": metadata}}
    problem = (await client.post("/v1/jobs", json=body)).json()
    assert problem["error"]["field"] == field
    assert words in problem["detail"]


@pytest.mark.anyio
async def test_every_finding_of_a_webhook_is_listed(client):
    job = {"webhook": {"endpoint_id": "ep_none"}}
    body = {"model": "jev-latest", "state": "", "questions": QUESTIONS, "job": job}
    problem = (await client.post("/v1/jobs", json=body)).json()
    assert problem["detail"] == "job.webhook.endpoint_id names no such webhook endpoint"
    assert [one["pointer"] for one in problem["errors"]] == ["/job/webhook/endpoint_id"]


@pytest.mark.anyio
async def test_a_path_that_is_not_served_says_where_the_served_ones_are_listed(client):
    assert "/openapi.json" in (await client.get("/v2/jobs")).json()["detail"]


@pytest.mark.anyio
async def test_the_limit_told_is_the_limit_kept(client, app, worker):
    worker.show_itself()
    parts = app.state.parts
    smaller = parts.settings.model_copy(update={"max_interactive_tokens": 1000})
    object.__setattr__(parts, "settings", smaller)
    limits = (await client.get("/v1/models")).json()["models"][0]["limits"]
    assert limits["tokens_per_question"] == 1000


def test_a_folder_is_known_by_its_name_however_its_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in ("checkpoints/small", "./checkpoints/small", str(tmp_path / "checkpoints" / "small")):
        assert configured_name(Settings(model=model)) == "small"
    assert configured_name(Settings(model="vllm-sr/d3-turbo")) == "vllm-sr/d3-turbo"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "somewhere", "http://", "http://[::1"])
def test_an_address_that_can_never_answer_is_refused_before_anything_is_sent(url, kind):
    with pytest.raises(InvalidRequest, match=r"http|URL"):
        kind(url)


def test_a_server_that_does_not_answer_is_named():
    with (
        Client("http://127.0.0.1:9", patience_s=0) as client,
        pytest.raises(StorageUnavailable, match=r"http://127\.0\.0\.1:9:"),
    ):
        client.get("job_1")


@pytest.mark.parametrize("state", [float("nan"), "\ud83d", {1, 2}])
def test_a_state_that_is_no_json_is_refused_like_any_other(state):
    with Client("http://127.0.0.1:9") as client, pytest.raises(InvalidRequest, match="JSON"):
        client.submit(state, QUESTIONS)


def test_an_id_never_leads_to_another_route():
    asked = []

    def answer(request):
        asked.append(request.url.raw_path.decode())
        return httpx.Response(204)

    with Client("http://d3serve.test", transport=httpx.MockTransport(answer)) as client:
        client.delete("../webhook-endpoints/ep_1?x#y")
    assert asked == ["/v1/jobs/..%2Fwebhook-endpoints%2Fep_1%3Fx%23y"]


def test_a_key_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot write"):
        append_key(tmp_path, new_key("acme")[1])
    with pytest.raises(InvalidSettings, match=r"""scopes must be .* not "root"$"""):
        new_key("acme", ["root"])


def test_no_server_refuses_the_wait_that_our_clients_ask_for():
    assert POLL_S <= bounds.MAX_WAIT_S


def test_a_control_character_is_placed_once():
    with pytest.raises(InvalidJSON, match="Invalid control character at line 1 column 7"):
        read_json(b'{"a":"\x01"}', max_depth=9)
