"""The error body, apart from any route."""

import json

import pytest

from d3serve import errors
from d3serve.api.problems import MAX_BODY_BYTES, error_of, problem, problem_response
from d3serve.schemas import JobError


@pytest.mark.parametrize("char", ["x", "é", "\U0001f600", "\x00", '"'])
def test_the_body_stays_within_16_kb_whatever_its_parts_hold(char):
    text = char * 5000
    findings = [{"pointer": text, "code": "invalid_request", "detail": text}] * 50
    response = problem(
        422, "invalid_request", text, instance=text, request_id="r", field=text, errors=findings
    )
    assert len(response.body) <= MAX_BODY_BYTES
    assert json.loads(response.body)["errors"] == [] or len(json.loads(response.body)["errors"]) == 10


@pytest.mark.parametrize(
    ("asked", "seconds", "ms"),
    [(None, "1", "1000"), (0, "0", "0"), (0.2, "1", "200"), (3600, "60", "60000"), (-5, "0", "0")],
)
def test_retry_after_is_between_nothing_and_a_minute_in_both_forms(asked, seconds, ms):
    details = {} if asked is None else {"retry_after_s": asked}
    response = problem_response(errors.QueueFull("full", details=details), instance="/", request_id="r")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == (seconds, ms)


def leaves(kind):
    yield kind
    for child in kind.__subclasses__():
        yield from leaves(child)


@pytest.mark.parametrize("kind", list(leaves(errors.D3ServeError)))
def test_every_error_of_the_tree_has_a_body_that_each_client_reads(kind):
    response = problem_response(kind("what is wrong", field="state"), instance="/v1/jobs", request_id="r")
    body = json.loads(response.body)
    assert response.status_code == body["status"] == kind.http_status
    assert body["detail"] == body["error"]["message"] == "what is wrong"
    assert body["error"]["param"] == "state"
    assert ("retry-after" in response.headers) == kind.retryable


def test_no_refusal_that_is_for_good_would_be_tried_again_by_a_client():
    tried_again = {408, 429, *range(500, 600)}
    for kind in leaves(errors.RequestError):
        assert kind.retryable or kind.http_status not in tried_again, kind


def test_a_job_fails_as_the_error_of_its_code():
    assert isinstance(error_of(JobError(code="max_tokens_exceeded", message="x")), errors.MaxTokensExceeded)
    unknown = error_of(JobError(code="a code of a newer worker", message="x"))
    assert (type(unknown), unknown.http_status) == (errors.JobFailure, 500)
