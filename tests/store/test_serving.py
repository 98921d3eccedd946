"""A queue has one model, since any of its workers may claim any of its jobs."""

import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.sabotage("serve", "said[1] ~= ARGV[3]", "true")
@pytest.mark.sabotage("serve", "other ~= ARGV[1] and", "")
async def test_workers_of_one_model_stand_side_by_side(table):
    first, second = table.worker("first"), table.worker("second")
    for worker in (first, second, first):
        worker.publish({"load": "loading"})
        assert worker.serve("a", {"load": "loaded"}) is None
    assert first.published("load", "serves") == ["loaded", "a"]
    second.retire()
    assert first.serve("b", {"load": "loaded"}) is None, "alone, it may change its mind"


@pytest.mark.sabotage("serve", "return {other, said[1]}", "")
async def test_the_second_model_is_told_of_the_first_and_writes_nothing(table):
    first, second = table.worker("first"), table.worker("second")
    for worker in (first, second):
        worker.publish({"load": "loading"})
    assert first.serve("a", {"load": "loaded"}) is None
    assert second.serve("b", {"load": "loaded"}) == ("first", "a")
    assert second.published("load", "serves") == ["loading", None]


@pytest.mark.sabotage("serve", "int(now_ms())", "'-inf'")
async def test_the_dead_and_the_failed_forbid_nothing(table):
    dead, failed, alive = table.worker("dead"), table.worker("failed"), table.worker("alive")
    for worker in (dead, failed, alive):
        worker.publish({"load": "loading"})
    dead.serve("a", {"load": "loaded"})
    failed.publish({"serves": "a", "load": "failed"})
    table.redis.zadd(table.key("workers"), {"dead": 1})  # it has not shown itself for long
    assert alive.serve("b", {"load": "loaded"}) is None
