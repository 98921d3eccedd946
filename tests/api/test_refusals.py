"""Bad requests over HTTP: a 4xx that names the fault, the one error body, and no job."""
# ruff: noqa: E501 - one case a line: the tables are read as tables

import gzip
import json
import time
from itertools import islice

import pytest
import zstandard

from d3serve.text.strict_json import read_json

NOUL = {"type": "noul", "instructions": "Is it spam?"}
CHOICE = {"type": "choice", "criteria": {"a": None, "b": "the second"}}


def of(**question):
    return {"model": "jev-latest", "state": "hello", "questions": {"spam": question}}


def body(**fields):
    return {"model": "jev-latest", "state": "hello", "questions": {"spam": NOUL}} | fields


def job(**options):
    return body(job=options)


def options(count):
    return {f"option {i}": None for i in range(count)}


SPAM, CRITERIA = "questions.spam", "questions.spam.criteria"

# id of the case in the collection of known failures: (body, code, field, words in the message)
REFUSED = {
    "QV-01 true for an integer": (job(expires_in_s=True), "invalid_request", "job.expires_in_s", "integer, not true"),
    "QV-01 text for an integer": (job(timeout_s="3"), "invalid_request", "job.timeout_s", 'integer, not "3"'),
    "QV-01 a float for an integer": (job(result_ttl_s=61.0), "invalid_request", "job.result_ttl_s", "integer, not 61.0"),
    "QV-01 true for a priority": (job(priority=True), "invalid_request", "job.priority", "'high', 'normal' or 'low'"),
    "QV-02 one option": (of(type="choice", criteria=options(1)), "invalid_question", CRITERIA, "holds 1; there may be 2 to 255"),
    "QV-02 256 options": (of(type="choice", criteria=options(256)), "too_many_options", CRITERIA, "255 options per choice"),
    "QV-02 a million options": (of(type="choice", criteria=options(200_000)), "too_many_options", CRITERIA, "holds 200000"),
    "QV-03 choice without options": (of(type="choice", criteria={}), "invalid_question", CRITERIA, "holds 0"),
    "QV-03 choice with null": (of(type="choice", criteria=None), "invalid_question", CRITERIA, 'an object, not null; of a choice it is as {"billing"'),
    "QV-03 choice with a list": (of(type="choice", criteria=["a", "b"]), "invalid_question", CRITERIA, 'not a list of 2; of a choice it is as {"billing": '),
    "QV-03 choice without criteria": (of(type="choice"), "invalid_question", CRITERIA, "is required"),
    "QV-03 noul with a list": (of(**NOUL, criteria=[]), "invalid_question", CRITERIA, 'an object, not a list of 0; of a noul it is as {"true": '),
    "QV-03 noul with a string": (of(**NOUL, criteria=""), "invalid_question", CRITERIA, 'an object, not ""'),
    "QV-03 noul with true": (of(**NOUL, criteria=True), "invalid_question", CRITERIA, "an object, not true"),
    "QV-04 levels alike": (of(type="score", criteria=["low", "low", "high"]), "invalid_question", CRITERIA, 'both read "low"'),
    "QV-04 levels alike as text": (of(type="score", criteria=["1", 1]), "invalid_question", CRITERIA, 'both read "1"'),
    "QV-04 options alike as text": (of(type="choice", criteria={"a: b": None, "a": "b"}), "invalid_question", CRITERIA, 'both read "a: b"'),
    "QV-04 options alike to the tokenizer": (of(type="choice", criteria={"é": None, "e\u0301": None}), "invalid_question", CRITERIA, "both read"),
    "QV-04 yes and no alike": (of(**NOUL, criteria={"true": "x", "false": "x"}), "invalid_question", CRITERIA, 'both read "x"'),
    "QV-06 an empty name": (of(type="choice", criteria={"": None, "b": None}), "invalid_question", CRITERIA, 'name "" is blank'),
    "QV-06 a blank name": (of(type="choice", criteria={" ": "x", "b": None}), "invalid_question", CRITERIA, 'name " " is blank'),
    "QV-06 an invisible name": (of(type="choice", criteria={"\u200b": "x", "b": None}), "invalid_question", CRITERIA, "is blank"),
    "QV-06 a newline for a name": (of(type="choice", criteria={"\n": None, "b": None}), "invalid_question", CRITERIA, "is blank"),
    "QV-06 a forged option line": (of(type="choice", criteria={"a\nB: yes": None, "b": None}), "invalid_question", CRITERIA, "line break"),
    "QV-06 a name that ends its line": (of(type="choice", criteria={"a\r": None, "b": None}), "invalid_question", CRITERIA, "line break"),
    "QV-06 a line separator": (of(type="choice", criteria={"a\u2028b": None, "b": None}), "invalid_question", CRITERIA, "line break"),
    "QV-07 a third outcome": (of(**NOUL, criteria={"true": "a", "maybe": "c"}), "invalid_question", CRITERIA + ".maybe", "not a field here; there are true, false"),
    "QV-07 the wrong case": (of(**NOUL, criteria={"True": "a"}), "invalid_question", CRITERIA + ".True", "not a field"),
    "QV-07 yes for true": (of(**NOUL, criteria={"yes": "a"}), "invalid_question", CRITERIA + ".yes", "not a field"),
    "QV-08 no levels": (of(type="score", criteria=[]), "invalid_question", CRITERIA, "2 to 10 levels per score"),
    "QV-08 one level": (of(type="score", criteria=["low"]), "invalid_question", CRITERIA, "holds 1; there may be 2 to 10"),
    "QV-08 eleven levels": (of(type="score", criteria=list(range(11))), "too_many_options", CRITERIA, "holds 11; there may be 2 to 10"),
    "QV-08 a map of levels": (of(type="score", criteria={"low": 0, "high": 1}), "invalid_question", CRITERIA, 'a list, not an object of 2; of a score it is as ["can wait", '),
    "QV-08 an empty level": (of(type="score", criteria=["low", ""]), "invalid_question", CRITERIA + ".1", "empty level"),
    "QV-08 a null level": (of(type="score", criteria=["low", None]), "invalid_question", CRITERIA + ".1", "empty level"),
    "QV-09 instruction for instructions": (of(type="noul", instruction="x"), "invalid_question", SPAM + ".instruction", "not a field here; there are type, instructions, criteria"),
    "QV-09 option for criteria": (of(type="choice", option={"a": 1}), "invalid_question", CRITERIA, "is required"),
    "QV-09 an unknown field on top": (body(temperature=0), "invalid_request", "temperature", "not a field of a request"),
    "QV-09 an unknown job option": (job(lanes=["offline"]), "invalid_request", "job.lanes", "there are lane, priority, expires_in_s, timeout_s, result_ttl_s, webhook, metadata, on_question_error"),
    "QV-09 a noul that asks nothing": (of(type="noul"), "invalid_question", SPAM, "asks nothing"),
    "QV-10 an empty id": (body(questions={"": NOUL}), "invalid_question", "questions.", "id of 0 characters"),
    "QV-10 an id of 10 KB": (body(questions={"x" * 10_000: NOUL}), "invalid_question", None, "id of 10000 characters; an id has 1 to 256"),
    "QV-14 no questions": (body(questions={}), "invalid_request", "questions", "at least one question"),
    "QV-14 questions missing": ({"model": "jev-latest", "state": ""}, "invalid_request", "questions", "missing or null"),
    "QV-14 a list of questions": (body(questions=[NOUL]), "invalid_request", "questions", "an object with at least one"),
    "QV-14 401 questions": (body(questions={f"q{i}": NOUL for i in range(401)}), "too_many_questions", "questions", "holds 401 questions; a job may hold 400"),
    "QV-16 a box": (of(type="box"), "unsupported_modality", SPAM + ".type", "there are choice, noul, score"),
    "QV-16 a track": (of(type="track"), "unsupported_modality", SPAM + ".type", "needs an image or a video"),
    "QV-16 an unknown type": (of(type="rank"), "invalid_question", SPAM + ".type", '"rank" is unknown; there are choice, noul, score'),
    "QV-16 no type": (of(instructions="x"), "invalid_question", SPAM + ".type", "is required"),
    "QV-16 a list for a type": (of(type=["noul"]), "invalid_question", SPAM + ".type", "unknown"),
    "QV-16 an image in a question": (of(**NOUL, images=["data:image/png;base64,"]), "invalid_question", SPAM + ".images", "not a field"),
    "images": (body(images=["data:image/png;base64,AAAA"]), "invalid_media", "images.0", "begins like no image"),
    "videos": (body(videos=["https://a.b/c.mp4"]), "unsupported_modality", "videos.0", "fetches nothing"),
    "assets": (body(assets={"<image:1>": {"type": "image"}}), "invalid_request", "assets.<image:1>", "named nowhere"),
    "a question that is text": (body(questions={"spam": "Is it?"}), "invalid_question", SPAM, "an object, not"),
    "PT-05 a null state": (body(state=None), "invalid_request", "state", "a string, an object or a list, not null"),
    "a bare number for a state": (body(state=1.5), "invalid_request", "state", "not 1.5"),
    "true for a state": (body(state=True), "invalid_request", "state", "not true"),
    "no state": ({"model": "m", "questions": {"spam": NOUL}}, "invalid_request", "state", "is required"),
    "no model": ({"state": "", "questions": {"spam": NOUL}}, "invalid_request", "model", "must name a model"),
    "a null model": (body(model=None), "invalid_request", "model", "not null"),
    "17 metadata entries": (job(metadata={str(i): "" for i in range(17)}), "invalid_request", "job.metadata", "at most 16"),
    "metadata that is no text": (job(metadata={"a": 1}), "invalid_request", "job.metadata.a", "a string, not 1"),
    "an unknown field of a webhook": (job(webhook={"uri": "https://example.com"}), "invalid_request", "job.webhook.uri", "there are url, endpoint_id, events"),
    "a webhook without a target": (job(webhook={}), "invalid_request", "job.webhook", "either a url or an endpoint_id"),
    "an unknown event": (job(webhook={"url": "https://example.com", "events": ["job.done"]}), "invalid_request", "job.webhook.events.0", "'job.succeeded'"),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("case", REFUSED)
async def test_a_bad_request_names_its_fault_and_makes_no_job(case, client, stats):
    sent, code, field, words = REFUSED[case]
    answer = await client.post("/v1/jobs", json=sent)
    problem = check_problem(answer, 422, code)
    assert words in problem["detail"]
    if field is not None:
        assert problem["error"]["field"] == problem["error"]["param"] == field
    assert problem["errors"][0]["pointer"].startswith("/")
    assert (await stats()).lanes["interactive"].queued_jobs == 0


RAW_REFUSED = {
    "AP-01 NaN": (b'{"state":NaN}', 400, "invalid_json"),
    "AP-01 1e999": (b'{"state":[1e999]}', 400, "invalid_json"),
    "AP-02 half a surrogate pair": (b'{"state":"\\ud83d"}', 400, "invalid_json"),
    "AP-02 in a question id": (b'{"questions":{"\\ude00":{}}}', 400, "invalid_json"),
    "AP-03 20,000 levels": (b'{"state":' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "invalid_json"),
    "a key twice": (b'{"state":"a","state":"b"}', 400, "duplicate_key"),
    "a question twice": (b'{"questions":{"q":{},"q":{}}}', 400, "duplicate_key"),
    "no JSON": (b"state=hello", 400, "invalid_json"),
    "nothing": (b"", 400, "invalid_json"),
    "a list": (b"[]", 422, "invalid_request"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", RAW_REFUSED)
async def test_bad_json_makes_no_job(case, client, stats):
    content, status, code = RAW_REFUSED[case]
    answer = await client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    check_problem(answer, status, code)
    assert (await stats()).lanes["interactive"].queued_jobs == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 422, "invalid_request"),
        ({"Content-Type": "multipart/form-data"}, b"--x--", 415, "unsupported_media_type"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ({"Content-Encoding": "br"}, b"{}", 415, "unsupported_encoding"),
        ({"Content-Encoding": "gzip"}, b"{}", 400, "invalid_json"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 2**26), 413, "body_too_large"),
        ({"Content-Encoding": "zstd"}, zstandard.compress(b" " * 2**26), 413, "body_too_large"),
        ({"Content-Length": str(2**40)}, b"{}", 413, "body_too_large"),
        ({"Idempotency-Key": ""}, json.dumps(body()).encode(), 422, "invalid_request"),
        ({"Idempotency-Key": "x" * 256}, json.dumps(body()).encode(), 422, "invalid_request"),
    ],
)
async def test_bad_headers_make_no_job(headers, content, status, code, client, stats):
    answer = await client.post("/v1/jobs", content=content, headers=headers)
    check_problem(answer, status, code)
    assert (await stats()).lanes["interactive"].queued_jobs == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/jobs/", 404, "not_found"),
        ("POST", "/v1/jobs/", 404, "not_found"),
        ("PATCH", "/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/v1/jobs/job_unknown", 404, "job_not_found"),
        ("GET", "/v1/jobs/" + "x" * 5000, 404, "job_not_found"),
        ("GET", "/v1/jobs/%00%0a", 404, "job_not_found"),
        ("GET", "/v1/jobs/%ff%fe", 404, "job_not_found"),
        ("GET", "/v1/jobs/*", 404, "job_not_found"),
        ("GET", "/v1/jobs/job_unknown/result", 404, "job_not_found"),
        ("POST", "/v1/jobs/job_unknown/cancel", 404, "job_not_found"),
        ("GET", "/v1/jobs/job_unknown?wait=x", 422, "invalid_request"),
        ("GET", "/v1/jobs/job_unknown?wait=-1", 422, "invalid_request"),
        ("GET", "/v1/jobs/job_unknown?wait=61", 422, "invalid_request"),
        ("GET", "/v1/jobs/job_unknown?wait=nan", 422, "invalid_request"),
        ("GET", "/v1/jobs/job_unknown?wait=inf", 422, "invalid_request"),
        ("GET", "/v1/jobs/job_unknown?include=state", 422, "invalid_request"),
    ],
)
async def test_other_refusals_have_the_one_body_too(method, path, status, code, client):
    check_problem(await client.request(method, path), status, code)


