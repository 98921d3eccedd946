"""The outbox and the delivery log: what is kept for how long, for whom, and what is never sent again."""

import asyncio
from dataclasses import replace

import pytest

from d3serve.errors import EventErased, NotFound
from d3serve.store.keys import Keys
from d3serve.webhooks.outbox import Try

pytestmark = pytest.mark.anyio
KEEP_S = 7 * 86_400
LOGGED = 10_000


@pytest.fixture
def key(settings):
    return Keys(settings.namespace)


@pytest.fixture
def opened(hooks):
    """Makes a delivery of a tenant, due at once."""

    async def make(tenant="acme", *, endpoint_id=None, data="{}", url="https://x.example/"):
        return await hooks.open_delivery(tenant, "job.failed", url, endpoint_id, data)

    return make


def ended(delivery, state):
    return replace(delivery, state=state, next_try_at=None, tries=(Try(1.0, 500, "x", 1),))


async def test_an_event_lasts_seven_days_and_its_line_seven_more(opened, hooks, raw_redis, key):
    made = await opened()
    assert KEEP_S - 60 < raw_redis.ttl(key("told", made.id)) <= KEEP_S
    assert KEEP_S - 60 < raw_redis.ttl(key("hooks_of", "acme")) <= KEEP_S
    assert raw_redis.ttl(key("delivery", made.id)) == -1, "its line goes before it is settled"
    await hooks.settle(ended(made, "dead"))
    assert KEEP_S - 60 < raw_redis.ttl(key("delivery", made.id)) <= KEEP_S


async def test_a_redelivery_lasts_as_long_as_an_event(opened, hooks, raw_redis, key):
    made = await opened()
    await hooks.settle(ended(made, "dead"))
    raw_redis.expire(key("told", made.id), 100)
    await hooks.redeliver(made.id, "acme")
    assert KEEP_S - 60 < raw_redis.ttl(key("told", made.id)) <= KEEP_S
    assert raw_redis.ttl(key("delivery", made.id)) == -1


async def test_what_has_no_text_any_more_is_due_no_more(opened, hooks, raw_redis, key):
    made = await opened()
    raw_redis.delete(key("told", made.id))  # as its seven days do
    assert not await hooks.settle(made)
    await hooks.settle(ended(made, "dead"))
    with pytest.raises(EventErased):
        await hooks.redeliver(made.id, "acme")
    assert await hooks.claim(10, 1.0) == []


async def test_what_waited_longer_than_it_is_kept_dies_unsent(
    opened, hooks, raw_redis, key, make_receiver, sender_of
):
    receiver = make_receiver()
    made = await opened(url=receiver.url)
    raw_redis.delete(key("told", made.id))
    async with sender_of(hooks), asyncio.timeout(60):
        while (settled := await hooks.delivery(made.id)).state == "pending":  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)
    assert (settled.state, settled.tries, receiver.got) == ("dead", (), [])
    assert await hooks.open_bytes("acme") == 0


@pytest.mark.parametrize(("state", "kept"), [("delivered", False), ("dead", True), ("disabled", True)])
async def test_only_what_no_receiver_has_taken_is_kept(state, kept, opened, hooks):
    made = await opened(data='{"a":1}')
    await hooks.settle(ended(made, state))
    shown = await hooks.delivery(made.id)
    assert (shown.state, shown.data, len(shown.tries)) == (state, '{"a":1}' if kept else None, 1)
    if kept:
        again = await hooks.redeliver(made.id, "acme")
        assert (again.body, again.schedule_from) == (made.body, 1)
        assert await hooks.claim(10, 1.0) == [made.id]
    else:
        with pytest.raises(EventErased, match="delivered delivery is no longer kept"):
            await hooks.redeliver(made.id, "acme")


async def test_the_bytes_that_wait_are_counted_exactly(opened, hooks):
    one, two = await opened(data='{"a":1}'), await opened()
    other = await opened("another")
    assert (await hooks.open_bytes("acme"), await hooks.open_bytes("another")) == (9, 2)
    await hooks.settle(replace(one, tries=(Try(1.0, 500, "x", 1),)))
    assert await hooks.open_bytes("acme") == 9, "a try changed it"
    await hooks.settle(ended(one, "dead"))
    await hooks.settle(ended(one, "dead"))
    assert await hooks.open_bytes("acme") == 2
    await hooks.redeliver(one.id, "acme")
    await hooks.redeliver(one.id, "acme")
    assert await hooks.open_bytes("acme") == 9
    for delivery in (one, two, other):
        await hooks.settle(ended(delivery, "delivered"))
    assert (await hooks.open_bytes("acme"), await hooks.open_bytes("another")) == (0, 0)


async def test_the_log_of_a_tenant_has_a_bound_and_takes_the_keys_along(opened, hooks, raw_redis, key):
    dead, waiting = await opened(), await opened()
    await hooks.settle(ended(dead, "dead"))
    later = await hooks.now_s() * 1000 + 60_000
    for start in range(0, LOGGED, 1_000):
        raw_redis.zadd(key("hooks_of", "acme"), {f"msg_{n}": later + n for n in range(start, start + 1_000)})
    newest = await opened()
    assert raw_redis.zcard(key("hooks_of", "acme")) == LOGGED
    for name in ("delivery", "told"):
        assert not raw_redis.exists(key(name, dead.id)), "it is no longer listed, and still kept"
        assert raw_redis.exists(key(name, newest.id)) == raw_redis.exists(key(name, waiting.id)) == 1
    await hooks.settle(ended(waiting, "dead"))
    assert not raw_redis.exists(key("delivery", waiting.id), key("told", waiting.id))


