"""An event tells what happened when it happened; whatever becomes of its job later changes and loses nothing."""

import asyncio
import json
from dataclasses import replace

import pytest

from d3serve.errors import EventErased, JobExpired
from d3serve.schemas import DecisionRequest, JobError, JobOptions, WebhookTarget
from d3serve.schemas.questions import NoulQuestion
from d3serve.store.keys import Keys

pytestmark = pytest.mark.anyio
HOOK = {"url": "https://x.example/"}


@pytest.fixture
def key(settings):
    return Keys(settings.namespace)


@pytest.fixture
async def submit(store):
    """Submits a job with a webhook; gives its id."""

    async def make(target=HOOK, **options):
        question = NoulQuestion(type="noul", instructions="x")
        job = JobOptions(webhook=WebhookTarget(**target), **options)
        request = DecisionRequest(model="m", state="s", questions={"q": question}, job=job)
        return (await store.submit(request, tenant="acme")).job_id

    return make


async def told(hooks):
    """What is due, oldest first: pairs of id and body."""
    events = [await hooks.delivery(one) for one in await hooks.claim(100, 60)]
    return [
        (one.id, json.loads(one.body)) for one in sorted(events, key=lambda one: (one.created_at, one.id))
    ]


async def test_what_comes_after_an_event_does_not_change_it(submit, store, turns, hooks, finish_job):
    job_id = await submit()
    await store.cancel(job_id, "acme")
    await store.retry(job_id, "acme")
    turn = turns.claim(1)
    turns.fail(turn.lease, job_id, JobError(code="device_error", message='a "quoted" wörd', field="q"))
    turns.free(turn.lease, "back")
    await store.retry(job_id, "acme")
    turn = turns.claim(1)
    turns.fail(turn.lease, job_id, JobError(code="state_lost", message="again", retryable=True))
    turns.free(turn.lease, "back")
    job = await store.get(job_id, "acme")
    events = await told(hooks)
    assert [body["type"] for _, body in events] == ["job.canceled", "job.failed", "job.failed"]
    assert [body["data"]["status"] for _, body in events] == ["canceled", "failed", "failed"]
    assert [body["data"]["attempt"] for _, body in events] == [0, 1, 2]
    assert [body["data"].get("error") for _, body in events] == [
        None,
        {"code": "device_error", "message": 'a "quoted" wörd', "retryable": False, "field": "q"},
        {"code": "state_lost", "message": "again", "retryable": True},
    ]
    assert not any("result" in body["data"] for _, body in events)
    assert len({one for one, _ in events}) == 3
    times = [body["data"]["finished_at"] for _, body in events]
    assert times == sorted(times)
    assert times[-1] == job.finished_at
    assert {body["data"]["created_at"] for _, body in events} == {job.created_at}
    await finish_job(HOOK)
    ((_, last),) = await told(hooks)
    assert last["data"]["result"]["answers"] == {"q0": {"type": "noul", "noul": 0.5}}
    assert last["timestamp"].startswith("20")
    assert last["timestamp"].endswith("Z")


async def test_two_ends_that_look_alike_are_two_events(submit, store, hooks):
    job_id = await submit()
    for _ in range(2):
        await store.cancel(job_id, "acme")
        await store.retry(job_id, "acme")
    events = await told(hooks)
    assert [body["data"]["status"] for _, body in events] == ["canceled", "canceled"]
    assert len({one for one, _ in events}) == 2


async def test_a_job_that_is_no_longer_kept_is_told_of_with_its_result(finish_job, hooks, raw_redis, key):
    job_id = await finish_job(HOOK)
    raw_redis.delete(key("job", job_id), key("res", job_id))  # as its TTL does, while no sender runs
    ((_, body),) = await told(hooks)
    assert body["data"]["id"] == job_id
    assert body["data"]["metadata"] == {"case": "7"}
    assert body["data"]["result"]["usage"]["questions"] == 1


