"""One trace leads from a caller's request through every process to its webhook, and says nothing that anybody wrote."""

import itertools
import json
from types import SimpleNamespace

import httpx
import pytest
from traced import CALLER, SECRET, UNSAMPLED

QUESTIONS = {
    SECRET: {"type": "choice", "criteria": {f"{SECRET} a": SECRET, "b": None}, "instructions": SECRET}
}
HISTOGRAMS = ("queue_wait", "tokenize", "pass", "job")
STEPS = {
    "d3serve-api": {"POST /v1/jobs"},
    "d3serve-worker": {"queue", "claim", "tokenize", "pass", "commit"},
    "d3serve-webhooks": {"webhook"},
}


def post(service, path="/v1/jobs", *, state=SECRET, trace=CALLER, sampled="01", **job):
    body = {"model": "fake", "state": state, "questions": QUESTIONS, "job": job}
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-{sampled}", "Prefer": "wait=60"}
    return httpx.post(f"{service.url}{path}?{SECRET}={SECRET}", json=body, headers=headers, timeout=90)


def batch_of(service):
    """Begin a batch of one line."""
    body = {"model": "fake", "state": SECRET, "questions": QUESTIONS}
    line = {"custom_id": SECRET, "method": "POST", "url": "/v1/systemone", "body": body}
    sent = {"file": (SECRET, json.dumps(line))}
    file = httpx.post(f"{service.url}/v1/files", data={"purpose": "batch"}, files=sent)
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/systemone", "completion_window": "24h"}
    assert httpx.post(f"{service.url}/v1/batches", json=asked).is_success


@pytest.fixture(scope="module")
def told(service, collector):
    """What was exported and counted while jobs of every kind ran."""
    before = service.metrics()
    hook = {"url": f"{collector.url}/{SECRET}"}
    alone = post(service, webhook=hook, metadata={SECRET: SECRET})
    assert alone.json()["status"] == "succeeded", alone.text
    crashed = post(service, state=f"fake:crash {SECRET}", trace="c" * 32)
    assert crashed.json()["status"] == "failed", crashed.text
    assert post(service, trace=UNSAMPLED, sampled="00").is_success
    assert httpx.get(f"{service.url}/v1/jobs/{SECRET}").status_code == 404
    assert post(service, "/v1/count", trace="d" * 32).is_success
    batch_of(service)
    with service.worker_held():
        bodies = [{"model": "fake", "state": f"{SECRET} {n}", "questions": QUESTIONS} for n in range(3)]
        together = [httpx.post(f"{service.url}/v1/jobs", json=body) for body in bodies]
    ids = [each.json()["id"] for each in together]
    whole = set().union(*STEPS.values())
    wanted = {
        alone.json()["id"]: whole,
        **dict.fromkeys(ids, whole - {"webhook"}),
        crashed.json()["id"]: {"commit"},
    }
    spans = collector.wait_for(
        lambda spans: (
            all(of(spans, job_id).keys() >= names for job_id, names in wanted.items())
            and {"POST /v1/count", "count"} <= {one.name for one in spans}
            and {"batch line", *STEPS["d3serve-worker"]} <= {one.name for one in line_of(spans)}
        )
    )
    ended = 'd3serve_job_seconds_count{lane="interactive"}'
    after = service.metrics_when(lambda now: now[ended] - before[ended] >= 6)  # the last turn has been freed
    return SimpleNamespace(
        before=before, after=after, spans=spans, ids=ids, hooks=collector.hooks,
        exported=b"".join(collector.exported), alone=alone.json()["id"], crashed=crashed.json()["id"],
    )  # fmt: skip


def of(spans, job_id):
    """The spans of a job's trace by name."""
    traces = {one.trace for one in spans if one.attributes.get("d3serve.job_id") == job_id}
    return {one.name: one for one in spans if one.trace in traces}


def test_one_trace_leads_through_every_process_under_the_callers_id(told):
    found = of(told.spans, told.alone)
    assert {one.trace for one in found.values()} == {CALLER}
    for process, names in STEPS.items():
        assert {one.name for one in found.values() if one.service == process} >= names
    root = found["POST /v1/jobs"]
    assert root.parent == "b7ad6b7169203331", "the caller's span"
    assert {one.attributes["d3serve.job_id"] for one in found.values()} == {told.alone}
    assert {one.parent for one in found.values() if one is not root} == {root.id}


