"""Tenants take turns, workers share what waits, and an expensive state is left to the worker that holds it."""

from collections import Counter

import pytest

pytestmark = pytest.mark.anyio


async def answer(worker, make_response, turns=1, jobs_of=None):
    """Let a worker answer some turns; the tenants of their jobs, in order."""
    tenants = []
    for _ in range(turns):
        turn = worker.claim(1)
        for job in turn.jobs:
            assert worker.succeed(turn.lease, job.id, make_response())
            tenants.append(job.tenant)
        worker.free(turn.lease, "back")
        if jobs_of is not None:
            jobs_of.append([job.tenant for job in turn.jobs])
    return tenants


async def submit_many(table, tenant, states, questions=("q",), each=1):
    return [
        await table.submit(f"{tenant} {number}", questions, tenant=tenant)
        for _ in range(each)
        for number in range(states)
    ]


class TestTurns:
    @pytest.mark.sabotage("claim", "charge(shelves, one.tenant, one.tag)", "")
    async def test_a_flood_of_one_tenant_leaves_the_next_turn_to_another(self, table, make_response):
        worker = table.worker(max_batch_questions=1)
        await submit_many(table, "flood", 5, each=5)
        await answer(worker, make_response, turns=3)
        for number in range(3):
            await table.submit(f"alone {number}", tenant="quiet")
            assert "quiet" in await answer(worker, make_response, turns=2 if number else 1)

    async def test_jobs_that_join_older_states_push_nobody_back(self, table, make_response):
        worker = table.worker(max_batch_questions=8)
        await submit_many(table, "flood", 10)
        await answer(worker, make_response)
        await table.submit("alone", tenant="quiet")
        await submit_many(table, "flood", 10, each=20)
        assert "quiet" in await answer(worker, make_response)

    @pytest.mark.sabotage("claim", "one.tag + tokens - spent", "one.tag + 1")
    async def test_what_is_shared_are_tokens_however_they_are_cut_into_jobs(self, table, make_response):
        worker = table.worker(max_batch_tokens=3_000)
        await submit_many(table, "large", 20, questions=("x" * 4_000,))
        await submit_many(table, "small", 200, questions=("x" * 400,))
        counts = Counter(await answer(worker, make_response, turns=12))
        assert counts["small"] / counts["large"] == pytest.approx(
            8, rel=0.4
        )  # a job's state and frame count too

    @pytest.mark.sabotage("claim", "elseif front then", "else")
    async def test_who_comes_and_goes_is_given_no_more_than_who_stays(self, table, make_response):
        worker = table.worker(max_batch_questions=1)
        await submit_many(table, "b", 40)
        tenants = []
        for number in range(15):
            if not table.redis.zcard(table.key("line", "interactive:a")):
                await table.submit(f"a {number}", ("x" * 400,), tenant="a")
            tenants += await answer(worker, make_response, turns=2)
        assert Counter(tenants)["a"] <= 5, "its jobs are ten times as long"

    async def test_who_was_away_is_owed_nothing(self, table, make_response):
        worker = table.worker(max_batch_questions=4)
        await submit_many(table, "steady", 60)
        await answer(worker, make_response, turns=8)
        await submit_many(table, "late", 60)
        counts = Counter(await answer(worker, make_response, turns=6))
        assert abs(counts["late"] - counts["steady"]) <= 4

    @pytest.mark.sabotage("more", "lane and not another_first(lane, tenant)", "lane")
    async def test_a_turn_is_not_made_longer_while_another_tenant_waits(self, table):
        first = await table.submit("s", tenant="flood")
        worker = table.worker()
        turn = worker.claim(1)
        assert [job.id for job in turn.jobs] == [first]
        late = await table.submit("s", tenant="flood")
        assert [job.id for job in worker.more(turn.lease)] == [late], "nobody else waits"
        await table.submit("s", tenant="flood")
        await table.submit("alone", tenant="quiet")
        assert worker.more(turn.lease) == []

    async def test_priority_orders_the_jobs_of_one_tenant_only(self, table, make_response):
        worker = table.worker(max_batch_questions=1)
        for number in range(4):
            await table.submit(f"f {number}", tenant="flood", priority="high")
        await answer(worker, make_response)
        await table.submit("alone", tenant="quiet", priority="low")
        assert await answer(worker, make_response) == ["quiet"]

    @pytest.mark.sabotage(
        "claim", "return a.tag < b.tag or (a.tag == b.tag and a.place < b.place)", "return a.place < b.place"
    )
    async def test_hundreds_of_tenants_share_one_turn(self, table):
        for number in range(40):
            await submit_many(table, f"t{number}", 2)
        turn = table.worker(max_batch_questions=40).claim(1)
        assert Counter(job.tenant for job in turn.jobs) == {f"t{number}": 1 for number in range(40)}

    async def test_offline_work_that_is_overdue_has_half_of_the_work(self, table, make_response):
        worker = table.worker(max_batch_questions=1)
        for number in range(10):
            await table.submit(f"o {number}", lane="offline")
            await table.submit(f"i {number}")
        assert (await self.lanes(table, worker, make_response, 3)) == ["interactive"] * 3
        for group in table.redis.zrange(table.key("ready", "offline"), 0, -1):
            table.redis.zincrby(table.key("ready", "offline"), -40_000, group)
            for job in table.redis.zrange(table.key("pend", group), 0, -1):
                table.redis.zincrby(table.key("pend", group), -40_000, job)
        assert Counter(await self.lanes(table, worker, make_response, 8)) == {"interactive": 4, "offline": 4}

    async def lanes(self, table, worker, make_response, turns):
        lanes = []
        for _ in range(turns):
            turn = worker.claim(1)
            lanes.append(table.redis.hget(table.key("lease", turn.lease), "lane"))
            worker.succeed(turn.lease, turn.jobs[0].id, make_response())
            worker.free(turn.lease, "back")
        return lanes


