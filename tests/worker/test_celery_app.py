"""Celery carries wake-ups and nothing else, in the only pool that survives a busy GPU."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

import d3serve
from d3serve.celery_app import Waker, broker_url, make_app, queue_name, require_safe_pool
from d3serve.errors import BrokerUnavailable, InvalidSettings
from d3serve.settings import Settings
from d3serve.store.keys import Keys

ROOT = Path(d3serve.__file__).parents[1]


@pytest.fixture
def settings(redis_url):
    return Settings(redis_url=redis_url)


@pytest.fixture
def send(settings):
    waker = Waker(settings)
    yield waker
    waker.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_pool", "solo"),
        ("worker_pool", "threads"),
        ("worker_pool_start_method", "fork"),
        ("worker_concurrency", 2),
    ],
)
def test_other_pools_are_refused(settings, name, value):
    app = make_app(settings)
    require_safe_pool(app)
    app.conf[name] = value
    with pytest.raises(InvalidSettings, match="prefork"):
        require_safe_pool(app)


def test_messages_are_not_acknowledged_and_leave_no_result(settings):
    conf = make_app(settings).conf
    assert [queue.no_ack for queue in conf.task_queues] == [True, True]
    assert (conf.task_acks_late, conf.task_ignore_result, conf.result_backend) == (False, True, None)
    assert conf.accept_content == ["json"]


def test_no_code_asks_celery_to_wait_or_to_retry():
    """Redelivery of a delayed message runs it many times; delays and retries live in the job table."""
    asks = re.compile(r"countdown=|\beta=|\.retry\(|apply_async|acks_late=True|autoretry_for")
    for room in ("d3serve", "worker", "api"):
        for path in (ROOT / room).rglob("*.py"):
            lines = [line for line in path.read_text().splitlines() if asks.search(line)]
            assert not [line for line in lines if "store.retry(" not in line and "jobs.retry(" not in line], (
                path
            )


@pytest.mark.parametrize("lane", ["interactive", "offline"])
def test_a_wake_lands_where_the_sweep_looks_for_it(settings, send, lane):
    send(lane)
    with redis.Redis.from_url(settings.redis_url) as client:
        assert client.llen(Keys(settings.namespace)("mq", lane)) == 1
        assert Keys(settings.namespace)("mq", lane).endswith(queue_name(lane))


def test_sixteen_threads_may_wake_at_once_and_no_channel_stays(settings, send):
    with redis.Redis.from_url(settings.redis_url) as client:
        before = len(client.pubsub_channels())
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(send, ["interactive"] * 320))
        assert client.llen(Keys(settings.namespace)("mq", "interactive")) == 320
        assert len(client.pubsub_channels()) == before


def test_closing_one_waker_leaves_the_others_awake(settings, send):
    other = Waker(settings)
    other("interactive")
    other.close()
    send("interactive")
    with redis.Redis.from_url(settings.redis_url) as client:
        assert client.llen(Keys(settings.namespace)("mq", "interactive")) == 2


def test_a_wake_that_cannot_be_sent_is_only_logged(tmp_path):
    Waker(Settings(redis_url=f"unix://{tmp_path}/nobody.sock"))("interactive")


def test_urls_are_spelled_celerys_way():
    assert broker_url("unix:///run/v.sock") == "redis+socket:///run/v.sock?virtual_host=0"
    assert broker_url("rediss://h:1/2") == "rediss://h:1/2"
    spelled = "sentinel://:pw@a:1/2;sentinel://:pw@b:3/2"
    assert broker_url("sentinel://:pw@a:1,b:3/main/2") == spelled
    conf = make_app(Settings(redis_url="sentinel://a:1/main")).conf
    assert conf.broker_transport_options["master_name"] == "main"


@pytest.mark.parametrize(
    "url", ["sentinel://a:1", "sentinel:///main", "sentinel://a/main", "sentinel://a:1/main/x"]
)
def test_a_sentinel_url_without_hosts_or_master_is_refused(url):
    with pytest.raises(BrokerUnavailable, match="host:port"):
        broker_url(url)
