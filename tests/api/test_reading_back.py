"""`?include=request`: what a job was asked, as it was sent, while that is kept."""

import base64
import hashlib
import json

import pytest
from media_files import picture, saved

from d3serve import errors
from d3serve.api.app import create_app
from d3serve.client import AsyncClient, Client, YesNo
from d3serve.store import states

NOUL = {"type": "noul", "instructions": "Is it spam?"}
STATE = {"z": 1.50, "a": ["é\u2028", None, 10**20], "text": "=&@"}
QUESTIONS = {
    "spam": NOUL,
    "team": {"type": "choice", "criteria": {"b": {"n": 1}, "a": None}},
    "mood": {"type": "score", "instructions": None, "criteria": ["calm", 2]},
}

pytestmark = pytest.mark.anyio


async def submit(client, **fields):
    body = {"model": "jev-latest", "state": STATE, "questions": QUESTIONS} | fields
    answer = await client.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["urls"]["self"]


@pytest.mark.parametrize("state", [STATE, "=text", "", "&[]", ["@x"], "x\n" * 1000], ids=str)
async def test_a_job_is_read_back_as_it_was_sent(state, client, worker):
    path = await submit(client, state=state)
    for _ in range(2):
        told = (await client.get(path, params={"include": ["request", "result"]})).json()
        asked = told["asked"]
        assert json.dumps(asked["state"]) == json.dumps(state), "also the order of keys"
        assert json.dumps(asked["questions"]) == json.dumps(QUESTIONS)
        assert (asked["model"], asked["media"]) == (worker.model.name, [])
        worker.work()
    assert told["result"]["answers"]["spam"]["noul"] == 0.75
    assert "asked" not in (await client.get(path)).json()
    again = await client.post(
        "/v1/jobs", json={name: asked[name] for name in ("model", "state", "questions")}
    )
    assert again.status_code == 202, "it cannot be sent again"


async def test_images_are_told_by_what_they_are(client, worker):
    worker.show_itself(modalities=("text", "image", "video"))
    png = saved(picture(64, 48), "PNG")
    shown = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    asked = (await client.get(await submit(client, images=[shown]), params={"include": "request"})).json()[
        "asked"
    ]
    assert asked["state"] == STATE
    assert asked["media"] == [{"type": "image", "sha256": hashlib.sha256(png).hexdigest(), "bytes": len(png)}]


async def test_what_is_no_longer_kept_is_told_so_and_the_job_stays(client, worker):
    path = await submit(client)
    worker.turns._room = 0  # of a tenant that keeps much already
    worker.work()
    gone = await client.get(path, params={"include": "request"})
    assert (gone.status_code, gone.json()["code"], gone.json()["title"]) == (
        410,
        "request_erased",
        "Request erased",
    )
    assert (await client.get(path)).json()["status"] == "succeeded"
    await client.delete(path)
    assert (await client.get(path, params={"include": "request"})).json()["code"] == "result_expired"
    unknown = await client.get("/v1/jobs/job_0", params={"include": "request"})
    assert unknown.json()["code"] == "job_not_found"


async def test_our_clients_read_it_back(service, worker):
    with Client(service) as client:
        job = client.submit("hello", {"spam": YesNo("Is it spam?")})
        worker.work()
        told = client.asked(job.id)
        async with AsyncClient(service) as other:
            assert await other.asked(job.id) == told
        assert (told["state"], told["questions"]) == ("hello", {"spam": NOUL})
        client.delete(job.id)
        with pytest.raises(errors.JobExpired):
            client.asked(job.id)


@pytest.mark.usefixtures("worker")
async def test_a_large_state_is_read_back_from_its_file(settings, serving, tmp_path):
    large = "é" * states.LARGE_BYTES
    with (
        serving(create_app(settings.model_copy(update={"state_dir": tmp_path}))) as url,
        Client(url) as client,
    ):
        job = client.submit(large, {"spam": NOUL})
        assert [path for path in tmp_path.rglob("*") if path.is_file()]
        assert client.asked(job.id)["state"] == large