class TestPosition:
    async def test_another_tenants_flood_is_not_ahead(self, table):
        await submit_many(table, "flood", 40)
        quiet = await table.submit("alone", tenant="quiet")
        assert (await table.jobs.get(quiet, "quiet")).queue.position == 0

    async def test_as_much_of_others_as_of_ones_own_is_ahead(self, table):
        await submit_many(table, "flood", 40)
        last = (await submit_many(table, "quiet", 5))[-1]
        assert (await table.jobs.get(last, "quiet")).queue.position == pytest.approx(8, abs=1)

    async def test_jobs_that_join_older_states_are_ahead_of_younger_states(self, table):
        await submit_many(table, "me", 4)
        last = await table.submit("the last state", tenant="me")
        await submit_many(table, "me", 4, each=5)
        assert (await table.jobs.get(last, "me")).queue.position >= 16
        assert table.worker(max_batch_questions=24).claim(1).jobs[-1].id != last


class TestShares:
    @pytest.mark.sabotage("claim", "/ math.max(1, crew.hands[lane])", "/ 1")
    async def test_a_claim_leaves_their_share_to_idle_workers(self, table):
        workers = [table.worker(f"w{number}") for number in range(4)]
        for worker in workers:
            worker.publish({"load": "loaded", "lanes": "interactive,offline"})
        await submit_many(table, "me", 40)
        assert len(workers[0].claim(1).jobs) == 10
        while table.redis.zcard(table.key("ready", "interactive")):
            taken = [len(worker.claim(1).jobs) for worker in workers[1:]]
            assert max(taken) <= 10

    @pytest.mark.sabotage("claim", "said[1] ~= 'loading' and said[1] ~= 'failed' and", "")
    @pytest.mark.sabotage("claim", "(not said[2] or string.find(said[2], lane, 1, true))", "true")
    async def test_nothing_is_left_to_those_who_cannot_take_it(self, table):
        worker = table.worker("one")
        worker.publish({"load": "loaded", "lanes": "interactive,offline"})
        table.worker("two").publish({"load": "loading", "lanes": "interactive,offline"})
        table.worker("three").publish({"load": "loaded", "lanes": "offline"})
        await submit_many(table, "me", 12)
        assert len(worker.claim(1).jobs) == 12