@pytest.mark.parametrize("expired", [False, True], ids=["kept", "expired"])
async def test_deleting_a_job_erases_what_its_deliveries_hold(
    expired, finish_job, store, hooks, raw_redis, key
):
    job_id = await finish_job(HOOK)
    await store.retry(await finish_job(HOOK, failed=True), "acme")  # another job, which stays
    before = {one.id for one in await hooks.deliveries("acme", job_id=job_id)}
    if expired:
        raw_redis.delete(key("job", job_id), key("res", job_id))
        with pytest.raises(JobExpired):
            await store.delete(job_id, "acme")
    else:
        await store.delete(job_id, "acme")
    (line,) = await hooks.deliveries("acme", job_id=job_id)
    assert ({line.id}, line.state, line.next_try_at) == (before, "erased", None)
    ((_, body),) = await told(hooks)
    assert body["data"]["id"] != job_id
    kept = [raw_redis.get(one) for one in raw_redis.keys("*told*")]
    assert len(kept) == 1
    with pytest.raises(EventErased, match="its job is deleted"):
        await hooks.redeliver(line.id, "acme")
    assert await hooks.open_bytes("acme") == len(kept[0])


async def test_another_tenant_erases_nothing(finish_job, store, hooks, raw_redis, key):
    job_id = await finish_job(HOOK)
    for _ in ("while it is kept", "after its end"):
        with pytest.raises(Exception, match="no job"):
            await store.delete(job_id, "another")
        raw_redis.delete(key("job", job_id))
    assert len(await told(hooks)) == 1


@pytest.mark.usefixtures("sender")
async def test_what_was_erased_while_it_was_sent_stays_erased(
    finish_job, store, hooks, make_receiver, monkeypatch
):
    settle, answers = hooks.settle, asyncio.Queue()

    async def noted(delivery):
        answers.put_nowait(await settle(delivery))

    monkeypatch.setattr(hooks, "settle", noted)
    receiver = make_receiver(hang=True)
    job_id = await finish_job({"url": receiver.url})
    await asyncio.to_thread(receiver.wait_for, 1)
    await store.delete(job_id, "acme")
    receiver.hang.set()
    assert not await asyncio.wait_for(answers.get(), 15)
    (line,) = await hooks.deliveries("acme", job_id=job_id)
    assert (line.state, line.next_try_at) == ("erased", None)


async def test_what_no_receiver_took_is_erased_with_its_job_too(finish_job, store, hooks):
    job_id = await finish_job(HOOK)
    (due,) = await hooks.deliveries("acme")
    await hooks.settle(replace(due, state="dead", next_try_at=None))
    await store.delete(job_id, "acme")
    kept = await hooks.delivery(due.id)
    assert (kept.state, kept.data) == ("dead", None)


async def test_every_event_of_a_job_that_was_retried_is_erased(submit, store, hooks, raw_redis):
    job_id = await submit()
    for _ in range(3):
        await store.cancel(job_id, "acme")
        await store.retry(job_id, "acme")
    await store.delete(job_id, "acme")
    assert {one.state for one in await hooks.deliveries("acme", job_id=job_id)} == {"erased"}
    assert not raw_redis.keys("*told*")


async def test_an_endpoint_is_asked_for_its_wishes_when_the_event_happens(submit, store, hooks):
    wants = await hooks.add_endpoint("acme", HOOK["url"], ["job.failed", "job.canceled"])
    deaf = await hooks.add_endpoint("acme", HOOK["url"], ["job.failed"])
    theirs = await hooks.add_endpoint("another", HOOK["url"], [])
    for endpoint in (wants, deaf, theirs):
        await store.cancel(await submit({"endpoint_id": endpoint.id}), "acme")
    ((event, _),) = await told(hooks)
    assert (await hooks.delivery(event)).endpoint_id == wants.id


async def test_what_an_earlier_version_left_in_the_outbox_is_told(finish_job, hooks, raw_redis, key):
    job_id = await finish_job(HOOK, failed=True)
    await hooks.claim(10, 60)
    raw_redis.zadd(key("hooks_due"), {f"{job_id}:job.failed": 1, "job_gone:job.failed": 1})
    ((_, body),) = await told(hooks)
    assert body["data"]["id"] == job_id
    assert body["data"]["error"]["code"] == "device_error"
