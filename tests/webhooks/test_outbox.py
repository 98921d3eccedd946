"""The outbox and the delivery log: what is kept for how long, for whom, and what is never sent again."""

import asyncio
from dataclasses import replace

import pytest

from d3serve.errors import NotFound
from d3serve.schemas import JobError
from d3serve.store import hooks as hooks_module
from d3serve.store.hooks import Delivery
from d3serve.store.keys import Keys

pytestmark = pytest.mark.anyio


@pytest.fixture
def key(settings):
    return Keys(settings.namespace)


def delivery(name="msg_1", **changes):
    """A delivery of the tenant `acme`, due at once."""
    made = Delivery(
        id=name, tenant="acme", job_id="job_1", event="job.failed", url="https://x.example/", endpoint_id=None,
        body="{}", created_at=0.0, next_try_at=0.0,
    )  # fmt: skip
    return replace(made, **changes)


async def test_a_delivery_and_its_place_in_the_log_end(hooks, raw_redis, key):
    await hooks.put(delivery())
    for name in (key("hook", "msg_1"), key("hooks_of", "acme")):
        assert 0 < raw_redis.ttl(name) <= hooks_module.KEEP_S


async def test_the_log_of_a_tenant_has_a_bound_and_keeps_the_newest(hooks, monkeypatch):
    monkeypatch.setattr(hooks_module, "MAX_LOGGED", 3)
    for number in range(6):
        await hooks.put(delivery(f"msg_{number}", created_at=float(number)))
    assert [one.id for one in await hooks.deliveries("acme")] == ["msg_5", "msg_4", "msg_3"]


async def test_a_delivery_is_its_tenants_alone(hooks):
    await hooks.put(delivery())
    assert (await hooks.delivery("msg_1", "acme")).id == "msg_1"
    with pytest.raises(NotFound):
        await hooks.delivery("msg_1", "another")
    assert await hooks.deliveries("another") == []


async def test_a_secret_signs_for_a_day_after_the_next_one_has_come(hooks):
    old = await hooks.add_endpoint("acme", "https://x.example/", [])
    rotated = await hooks.rotate_secret("acme", old.id)
    due = delivery(endpoint_id=old.id)
    assert await hooks.signing_secrets(due) == [secret for secret, _ in rotated.secrets]
    newest, (second, until) = rotated.secrets
    assert until == pytest.approx(await hooks.now_s() + 86_400, abs=5)
    await hooks.save_endpoint(replace(rotated, secrets=(newest, (second, until - 86_401))))
    assert await hooks.signing_secrets(due) == [newest[0]]


async def test_what_is_due_is_claimed_once_until_its_lease_runs_out(hooks):
    await hooks.put(delivery())
    assert await hooks.claim(10, 0.2) == ["msg_1"]
    assert await hooks.claim(10, 0.2) == []
    await hooks.postpone("msg_1", -1.0)
    assert await hooks.claim(10, 0.2) == ["msg_1"]


async def test_what_was_settled_meanwhile_is_not_postponed_into_life(hooks):
    await hooks.put(delivery())
    await hooks.drop("msg_1")
    await hooks.postpone("msg_1", -1.0)
    assert await hooks.claim(10, 1.0) == []


async def test_an_event_leaves_the_outbox_as_its_delivery_comes(hooks, raw_redis, key):
    raw_redis.zadd(key("hooks_due"), {"job_1:job.failed": 1})
    await hooks.put(delivery(), instead_of="job_1:job.failed")
    assert raw_redis.zrange(key("hooks_due"), 0, -1) == ["msg_1"]
    await hooks.put(delivery(state="delivered", next_try_at=None))
    assert raw_redis.zcard(key("hooks_due")) == 0


async def test_what_is_due_for_an_endpoint_that_is_gone_dies_unsent(hooks, sender, make_receiver):  # noqa: ARG001
    receiver = make_receiver()
    endpoint = await hooks.add_endpoint("acme", receiver.url, [])
    await hooks.delete_endpoint("acme", endpoint.id)
    await hooks.put(delivery(url=receiver.url, endpoint_id=endpoint.id))
    async with asyncio.timeout(15):
        while (kept := await hooks.delivery("msg_1")).state == "pending":  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)
    assert (kept.state, kept.tries) == ("dead", ())
    assert receiver.got == []


@pytest.mark.usefixtures("sender")
async def test_a_job_that_fails_again_after_a_retry_is_told_of_again(finish_job, store, turns, make_receiver):
    receiver = make_receiver()
    job_id = await finish_job({"url": receiver.url}, failed=True)
    await asyncio.to_thread(receiver.wait_for, 1)
    await store.retry(job_id, "acme")
    assert turns.fail(turns.claim(1).lease, job_id, JobError(code="device_error", message="broken"))
    await asyncio.to_thread(receiver.wait_for, 2)
    assert len({got.headers["webhook-id"] for got in receiver.got}) == 2
