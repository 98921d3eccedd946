"""The peer: what Celery alone makes of the same work, one task a job, late acknowledgement, results in Redis.

Started by service.py as `celery -A plain_celery worker`; the broker and the engine come from the environment.
"""

import os
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from celery.signals import worker_process_init

from d3serve.store.encode import QUESTIONS
from d3serve.worker.fake_engine import FakeEngine

REDIS_URL = os.environ["PLAIN_REDIS_URL"]
ENGINE = os.environ.get("PLAIN_ENGINE", "fake:")

# kombu's own spelling of a socket file
SPELLED = (
    REDIS_URL.replace("unix://", "redis+socket://") if urlsplit(REDIS_URL).scheme == "unix" else REDIS_URL
)

app = Celery("plain", broker=SPELLED, backend=SPELLED)
app.conf.update(
    task_acks_late=True, worker_prefetch_multiplier=1, task_reject_on_worker_lost=True, result_expires=3600,
    worker_pool="prefork", worker_concurrency=1, worker_pool_start_method="spawn", worker_hijack_root_logger=False,
)  # fmt: skip
_engine: list[FakeEngine] = []


@worker_process_init.connect(weak=False)
def load(**_: Any) -> None:
    """Load the engine once in the child."""
    _engine[:] = [FakeEngine.load(ENGINE)]


@app.task
def decide(state: Any, questions: str) -> dict[str, Any]:
    """Answer one job."""
    [engine] = _engine
    [decided] = engine.decide([engine.prepare(state, QUESTIONS.validate_json(questions))])
    return {name: answer.model_dump() for name, answer in decided.answers.items()}