class TestHeldStates:
    @pytest.fixture
    async def held(self, table, make_response):
        """A job whose state another worker holds, which is expensive to read again; and an idle cold worker."""
        holder, cold = table.worker("holder"), table.worker("cold")
        for worker in (holder, cold):
            worker.publish({"load": "loaded", "lanes": "interactive,offline", "read_tokens_per_s": 1_000})
        state = "long " * 1_600  # 2,000 tokens: two seconds
        await table.submit(state)
        turn = holder.claim(1)
        holder.succeed(turn.lease, turn.jobs[0].id, make_response())
        holder.free(turn.lease, "back", [turn.jobs[0].group])
        job_id = await table.submit(state)
        # It has waited for nothing yet, however slow the machine.
        table.redis.hincrby(table.key("job", job_id), "created", 60_000)
        return holder, cold, job_id

    @pytest.mark.sabotage("claim", "if class < 4 then", "if true then")
    async def test_a_cold_worker_leaves_an_expensive_state_to_the_one_that_holds_it(self, held):
        holder, cold, job_id = held
        turn = cold.claim(1)
        assert (turn.jobs, turn.wakes) == ([], ["interactive"])
        assert [job.id for job in holder.claim(1).jobs] == [job_id]

    async def test_but_no_longer_than_reading_it_again_takes(self, table, held):
        _, cold, job_id = held
        table.redis.hincrby(table.key("job", job_id), "created", -62_500)
        assert [job.id for job in cold.claim(1).jobs] == [job_id]

    @pytest.mark.sabotage("claim", "if cost_ms < SWEEP_MS then", "if false then")
    async def test_a_state_that_is_soon_read_again_is_left_to_nobody(self, held):
        _, cold, job_id = held
        cold.publish({"read_tokens_per_s": 100_000})
        assert [job.id for job in cold.claim(1).jobs] == [job_id]

    @pytest.mark.sabotage("claim", "hops <= crew.live and", "")
    async def test_idle_workers_do_not_wake_each_other_for_ever(self, held):
        _, cold, _ = held
        passed_on = 0
        while cold.claim(1).wakes and passed_on < 10:
            passed_on += 1
        assert passed_on == 2, "once to each that lives"

    @pytest.mark.sabotage("claim", "not crew.busy[holder]", "true")
    async def test_a_holder_that_is_busy_need_not_be_woken(self, table, held):
        _, cold, _ = held
        table.redis.hset(
            table.key("lease", "busy"), mapping={"worker": "holder", "pid": 1, "lane": "interactive"}
        )
        table.redis.zadd(table.key("leases"), {"busy": 9e15})
        assert (cold.claim(1).jobs, cold.claim(1).wakes) == ([], [])


class TestShelves:
    @pytest.mark.sabotage("claim", "{lane, shelf(lane, revision)}", "{lane}")
    async def test_jobs_that_name_a_revision_are_for_workers_of_it(self, table, make_request):
        job_id = (await table.jobs.submit(make_request("pinned"), tenant="me", revision="aaa")).job_id
        other, right = table.worker("other"), table.worker("right")
        other.revision, right.revision = "bbb", "aaa"
        anyone = await table.submit("anyone's")
        assert [job.id for job in other.claim(1).jobs] == [anyone]
        assert [job.id for job in right.claim(1).jobs] == [job_id]

    async def test_a_tenant_gains_nothing_by_naming_a_revision(self, table, make_request, make_response):
        worker = table.worker(max_batch_questions=1)
        worker.revision = "aaa"
        for number in range(12):
            await table.jobs.submit(make_request(f"p {number}"), tenant="both", revision="aaa")
        await submit_many(table, "both", 12)
        await submit_many(table, "one", 12)
        counts = Counter(await answer(worker, make_response, turns=12))
        assert abs(counts["both"] - counts["one"]) <= 2

    async def test_what_an_earlier_version_left_is_served(self, table, make_response):
        old = await submit_many(table, "me", 5)
        for name in ("share", "ring", "line", "waiting", "pace"):
            table.redis.delete(*table.redis.keys(table.key(name) + "*"), "none")
        for group in table.redis.keys(table.key("grp", "*")):
            table.redis.hdel(group, "tenant", "revision")
        new = await table.submit("new", tenant="you")
        worker = table.worker(max_batch_questions=2)
        await answer(worker, make_response, turns=4)
        assert {(await table.jobs.get(job_id, "me")).status for job_id in old} == {"succeeded"}
        assert (await table.jobs.get(new, "you")).status == "succeeded"
