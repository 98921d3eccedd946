"""What an identical request gets: the same job while it is the answer, a new one when it is not."""

import asyncio

import pytest

from d3serve.api import served
from d3serve.api.validation import check_request
from d3serve.settings import Settings
from d3serve.store import encode

pytestmark = pytest.mark.anyio
NOUL = {"type": "noul", "instructions": "Is it spam?"}
SYSTEM_ONE = {"model": "jev-latest", "state": "hello", "questions": {"spam": NOUL}}
OPENAI = {
    "model": "jev-latest",
    "input": "hello",
    "questions": [{"type": "predicate", "instructions": "Is it spam?"}],
}
CALLS = {
    "systemone": ("/v1/systemone", SYSTEM_ONE),
    "decisions, System One": ("/v1/decisions", SYSTEM_ONE),
    "decisions, OpenAI": ("/v1/decisions", OPENAI),
}
KEYS = [{}, {"Idempotency-Key": "one"}]
V1 = {"revision": None, "identity": "v1"}
V2 = {"revision": None, "identity": "v2"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Models are read anew at every request."""
    monkeypatch.setattr(served, "REFRESH_S", 0.0)


def body(**job):
    return SYSTEM_ONE | {"job": job}


def job_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers["location"].rpartition("/")[2]


async def gone(raw_redis, job_id):
    """Time passes until the job's retention has ended."""
    for key in raw_redis.keys(f"*{job_id}"):
        if not key.endswith(f"gone:{job_id}"):
            raw_redis.delete(key)


@pytest.mark.parametrize("call", CALLS)
async def test_an_answer_is_given_again_only_while_the_same_weights_serve(call, client, worker, take_turns):
    """A folder replaced under its name within ten minutes: the old weights' answers came back as the new ones'."""
    path, sent = CALLS[call]
    worker.show_itself(**V1)
    with take_turns():
        first = await client.post(path, json=sent)
        again = await client.post(path, json=sent)
        assert job_of(again) == job_of(first), "the same weights would say the same"
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        worker.show_itself(**V2)
        other = await client.post(path, json=sent)
        assert job_of(other) != job_of(first)
        assert "idempotency-replayed" not in other.headers
        assert job_of(await client.post(path, json=sent)) == job_of(other)
        worker.show_itself(**V1)
        assert job_of(await client.post(path, json=sent)) == job_of(first), "what they said, they would say"


async def test_while_two_weights_serve_or_none_no_answer_is_given_again(client, settings, worker, take_turns):
    worker.show_itself(**V1)
    with take_turns():
        first = await client.post("/v1/systemone", json=SYSTEM_ONE)
        second = type(worker)(settings)
        second.turns.worker = "hand:2"
        second.show_itself(**V2)
        assert job_of(await client.post("/v1/systemone", json=SYSTEM_ONE)) != job_of(first)
        second.turns.retire()
        second.turns.close()
        worker.turns.retire()
        assert job_of(await client.post("/v1/systemone", json=SYSTEM_ONE)) != job_of(first)


async def test_a_key_of_the_clients_own_is_a_promise_whatever_serves(client, worker, take_turns):
    worker.show_itself(**V1)
    with take_turns():
        first = await client.post("/v1/systemone", json=SYSTEM_ONE, headers=KEYS[1])
        worker.show_itself(**V2)
        again = await client.post("/v1/systemone", json=SYSTEM_ONE, headers=KEYS[1])
    assert job_of(again) == job_of(first)
    assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("headers", KEYS, ids=["no key", "key"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_whose_job_is_gone_is_answered_anew_each_time(
    call, headers, client, worker, take_turns, raw_redis
):
    """Erased twice, or kept for a minute only, the third call met 410 for the rest of ten minutes."""
    path, sent = CALLS[call]
    worker.show_itself()
    seen = set()
    with take_turns():
        for turn in range(6):
            job_id = job_of(await client.post(path, json=sent, headers=headers))
            seen.add(job_id)
            if turn % 2:
                assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
            else:
                await gone(raw_redis, job_id)
    assert len(seen) == 6


async def test_a_submission_whose_job_is_gone_makes_a_new_one(client, worker, raw_redis):
    worker.show_itself()
    seen = []
    for erase in (True, False, True, False):
        answer = await client.post("/v1/jobs", json=SYSTEM_ONE, headers=KEYS[1])
        assert answer.status_code == 202, answer.text
        assert "idempotency-replayed" not in answer.headers
        seen.append(answer.json()["id"])
        again = await client.post("/v1/jobs", json=SYSTEM_ONE, headers=KEYS[1])
        assert (again.json()["id"], again.headers["idempotency-replayed"]) == (seen[-1], "true")
        if erase:
            assert (await client.delete(f"/v1/jobs/{seen[-1]}")).status_code == 204
        else:
            worker.work()
            await gone(raw_redis, seen[-1])
    assert len(set(seen)) == 4
    other = await client.post("/v1/jobs", json=body(priority="low"), headers=KEYS[1])
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused"), (
        "the key is still taken"
    )


@pytest.mark.parametrize("headers", KEYS, ids=["no key", "key"])
@pytest.mark.parametrize("end", ["canceled", "expired", "failed by us", "input lost"])
async def test_a_call_whose_job_ended_without_fault_of_its_own_runs(
    end, headers, client, worker, take_turns, raw_redis
):
    """An expired job was answered 410 to every identical call."""
    sent = body(expires_in_s=1)
    accepted = await client.post("/v1/systemone", json=sent, headers=headers | {"Prefer": "respond-async"})
    job_id = accepted.json()["id"]
    if end == "expired":
        while (await client.get(f"/v1/jobs/{job_id}?wait=5")).json()["status"] != "expired":
            worker.turns.reap()
    elif end == "failed by us":
        worker.fail(worker.claim(), "device_error", "gone")
    else:
        assert (await client.post(f"/v1/jobs/{job_id}/cancel")).json()["status"] == "canceled"
    if end == "input lost":
        await asyncio.to_thread(raw_redis.delete, *raw_redis.keys(f"*body:{job_id}"))
    with take_turns():
        answer = await client.post("/v1/systemone", json=sent, headers=headers)
    assert (job_of(answer) == job_id) == (end != "input lost")


async def while_it_waits(call, act):
    """The answer to `call`, whose job is acted on as soon as there is one."""
    waiting = asyncio.create_task(call)
    while not await act():
        assert not waiting.done(), waiting.result().text
    return await waiting


@pytest.fixture
def erase(client):
    """Erases the job that waits; False while there is none."""

    async def act():
        for job in (await client.get("/v1/jobs?status=queued")).json()["data"]:
            return (await client.delete(job["urls"]["self"])).status_code == 204
        return False

    return act


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decisions"])
async def test_a_call_whose_job_expires_or_is_erased_meanwhile_may_be_sent_again(path, client, worker, erase):
    erased = await while_it_waits(client.post(path, json=SYSTEM_ONE), erase)

    async def reap():
        return (await asyncio.to_thread(worker.turns.reap)).ended

    expired = await while_it_waits(client.post(path, json=body(expires_in_s=1)), reap)
    for answer in (erased, expired):
        assert (answer.status_code, answer.json()["code"]) == (504, "call_expired")
        assert answer.headers["retry-after"]


async def test_a_submission_whose_job_is_erased_while_it_waits_was_taken(client, erase):
    call = client.post("/v1/jobs", json=SYSTEM_ONE, headers={"Prefer": "wait=5"})
    assert (await while_it_waits(call, erase)).status_code == 202


async def test_a_wait_that_runs_out_answers_with_the_job_as_it_is(client, worker):
    """It said queued of a job that ran."""

    async def claim():
        return (await asyncio.to_thread(worker.claim)).jobs

    call = client.post("/v1/jobs", json=SYSTEM_ONE, headers={"Prefer": "wait=1"})
    answer = await while_it_waits(call, claim)
    assert answer.status_code == 202
    assert answer.json()["status"] == "running"
    assert answer.json() == (await client.get(answer.headers["location"])).json()


async def test_a_revision_is_kept_with_the_job_and_an_unknown_one_refused(client, worker):
    worker.show_itself()
    pinned = (await client.post("/v1/jobs", json=SYSTEM_ONE | {"model": "vllm-sr/d3-tiny@abc123"})).json()
    assert pinned["request"]["revision"] == "abc123"
    free = (await client.post("/v1/jobs", json=SYSTEM_ONE)).json()
    assert "revision" not in free["request"]
    for name in ("vllm-sr/d3-tiny@other", "vllm-sr/d3-tiny@", "jev-latest@abc123", "@abc123", "abc123"):
        answer = await client.post("/v1/jobs", json=SYSTEM_ONE | {"model": name})
        assert (answer.status_code, answer.json()["code"]) == (404, "model_not_found"), name
        assert "vllm-sr/d3-tiny@abc123" in answer.json()["detail"]
    stored = {row["id"]: row["request"] for row in (await client.get("/v1/jobs")).json()["data"]}
    assert stored[pinned["id"]] == pinned["request"]
    assert stored[free["id"]] == free["request"]


async def test_a_key_from_before_an_upgrade_is_not_said_to_have_had_another_body(client, monkeypatch):
    first = await client.post("/v1/jobs", json=SYSTEM_ONE, headers=KEYS[1])
    monkeypatch.setattr(encode, "FINGERPRINT", encode.FINGERPRINT + 1)
    again = await client.post("/v1/jobs", json=SYSTEM_ONE, headers=KEYS[1])
    assert (again.status_code, again.json()["code"]) == (422, "idempotency_key_reused")
    assert "cannot tell whether the body is the same" in again.json()["detail"]
    assert again.json()["job_id"] == first.json()["id"]


def test_the_version_of_fingerprints_goes_up_with_how_they_are_made():
    request = encode.encode_request(check_request(body(priority="low", metadata={"a": "b"}), Settings()))
    version, _, made = request.fingerprint.partition(":")
    assert (int(version), made[:16]) == (1, "130efbbfb7d74daa"), "raise encode.FINGERPRINT, and pin both anew"
