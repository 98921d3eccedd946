"""The contract of the job table, the same on every server it may run on."""

import asyncio
import json

import pytest

from d3serve.errors import (
    IdempotencyKeyReused,
    QueueFull,
)
from d3serve.schemas import DecisionRequest, JobError
from d3serve.store.limits import Limits

pytestmark = pytest.mark.anyio
BROKEN = JobError(code="internal_error", message="broken")


class TestSubmit:
    async def test_a_new_job_waits_in_its_lane(self, table):
        job = await table.jobs.get(await table.submit(metadata={"a": "b"}), "me")
        assert (job.status, job.lane, job.attempt, job.done) == ("queued", "interactive", 0, False)
        assert job.request == {"model": "vllm-sr/d3-tiny", "questions": 1, "state_tokens": 3}
        assert job.metadata == {"a": "b"}
        assert (job.queue.position, job.queue.eta_s) == (0, None)

    async def test_positions_follow_the_order_of_arrival(self, table):
        ids = [await table.submit(f"state {i}") for i in range(3)]
        assert [(await table.jobs.get(i, "me")).queue.position for i in ids] == [0, 1, 2]

    @pytest.mark.sabotage("submit", "'NX', 'PX', WAKE_MS", "'PX', WAKE_MS")
    async def test_the_first_job_wakes_and_the_next_does_not(self, table, make_request):
        first = await table.jobs.submit(make_request("a"), tenant="me")
        second = await table.jobs.submit(make_request("b"), tenant="me")
        assert (first.wake, second.wake) == (True, False)

    @pytest.mark.sabotage("submit", "local seen = redis.call('GET', K('idem', idem))", "local seen = false")
    async def test_fifty_parallel_submits_with_one_key_make_one_job(self, table, make_request):
        calls = [
            table.jobs.submit(make_request(), tenant="me", idempotency_key="k", fingerprint="f")
            for _ in range(50)
        ]
        answers = await asyncio.gather(*calls)
        assert len({answer.job_id for answer in answers}) == 1
        assert sum(answer.created for answer in answers) == 1
        assert table.redis.zcard(table.key("queued", "interactive")) == 1

    async def test_a_key_belongs_to_one_body_and_one_tenant(self, table, make_request):
        await table.jobs.submit(make_request(), tenant="me", idempotency_key="k", fingerprint="f")
        other = await table.jobs.submit(make_request(), tenant="you", idempotency_key="k", fingerprint="g")
        assert other.created
        with pytest.raises(IdempotencyKeyReused):
            await table.jobs.submit(make_request("x"), tenant="me", idempotency_key="k", fingerprint="g")

    async def test_a_full_queue_refuses_and_keeps_what_it_has(self, table):
        table.jobs._settings = table.settings.model_copy(update={"max_queued_jobs": 2})
        kept = [await table.submit(f"s{i}") for i in range(2)]
        with pytest.raises(QueueFull) as refusal:
            await table.submit("one too many")
        assert 1 <= refusal.value.details["retry_after_s"] <= 60
        assert len(table.redis.keys(table.key("job", "*"))) == len(kept)
        assert not [name for name in table.redis.keys(table.key("st", "*")) if "many" in name]

    async def test_a_queue_full_of_bytes_refuses(self, table, monkeypatch):
        monkeypatch.setattr(Limits, "queued_bytes", 3_000)
        await table.submit("x" * 2_000)
        with pytest.raises(QueueFull):
            await table.submit("y" * 2_000)
        assert (await table.jobs.stats()).lanes["interactive"].queued_jobs == 1

    @pytest.mark.parametrize("kept", [2**20, 2**34])
    async def test_the_queue_has_room_for_all_that_one_tenant_may_keep(self, table, kept):
        table.jobs._settings = table.settings.model_copy(update={"max_kept_bytes_per_tenant": kept})
        assert table.jobs._limits.arguments[1] == max(kept, 2**30)

    @pytest.mark.parametrize(
        ("chars", "asked", "lane"),
        [(400, None, "interactive"), (400_000, None, "offline"), (400, "offline", "offline")],
    )
    async def test_the_lane_follows_the_length_unless_asked_for(self, table, chars, asked, lane):
        job_id = await table.submit("x" * chars, lane=asked)
        assert (await table.jobs.get(job_id, "me")).lane == lane

    async def test_texts_stay_byte_faithful(self, table):
        body = (
            '{"model":"m","state":{"z":1,"a":[1.0,"ü \\u0000 😀",null],"é":{"2":2,"1":1}},"questions":'
            '{"b":{"type":"choice","criteria":{"y":"Y","x":null}},"a":{"type":"noul"}}}'
        )
        request = DecisionRequest.model_validate_json(body)
        await table.jobs.submit(request, tenant="me")
        [job] = table.worker().claim(1).jobs
        sent = json.loads(body)
        assert job.state == json.dumps(sent["state"], ensure_ascii=False, separators=(",", ":"))
        assert job.questions == json.dumps(sent["questions"], ensure_ascii=False, separators=(",", ":"))

    @pytest.mark.sabotage("commit", "release_state(j.group, id, j.tenant, nil)", "")
    async def test_one_state_is_stored_once_and_leaves_with_its_last_reader(self, table, make_response):
        ids = [await table.submit("same") for _ in range(3)]
        assert len(table.redis.keys(table.key("st", "*"))) == 1
        worker = table.worker(max_kept_bytes_per_tenant=0)  # no room for reading back
        turn = worker.claim(1)
        for job_id in ids:
            assert table.redis.keys(table.key("st", "*"))
            assert worker.succeed(turn.lease, job_id, make_response())
        assert not table.redis.keys(table.key("st", "*"))
        assert not table.redis.keys(table.key("need", "*"))

    @pytest.mark.sabotage(
        "submit", "'ZRANDMEMBER', K('jobs', tenant), 2", "'ZRANGE', K('jobs', tenant), 0, 1"
    )
    async def test_a_few_jobs_that_are_kept_for_long_do_not_keep_the_names_of_all_others(self, table):
        for _ in range(4):
            await table.submit("kept")
        names = table.key("jobs", "me")
        for _ in range(200):
            table.redis.delete(table.key("job", await table.submit("soon gone")))  # what its TTL does
        assert table.redis.zcard(names) < 60


