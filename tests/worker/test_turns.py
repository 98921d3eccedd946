"""A real worker on a real broker: what a turn does for the jobs it claims."""

import asyncio
import json

import pytest

from d3serve.schemas import DecisionRequest, JobOptions
from d3serve.schemas.questions import NoulQuestion

pytestmark = pytest.mark.anyio


async def test_two_jobs_with_one_state_cost_one_prefill_and_usage_shows_it(service):
    ids = [await service.submit("the same state", wake=False) for _ in range(2)]
    worker = service.start_worker()
    jobs = await service.finish_all(ids)
    assert service.prefills() == 1
    assert sorted(job.usage.state_cached for job in jobs) == [False, True]
    first, second = sorted(jobs, key=lambda job: job.usage.state_cached)
    assert first.usage.computed_tokens - second.usage.computed_tokens == first.usage.state_tokens > 0
    events = await worker.events("job.done", 2)
    assert {event["job_id"] for event in events} == set(ids)
    for event in events:
        assert {"state_key", "attempt", "questions", "state_tokens", "state_cached"} <= event.keys()


async def test_nothing_of_state_or_answers_is_logged(service):
    text = "the patient said fake:crash"
    job_id = await service.submit(text)
    worker = service.start_worker()
    job = await service.finish(job_id)
    assert (job.status, job.error.code) == ("failed", "internal_error")
    assert "patient" not in job.error.message
    assert await worker.events("job.crashed")
    assert "patient" not in worker.log.read_text()


async def test_answers_keep_the_order_of_the_questions(service):
    job_id = await service.submit("s", questions=12)
    service.start_worker()
    await service.finish(job_id)
    result = json.loads(await service.jobs.result(job_id, "me"))
    assert list(result["answers"]) == [f"q{i}" for i in range(12)]
    assert result["model"] == "fake"


async def test_late_joiners_are_answered_while_the_state_is_at_hand(service):
    service.start_worker("state_ms=400&cache=0")
    await service.ready()
    first = await service.submit("s")
    await service.running(first)
    late = await service.submit("s")
    jobs = await service.finish_all([first, late])
    assert [job.attempt for job in jobs] == [1, 1]
    assert len(service.passes()) == 2
    assert len({a_pass["pid"] for a_pass in service.passes()}) == 1


async def test_a_job_too_long_fails_and_its_neighbours_do_not(service):
    long = await service.submit("x" * 4_000, wake=False)
    short = await service.submit("short")
    service.start_worker("max_length=500")
    refused, answered = await service.finish_all([long, short])
    assert (refused.status, refused.error.code) == ("failed", "max_tokens_exceeded")
    assert refused.error.field == "questions.q0"
    assert answered.status == "succeeded"


async def test_partial_answers_name_the_questions_that_have_none(service):
    service.start_worker("max_length=60")
    questions = {
        "short": NoulQuestion(type="noul"),
        "long": NoulQuestion(type="noul", instructions="y" * 1_000),
    }
    results = {}
    for mode in ("partial", "fail"):
        options = JobOptions(on_question_error=mode)
        request = DecisionRequest(model="fake", state="s", questions=questions, job=options)
        submitted = await service.jobs.submit(request, tenant="me")
        await asyncio.to_thread(service.send_wake, submitted.lane)
        results[mode] = await service.finish(submitted.job_id)
        if mode == "partial":
            answers = json.loads(await service.jobs.result(submitted.job_id, "me"))["answers"]
            assert [answers[name]["type"] for name in ("short", "long")] == ["noul", "error"]
            assert results[mode].progress.questions_done == 2, "a refused question is done with too"
            assert answers["long"]["error"]["code"] == "max_tokens_exceeded"
    assert results["partial"].status == "succeeded"
    assert (results["fail"].status, results["fail"].error.field) == ("failed", "questions.long")


async def test_a_small_job_waits_for_one_batch_of_a_large_one_not_for_all(service):
    service.start_worker("question_ms=20", max_batch_questions=8)
    await service.ready()
    large = await service.submit("large", questions=256)
    await service.running(large)
    small = await service.finish(await service.submit("small"))
    answered_after = len(service.passes())
    assert (small.status, small.attempt) == ("succeeded", 1)
    job = await service.finish(large)
    assert (job.status, job.attempt, job.usage.questions) == ("succeeded", 1, 256)
    assert answered_after < len(service.passes()) == 256 / 8 + 1
    assert job.finished_at > small.finished_at


@pytest.mark.parametrize(
    ("fault", "code"),
    [("oom", "out_of_device_memory"), ("memory-error", "internal_error"), ("nan", "invalid_model_output")],
)
async def test_the_job_at_fault_fails_alone_and_the_worker_goes_on(service, fault, code):
    good = [await service.submit(f"good {i}", wake=False) for i in range(5)]
    bad = await service.submit(f"fake:{fault}", wake=False)
    more = [await service.submit(f"more {i}", wake=False) for i in range(5)]
    service.start_worker()
    jobs = await service.finish_all([*good, *more])
    assert {job.status for job in jobs} == {"succeeded"}
    failed = await service.finish(bad)
    assert (failed.status, failed.error.code, failed.attempt) == ("failed", code, 1)
    assert (await service.finish(await service.submit("after"))).status == "succeeded"
    assert len({a_pass["pid"] for a_pass in service.passes()}) == 1


async def test_a_job_canceled_while_queued_is_never_run(service):
    job_id = await service.submit("s", wake=False)
    await service.jobs.cancel(job_id, "me")
    service.start_worker()
    after = await service.submit("t")
    await service.finish(after)
    assert service.prefills() == 1
    assert (await service.jobs.get(job_id, "me")).status == "canceled"


async def test_a_job_canceled_while_running_stays_canceled(service):
    service.start_worker("state_ms=600")
    await service.ready()
    job_id = await service.submit("s")
    await service.running(job_id)
    assert (await service.jobs.cancel(job_id, "me")).status == "canceled"
    await service.finish(await service.submit("after"))
    job = await service.jobs.get(job_id, "me")
    assert (job.status, job.usage) == ("canceled", None)


async def test_the_main_process_never_loads_torch(service):
    worker = service.start_worker()
    await service.ready()
    assert not any("torch" in library for library in worker.libraries())


async def test_a_job_records_how_long_its_pass_took(service):
    ids = [await service.submit("s", wake=False) for _ in range(2)]
    service.start_worker("state_ms=60")
    jobs = await service.finish_all(ids)
    assert jobs[0].pass_ms == jobs[1].pass_ms, "one pass answered both"
    turn_ms = (jobs[0].finished_at - jobs[0].started_at) * 1000
    assert 60 <= jobs[0].pass_ms <= turn_ms + 1