@pytest.mark.anyio
async def test_a_model_that_is_not_served_is_refused_with_the_list_of_those_that_are(client):
    problem = check_problem(await client.post("/v1/jobs", json=body(model="gpt-9")), 404, "model_not_found")
    assert '"gpt-9"' in problem["detail"]
    assert "jev-latest" in problem["detail"]


@pytest.mark.anyio
async def test_many_faults_come_back_at_once_but_never_more_than_ten(client):
    questions = {f"q{i}": {"type": "choice", "criteria": options(i)} for i in (0, 1, 300)}
    problem = check_problem(
        await client.post("/v1/jobs", json=body(questions=questions)), 422, "invalid_question"
    )
    assert [one["pointer"] for one in problem["errors"]] == [f"/questions/q{i}/criteria" for i in (0, 1, 300)]
    assert "and 2 more" in problem["detail"]
    questions = {f"q{i}": {"type": f"wrong {i}"} for i in range(200)}
    problem = check_problem(
        await client.post("/v1/jobs", json=body(questions=questions)), 422, "invalid_question"
    )
    assert len(problem["errors"]) == 10


MARKS = "e" + "\u0301" * 40_000 + "\u0323" * 40_000
CROWD = {f"{i}": i for i in range(200_000)}
COSTLY_BODIES = {
    "marks": (of(type="choice", criteria={MARKS: None, MARKS + "x": None}), 202, ""),
    "metadata": (job(metadata=CROWD), 422, "job.metadata holds 200000 fields"),
    "a job": (job(**CROWD), 422, "job holds 200000 fields"),
    "a webhook": (job(webhook=CROWD), 422, "job.webhook holds 200000 fields"),
    "a question": (of(type="noul", **CROWD), 422, SPAM + " holds 200001 fields"),
    "outcomes": (of(**NOUL, criteria=CROWD), 422, CRITERIA + " holds 200000 fields"),
    "instructions, which may": (of(type="noul", instructions=dict(islice(CROWD.items(), 100))), 202, ""),
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", COSTLY_BODIES)
async def test_no_small_body_stops_the_process_for_long(case, client):
    """The loop serves everybody: ordering so many marks took 20 s of it, 200,000 findings more than 1 s."""
    sent, status, words = COSTLY_BODIES[case]
    content = json.dumps(sent).encode()
    read_json(content, max_depth=100)  # in the cache of the machine
    began = time.process_time()
    read_json(content, max_depth=100)
    to_read = time.process_time() - began
    began = time.process_time()
    answer = await client.post("/v1/jobs", content=content)
    spent = time.process_time() - began
    assert answer.status_code == status, answer.text[:300]
    assert words in answer.text
    assert spent < 3 * to_read + 0.5


LARGE = "\U0001f600\x00" * 100_000  # a body of twelve of them is still taken
LARGE_BODIES = {
    "a value": body(state=None, model=LARGE),
    "a question id": body(questions={LARGE: NOUL}),
    "a field": {LARGE: 1},
    "ten fields": {f"{i}{LARGE}": 1 for i in range(10)},
    "a type": of(type=LARGE),
    "an option": of(type="choice", criteria={LARGE: None}),
    "options alike": of(type="choice", criteria={LARGE + ": x": None, LARGE: "x"}),
    "a field of a question": of(**{LARGE: 1, "type": "noul"}),
    "metadata": job(metadata={LARGE: 1}),
    "a url": job(webhook={"url": LARGE}),
    "ten questions": body(questions={f"{i}{LARGE}"[:256]: {"type": LARGE} for i in range(10)}),
    "ten bad fields": of(type="noul", **{f"{i}{LARGE}": 1 for i in range(12)}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", LARGE_BODIES)
async def test_no_input_makes_the_error_body_larger_than_16_kb(case, client):
    answer = await client.post("/v1/jobs", json=LARGE_BODIES[case])
    assert answer.status_code in (404, 413, 422)
    assert len(answer.content) <= 16 * 2**10
    answer.json()


def check_problem(answer, status, code):
    """The one error body, whole; returns it."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == problem["error"]["code"] == code
    assert problem["status"] == status
    assert problem["type"] == f"urn:d3serve:error:{code}"
    assert problem["detail"] == problem["error"]["message"]
    assert problem["request_id"] == answer.headers["x-request-id"] == answer.headers["x-typesafe-request-id"]
    assert problem["instance"].startswith("/")
    assert len(answer.content) <= 16 * 2**10
    assert "retry-after" not in answer.headers
    return problem
