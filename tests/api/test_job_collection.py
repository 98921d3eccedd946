"""The rest of `/v1/jobs`: list, retry, erase, ETag, and the event stream on a real socket."""

import json
import threading

import httpx
import pytest

from d3serve.api import routes_jobs

NOUL = {"type": "noul", "instructions": "Is it spam?"}


def body(**fields):
    return {"model": "jev-latest", "state": "hello", "questions": {"spam": NOUL}} | fields


async def submit(client, **fields):
    answer = await client.post("/v1/jobs", json=body(**fields))
    assert answer.status_code == 202, answer.text
    return answer.json()


@pytest.mark.anyio
async def test_list_pages_through_all_jobs_newest_first_and_filters(client, worker):
    ids = [
        (await submit(client, job={"metadata": {"side": "odd" if i % 2 else "even"}}))["id"] for i in range(7)
    ]
    worker.work()
    last = await submit(client)
    seen, cursor = [], None
    while True:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/v1/jobs", params=params)).json()
        assert page["object"] == "list"
        assert len(page["data"]) <= 3
        seen += [job["id"] for job in page["data"]]
        cursor = page["cursor"]
        assert page["has_more"] == (cursor is not None)
        if cursor is None:
            break
    assert seen == [last["id"], *reversed(ids)]

    async def listed(**params):
        return [job["id"] for job in (await client.get("/v1/jobs", params=params)).json()["data"]]

    assert await listed(status="queued") == [last["id"]]
    assert set(await listed(**{"metadata[side]": "odd"})) == set(ids[1::2])
    assert await listed(model="another") == []
    assert await listed(created_after=last["created_at"] + 1) == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    "query",
    ["status=done", "limit=0", "limit=101", "limit=x", "created_after=nan", "created_after=-1", "cursor=x"],
)
async def test_bad_filters_are_refused(query, client):
    answer = await client.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert query.split("=")[0] in answer.json()["detail"]


@pytest.mark.anyio
async def test_retry_runs_a_failed_job_again_under_its_id(client, worker):
    job = await submit(client)
    assert (await client.post(f"/v1/jobs/{job['id']}/retry")).status_code == 409
    worker.fail(worker.claim(), "device_error", "an illegal address")
    again = await client.post(f"/v1/jobs/{job['id']}/retry")
    assert (again.status_code, again.json()["status"], again.json()["id"]) == (202, "queued", job["id"])
    worker.work()
    done = (await client.get(job["urls"]["self"])).json()
    assert (done["status"], done["attempt"]) == ("succeeded", 2)
    assert "error" not in done
    refused = await client.post(f"/v1/jobs/{job['id']}/retry")
    assert (refused.status_code, refused.json()["code"]) == (409, "already_succeeded")
    assert refused.json()["title"] == "Already succeeded"


@pytest.mark.anyio
async def test_delete_erases_but_not_what_runs(client, worker, raw_redis):
    job = await submit(client, state="a secret state")
    turn = worker.claim()
    running = await client.delete(job["urls"]["self"])
    assert (running.status_code, running.json()["code"]) == (409, "job_not_finished")
    worker.finish(turn)
    assert (await client.delete(job["urls"]["self"])).status_code == 204
    assert (await client.get(job["urls"]["self"])).status_code == 410
    assert (await client.delete(job["urls"]["self"])).status_code == 410
    strings = [key for key in raw_redis.scan_iter() if raw_redis.type(key) == "string"]
    assert not any("secret" in raw_redis.get(key) for key in strings), "the state outlived its job"


@pytest.mark.anyio
async def test_an_etag_saves_the_body_until_the_job_changes(client, worker):
    job = await submit(client)
    worker.claim()
    first = await client.get(job["urls"]["self"])
    same = await client.get(job["urls"]["self"], headers={"If-None-Match": f'"x", W/{first.headers["etag"]}'})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == first.headers["etag"]
    await client.post(job["urls"]["cancel"])
    changed = await client.get(job["urls"]["self"], headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200


def read_events(address, path, last_id=None, until="done"):
    """Events as (id, name, data) until one is called `until` or the stream ends."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    seen, fields = [], {}
    with httpx.stream("GET", address + path, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
            elif "event" in fields:
                seen.append((fields["id"], fields["event"], json.loads(fields["data"])))
                if fields["event"] == until:
                    return seen
                fields = {}
    return seen


def test_the_event_stream_tells_a_jobs_life_once_and_resumes(service, worker):
    questions = {"line\nbreak": NOUL, "second": NOUL}
    job = httpx.post(f"{service}/v1/jobs", json=body(questions=questions)).json()
    collected = []
    reader = threading.Thread(target=lambda: collected.extend(read_events(service, job["urls"]["events"])))
    reader.start()
    while worker.turns._table.client.pubsub_numsub(worker.turns._key("done"))[0][1] == 0:
        pass
    worker.work()
    reader.join(timeout=60)
    names = [name for _, name, _ in collected]
    assert names[-1] == "done"
    assert names.count("answer") == 2
    assert [data["question"] for _, name, data in collected if name == "answer"] == list(questions)
    assert collected[-1][2]["status"] == "succeeded"

    whole = read_events(service, job["urls"]["events"])
    assert [name for _, name, _ in whole] == ["started", "progress", "answer", "answer", "done"]
    for place, (event_id, _, _) in enumerate(whole):
        rest = read_events(service, job["urls"]["events"], last_id=event_id)
        assert rest == whole[place + 1 :], "resuming repeats or drops an event"


@pytest.mark.anyio
async def test_no_cache_keeps_what_is_one_callers_own(client, worker):
    """A cache may keep a 404 or a 410 unasked; a job that is kept is asked for again."""
    path = (await submit(client))["urls"]["self"]
    worker.work()
    for method, url in (
        ("GET", path + "/result"), ("GET", path + "/events"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/unknown"),
        ("GET", "/v1/webhook-secret"), ("GET", "/v1/models"), ("GET", "/nowhere"), ("PUT", path), ("POST", "/v1/jobs"),
    ):  # fmt: skip
        answer = await client.request(method, url)
        assert answer.headers["cache-control"] == "no-store", (method, url)
    assert (await client.get(path)).headers["cache-control"] == "private, no-cache"


def test_the_event_stream_of_an_unknown_job_is_a_404(service):
    answer = httpx.get(f"{service}/v1/jobs/job_unknown/events")
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


def test_a_silent_stream_says_that_it_is_still_there(service, monkeypatch):
    monkeypatch.setattr(routes_jobs, "PING_EVERY_S", 0.05)
    job = httpx.post(f"{service}/v1/jobs", json=body()).json()
    with httpx.stream("GET", service + job["urls"]["events"], timeout=60) as answer:
        lines = answer.iter_lines()
        while next(lines) != ": still here":
            pass