def test_the_steps_are_told_in_the_order_in_which_they_were_taken(told):
    found = of(told.spans, told.alone)
    steps = [found[name] for name in ("queue", "claim", "tokenize", "pass", "commit")]
    assert all(one.began <= one.ended for one in steps)
    assert all(a.ended <= b.ended and a.began <= b.began for a, b in itertools.pairwise(steps))


def test_the_receiver_of_a_webhook_can_go_on_with_the_trace(told):
    assert told.hooks[0]["traceparent"] == f"00-{CALLER}-{of(told.spans, told.alone)['webhook'].id}-01"


def test_a_pass_of_several_jobs_links_to_all_of_them(told):
    traces = [of(told.spans, job_id) for job_id in told.ids]
    passes = [found["pass"] for found in traces]
    assert [one.attributes["d3serve.jobs"] for one in passes] == [3, 3, 3], "they were claimed together"
    [first] = [one for one in passes if len(one.links) == 3]
    assert set(first.links) == {(found["POST /v1/jobs"].trace, found["POST /v1/jobs"].id) for found in traces}
    assert [one.links for one in passes if one is not first] == [[(first.trace, first.id)]] * 2


def line_of(spans):
    """The spans of a batch's line."""
    traces = {one.trace for one in spans if one.name == "batch line"}
    return [one for one in spans if one.trace in traces]


def test_a_line_of_a_batch_has_a_trace_of_its_own(told):
    found = {one.name: one for one in line_of(told.spans)}
    root = found["batch line"]
    assert (root.service, root.parent) == ("d3serve-batches", "")
    assert {one.parent for one in found.values() if one is not root} == {root.id}
    assert {one.attributes["d3serve.job_id"] for one in found.values()} == {root.attributes["d3serve.job_id"]}


def test_a_count_is_part_of_the_callers_trace_too(told):
    asked, counted = sorted((one for one in told.spans if one.trace == "d" * 32), key=lambda one: one.began)
    assert (asked.name, asked.service) == ("POST /v1/count", "d3serve-api")
    assert (counted.name, counted.service, counted.parent) == ("count", "d3serve-worker", asked.id)


def test_a_job_that_fails_says_so_by_its_code(told):
    commit = of(told.spans, told.crashed)["commit"]
    assert commit.failed
    assert (commit.attributes["d3serve.outcome"], commit.attributes["error.type"]) == (
        "failed",
        "internal_error",
    )


def test_a_caller_who_does_not_sample_is_not_traced(told):
    assert UNSAMPLED not in {one.trace for one in told.spans}


def test_probes_are_not_traced(told):
    assert {one.attributes.get("http.route") for one in told.spans} & {
        "/readyz",
        "/healthz",
        "/metrics",
    } == set()


def test_nothing_that_anybody_wrote_is_exported(told):
    assert b"d3serve.job_id" in told.exported
    assert SECRET.encode() not in told.exported


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_each_histogram_moves_when_jobs_run(told, name):
    count = f'd3serve_{name}_seconds_count{{lane="interactive"}}'
    assert told.after[count] - told.before[count] == {"tokenize": 5, "pass": 5}.get(name, 6)  # one failed
    offline = count.replace("interactive", "offline")
    assert told.after[offline] - told.before[offline] <= 1  # a line of a batch


def test_counters_of_attempts_and_workers_move(told):
    attempts = {
        kind: told.after[name] - told.before[name]
        for kind in ("begun", "lost", "returned")
        for name in [f'd3serve_attempts_total{{kind="{kind}"}}']
    }
    assert attempts["begun"] - attempts["returned"] in (6, 7)  # with the line of a batch
    assert attempts["lost"] == 0
    busy = [
        value for name, value in told.after.items() if name.startswith("d3serve_worker_busy_seconds_total")
    ]
    assert len(busy) == 1
    assert busy[0] > 0
    assert told.after["d3serve_reaped_leases_total"] == 0