class TestClaim:
    async def test_jobs_of_one_state_come_together_and_oldest_state_first(self, table):
        ids = [await table.submit(state) for state in ("a", "b", "a", "b", "a")]
        turn = table.worker().claim(1)
        groups = {}
        for job in turn.jobs:
            groups.setdefault(job.state, []).append(job.id)
        assert groups == {"=a": [ids[0], ids[2], ids[4]], "=b": [ids[1], ids[3]]}
        assert turn.jobs[0].state == "=a"

    @pytest.mark.sabotage("submit", "if redis.call('EXISTS', K('own', group)) == 1 then", "if false then")
    async def test_a_state_is_never_on_two_workers(self, table):
        await table.submit("a")
        first = table.worker("one").claim(1)
        late = await table.submit("a")
        assert not table.redis.zcard(table.key("ready", "interactive"))
        assert not table.worker("two").claim(2).jobs
        assert [job.id for job in table.worker("one").more(first.lease)] == [late]

    @pytest.mark.sabotage("claim", "tokens + cost <= max_tokens and", "")
    async def test_the_token_budget_counts_a_state_once(self, table):
        for _ in range(4):
            await table.submit("x" * 4_000)
        await table.submit("y" * 4_000)
        turn = table.worker(max_batch_tokens=1_500).claim(1)
        assert [job.state[1] for job in turn.jobs] == ["x"] * 4

    async def test_the_first_group_fits_whatever_its_size(self, table):
        await table.submit("x" * 100_000)
        assert len(table.worker(max_batch_tokens=16).claim(1).jobs) == 1

    async def test_a_claim_leaves_a_wake_for_what_it_left(self, table):
        await table.submit("x" * 4_000)
        await table.submit("y" * 4_000)
        turn = table.worker(max_batch_tokens=1_000).claim(1)
        assert turn.wakes == ["interactive"]

    async def test_a_warm_state_goes_first_until_an_older_one_is_overdue(self, table, make_response):
        await table.submit("warm")
        worker = table.worker(max_batch_tokens=16, max_batch_questions=1)
        turn = worker.claim(1)
        worker.succeed(turn.lease, turn.jobs[0].id, make_response())
        worker.free(turn.lease, "back", [turn.jobs[0].group])
        cold, warm = await table.submit("cold"), await table.submit("warm")
        turn = worker.claim(1)
        assert [job.id for job in turn.jobs] == [warm]
        worker.free(turn.lease, "back", [turn.jobs[0].group])
        table.redis.zadd(table.key("share", "interactive:me"), {self.group(table, cold): 1})
        assert [job.id for job in worker.claim(1).jobs] == [cold]

    async def test_priority_orders_a_lane_and_age_beats_priority(self, table):
        low = await table.submit("l", priority="low")
        normal = await table.submit("n")
        high = await table.submit("h", priority="high")
        worker = table.worker(max_batch_questions=1)
        assert [worker.claim(1).jobs[0].id for _ in range(3)] == [high, normal, low]
        old = await table.submit("old", priority="low")
        table.redis.zincrby(table.key("share", "interactive:me"), -61_000, self.group(table, old))
        await table.submit("new", priority="high")
        assert worker.claim(1).jobs[0].id == old

    @pytest.mark.sabotage("claim", "waits.offline > patience_ms", "waits.offline > 1e15")
    async def test_interactive_goes_first_but_offline_is_not_starved(self, table):
        offline = await table.submit("o", lane="offline")
        interactive = await table.submit("i")
        worker = table.worker(max_batch_questions=1)
        assert worker.claim(1).jobs[0].id == interactive
        table.redis.zincrby(table.key("ready", "offline"), -40_000, self.group(table, offline))
        await table.submit("i2")
        assert worker.claim(1).jobs[0].id == offline

    @pytest.mark.sabotage("claim", "return crew.offline < math.max(1, crew.live - 1)", "return true")
    async def test_one_worker_stays_out_of_the_offline_lane(self, table):
        for i in range(2):
            await table.submit(f"o{i}", lane="offline")
        one, two = table.worker("one"), table.worker("two")
        for worker in (one, two):
            worker.publish({"pid": 1})
        assert len(one.claim(1).jobs) == 1
        assert not two.claim(2).jobs

    @pytest.mark.sabotage("claim", "#turn > 0 and wants_wake", "wants_wake")
    async def test_a_claim_that_finds_nothing_wakes_nobody(self, table):
        for i in range(2):
            await table.submit(f"o{i}", lane="offline")
        busy, idle = table.worker("busy"), table.worker("idle")
        busy.publish({"pid": 1})
        idle.publish({"pid": 2})
        first = busy.claim(1)
        second = idle.claim(2)
        assert (second.jobs, second.wakes) == ([], [])
        assert busy.free(first.lease, "back").wakes == ["offline"]

    async def test_a_lane_that_a_worker_does_not_serve_is_left(self, table):
        await table.submit("o", lane="offline")
        assert not table.worker(lanes=("interactive",)).claim(1).jobs

    async def test_an_interactive_job_pulls_its_state_into_its_lane(self, table):
        await table.submit("s", lane="offline")
        await table.submit("s")
        assert len(table.worker(lanes=("interactive",)).claim(1).jobs) == 2

    @pytest.mark.sabotage("claim", "(jobs == 0 and not small)\n", "jobs == 0\n")
    async def test_beside_a_large_job_only_interactive_work_that_fits_is_taken(self, table):
        large = await table.submit("x" * 1_000)
        offline = await table.submit("offline", lane="offline")
        small = await table.submit("small")
        worker = table.worker(max_batch_tokens=100)
        assert [job.id for job in worker.claim(1, beside="another").jobs] == [small]
        assert not worker.claim(1, beside="another").jobs
        assert [[job.id for job in worker.claim(1).jobs] for _ in range(2)] == [[large], [offline]]

    @pytest.mark.sabotage("claim", "not suspect or (jobs == 0 and not small)", "not suspect or jobs == 0")
    async def test_beside_a_large_job_no_suspect_is_taken(self, table):
        await table.submit("s")
        worker = table.worker()
        worker.free(worker.claim(1).lease, "lost")
        assert not worker.claim(1, beside="another").jobs
        assert len(worker.claim(1).jobs) == 1

    async def test_a_claim_whose_answer_was_lost_answers_the_same_again(self, table):
        job_id = await table.submit()
        worker = table.worker()
        turn = worker.claim(1)
        numbers = (1, 5000, 100, 100, 8, 5000, 30000)
        again = worker._table.run("claim", turn.lease, "worker-1", *numbers, *[""] * 4, "interactive")
        [_, _, [group, state, [[first, *_]]]] = again
        assert (group, state, first) == (turn.jobs[0].group, turn.jobs[0].state, job_id)
        assert (await table.jobs.get(job_id, "me")).attempt == 1

    def group(self, table, job_id):
        return table.redis.hget(table.key("job", job_id), "group")