async def test_every_tenant_gets_its_share_of_a_claim(opened, hooks):
    """However much of one waits, and for however long."""
    flood = {(await opened("greedy")).id for _ in range(50)}
    small = [(await opened(tenant)).id for tenant in ("a", "b") for _ in range(3)]
    first = await hooks.claim(12, 30)
    assert set(small) <= set(first)
    assert len(flood & set(first)) == 4
    assert len(set(await hooks.claim(12, 30)) & flood) == 12, "places that nobody wants stay empty"
    late = (await opened("z")).id
    assert late in await hooks.claim(2, 30)


async def test_one_delivery_that_is_due_later_hides_no_other(opened, hooks):
    made = {(await opened()).id: None for _ in range(2)}
    (first,) = await hooks.claim(1, 30)
    later = await hooks.now_s() + 3_600
    await hooks.settle(replace(await hooks.delivery(first), next_try_at=later))
    assert await hooks.claim(10, 30) == [one for one in made if one != first]


async def test_who_was_served_last_comes_last_however_long_the_rest_has_waited(opened, hooks):
    for _ in range(3):
        await hooks.postpone(await opened("z"), -10.0)
    other = await opened("b")
    assert len(set(await hooks.claim(1, 30)) - {other.id}) == 1
    assert await hooks.claim(1, 30) == [other.id]


async def test_of_more_tenants_than_places_the_first_to_wait_is_served_first(opened, hooks):
    made = [(await opened(f"tenant {9 - number}")).id for number in range(9)]
    again = (await opened("tenant 9")).id
    claims = [await hooks.claim(3, 30) for _ in range(4)]
    assert {one for claim in claims[:3] for one in claim} == set(made)
    assert claims[3] == [again]


async def test_a_delivery_is_its_tenants_alone(opened, hooks):
    made = await opened()
    assert (await hooks.delivery(made.id, "acme")).id == made.id
    with pytest.raises(NotFound):
        await hooks.delivery(made.id, "another")
    with pytest.raises(NotFound):
        await hooks.redeliver(made.id, "another")
    assert await hooks.deliveries("another") == []


async def test_a_secret_signs_for_a_day_after_the_next_one_has_come(opened, hooks):
    old = await hooks.add_endpoint("acme", "https://x.example/", [])
    rotated = await hooks.rotate_secret("acme", old.id)
    due = await opened(endpoint_id=old.id)
    assert (await hooks.target(due)).secrets == [secret for secret, _ in rotated.secrets]
    newest, (second, until) = rotated.secrets
    assert until == pytest.approx(await hooks.now_s() + 86_400, abs=5)
    await hooks.save_endpoint(replace(rotated, secrets=(newest, (second, until - 86_401))))
    assert (await hooks.target(due)).secrets == [newest[0]]


async def test_what_is_due_is_claimed_once_until_its_lease_runs_out(opened, hooks):
    made = await opened()
    assert await hooks.claim(10, 30.0) == [made.id]
    assert await hooks.claim(10, 30.0) == []
    await hooks.postpone(made, -1.0)
    assert await hooks.claim(10, 0.1) == [made.id]
    async with asyncio.timeout(60):
        while not await hooks.claim(10, 30.0):  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)


async def test_what_was_settled_meanwhile_is_not_postponed_into_life(opened, hooks):
    made = await opened()
    await hooks.settle(ended(made, "delivered"))
    await hooks.postpone(made, -1.0)
    assert await hooks.claim(10, 1.0) == []


async def test_a_sender_that_slept_cannot_undo_what_another_has_settled(opened, hooks):
    made = await opened()
    assert await hooks.settle(ended(made, "delivered"))
    late = replace(made, next_try_at=0.0, tries=(Try(1.0, None, "no answer", 1),))
    assert not await hooks.settle(late)
    assert not await hooks.settle(ended(made, "dead"))
    assert (await hooks.delivery(made.id)).state == "delivered"
    assert await hooks.claim(10, 1.0) == []


async def test_what_is_due_for_an_endpoint_that_is_gone_dies_unsent(opened, hooks, sender, make_receiver):  # noqa: ARG001
    receiver = make_receiver()
    endpoint = await hooks.add_endpoint("acme", receiver.url, [])
    await hooks.delete_endpoint("acme", endpoint.id)
    made = await opened(url=receiver.url, endpoint_id=endpoint.id)
    async with asyncio.timeout(60):
        while (kept := await hooks.delivery(made.id)).state == "pending":  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)
    assert (kept.state, kept.tries) == ("dead", ())
    assert receiver.got == []


async def test_a_redelivery_goes_where_the_endpoint_has_moved(opened, hooks, sender, make_receiver):  # noqa: ARG001
    old, new = make_receiver((410, {})), make_receiver()
    endpoint = await hooks.add_endpoint("acme", old.url, [])
    made = await opened(url=old.url, endpoint_id=endpoint.id)
    async with asyncio.timeout(60):
        while (await hooks.delivery(made.id)).state != "disabled":  # noqa: ASYNC110 # in Redis
            await asyncio.sleep(0.02)
    await hooks.save_endpoint(replace(endpoint, url=new.url))
    await hooks.redeliver(made.id, "acme")
    await asyncio.to_thread(new.wait_for, 1)
    assert new.got[0].body == old.got[0].body
    assert (await hooks.endpoint("acme", endpoint.id)).disabled_reason is None
