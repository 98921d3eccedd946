"""Two API processes on one port: `/metrics` counts what both have answered, whichever of them is asked."""

import re

import httpx
import pytest

from d3serve.up.local import counting_together, start_apis
from d3serve.up.supervisor import ProcessTree, listening

COUNT = re.compile(r'd3serve_http_requests_total\{method="GET",route="/v1/queue",status="200"\} (\S+)')
SUM = re.compile(r'request_duration_seconds_count\{method="GET",route="/v1/queue"\} (\S+)')
CALLS = 40  # each over a connection of its own: that all meet one of two processes happens once in 10^12 runs


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.xfail(strict=True))], ids=["", "apart"])
def metrics(request, settings):
    """What /metrics said, time after time, after CALLS requests; also on processes that each count alone."""
    tree = ProcessTree()
    with (
        listening("127.0.0.1", 0, 2) as listeners,
        counting_together(2) as shared,
        tree.stopped_by_signals(),
    ):
        env = settings.model_copy(update={"log_level": "error"}).to_env()
        start_apis(tree, listeners, env | (shared if request.param else {}))
        url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
        for _ in range(CALLS):
            assert httpx.get(f"{url}/v1/queue", timeout=30).is_success
        yield [httpx.get(f"{url}/metrics", timeout=30).text for _ in range(CALLS)]


def test_every_process_tells_the_counts_of_all(metrics):
    assert {float(COUNT.search(text)[1]) for text in metrics} == {CALLS}
    assert {float(SUM.search(text)[1]) for text in metrics} == {CALLS}
    assert all("d3serve_workers 0.0" in text for text in metrics), "the queue is in it too"
