"""The OpenAPI document is true: two thousand generated requests, no 5xx, every response as described."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from d3serve.api import bounds
from d3serve.api.app import create_app
from d3serve.settings import Settings

SEED = 20261129
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

DOCUMENTED = {
    "submit": {"Prefer", "Idempotency-Key", "traceparent"},
    "system_one": {"Prefer", "Idempotency-Key", "traceparent"},
    "decisions": {"Prefer", "Idempotency-Key", "traceparent"},
    "poll": {"If-None-Match", "wait", "include"},
    "events": {"Last-Event-ID"},
    "create_batch": {"Idempotency-Key"},
}


def has_query(operation):
    return any(one.get("in") == "query" for one in operation.get("parameters", ()))


def operations():
    """(method, path, how many requests): many where there is much to get wrong."""
    document = create_app(Settings()).openapi()

    def count(path, operation):
        if "requestBody" in operation:
            return 300
        return 100 if "{" not in path and has_query(operation) else 20

    return [
        (method, path, count(path, operation))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_run_is_of_two_thousand_requests():
    assert sum(count for *_, count in operations()) >= 2_000


# Hypothesis sees that the process's `random` was used while it drew, and not by whom: the server's threads may.
@pytest.mark.filterwarnings(
    "ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning"
)
@pytest.mark.usefixtures("counter")
@pytest.mark.parametrize(("method", "path", "count"), operations())
def test_generated_requests_are_answered_as_described(
    method, path, count, settings, take_turns, serving, monkeypatch
):
    monkeypatch.setattr(bounds, "SYNC_WAIT_S", 60.0)  # a 504 is a 5xx too
    with serving(create_app(settings)) as address, take_turns():
        operation = schemathesis.openapi.from_url(f"{address}/openapi.json")[path][method.upper()]
        asked = []

        @seed(SEED)
        @hypothesis_settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def ask(case):
            if isinstance(case.body, dict) and "model" in case.body and len(asked) % 2:
                case.body["model"] = "jev-latest"  # a random name never gets past the door
            asked.append(case)
            case.validate_response(case.call(timeout=90), checks=CHECKS)

        ask()
    assert asked


def test_every_operation_says_who_may_call_what_comes_back_and_in_which_headers():
    document = create_app(Settings()).openapi()
    without_json = {"events", "metrics", "delete", "delete_endpoint", "file_content"}
    for methods in document["paths"].values():
        for operation in methods.values():
            name, responses = operation["operationId"], operation["responses"]
            assert ("security" in operation) == (name not in ("healthz", "readyz")), name
            assert {"4XX", "5XX"} < responses.keys(), name
            if name not in without_json:
                for status in responses.keys() & {"200", "201", "202"}:
                    assert responses[status]["content"]["application/json"]["schema"], (name, status)
            assert all("X-Request-Id" in response["headers"] for response in responses.values()), name
    for name, headers in DOCUMENTED.items():
        operation = next(
            one for methods in document["paths"].values() for one in methods.values() if one["operationId"] == name
        )  # fmt: skip
        assert headers <= {one.get("name") for one in operation["parameters"]}, name
