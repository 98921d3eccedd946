"""Celery carries wake-ups and nothing else, in the only pool that survives a busy GPU."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from kombu.exceptions import OperationalError

import d3serve
from d3serve.errors import InvalidSettings
from d3serve.settings import Settings
from d3serve.settings.redis_url import RedisURL
from d3serve.store.connect import connection_class, open_sync
from d3serve.store.keys import Keys
from d3serve.wake.celery_app import Waker, make_app, queue_name, require_safe_pool

ROOT = Path(d3serve.__file__).parents[1]


@pytest.fixture
def settings(redis_url, raw_redis):  # noqa: ARG001 - the server is emptied first
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
            ours = ("store.retry(", "jobs.retry(", "client.retry(")
            assert not [line for line in lines if not any(call in line for call in ours)], path


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


def test_a_lost_connection_is_tried_again_every_other_second(tmp_path, monkeypatch):
    """kombu waits two seconds longer each time: after an outage of minutes a worker would stay away half a minute."""
    waits = []
    monkeypatch.setattr("kombu.utils.functional.sleep", waits.append)
    app = make_app(Settings(redis_url=f"unix://{tmp_path}/nobody.sock"))
    with app.connection_for_read() as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=8)  # as Celery's consumer does, but for ever
    assert sum(waits) == pytest.approx(8 * 2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://u:p%23@h:1/2", {"host": "h", "port": 1, "db": 2, "username": "u", "password": "p#"}),
        (
            "unix://:p@/run/a%3Bb.sock?db=3",
            {"path": "/run/a;b.sock", "db": 3, "username": None, "password": "p"},
        ),
        ("rediss://h?ssl_cert_reqs=none", {"host": "h", "port": 6379, "ssl_cert_reqs": "none"}),
        ("sentinel://u:p%2F@a:1,b:2/main/2", {"db": 2, "username": "u", "password": "p/"}),
    ],
)
def test_kombu_connects_where_the_job_table_is(monkeypatch, url, expected, asynchronous):
    """kombu reads URLs in its own way: it splits a path at `;`, and takes some options for its own."""
    monkeypatch.setattr(redis.Redis, "ping", lambda _: True)  # kombu asks when it opens a channel
    with make_app(Settings(redis_url=url)).connection_for_write() as connection:
        channel = connection.channel()
        pool = channel.async_pool if asynchronous else channel.pool
        assert {name: pool.connection_kwargs.get(name) for name in expected} == expected
        assert issubclass(pool.connection_class, connection_class(RedisURL.parse(url).scheme))


def test_a_wake_goes_to_the_database_that_the_url_names(settings):
    """kombu took no database from a unix URL: two queues of one name in two databases shared their wake-ups."""
    third = settings.model_copy(update={"redis_url": f"{settings.redis_url}?db=3"})
    waker = Waker(third)
    waker("interactive")
    waker.close()
    lengths = []
    for each in (settings, third):
        with open_sync(each) as client:
            lengths.append(client.llen(Keys(each.namespace)("mq", "interactive")))
    assert lengths == [0, 1]


def test_kombu_is_told_every_sentinel():
    conf = make_app(Settings(redis_url="sentinel://a:1,[::1]:2/main")).conf
    assert conf.broker_url == "sentinel://a:1;sentinel://[::1]:2"
    assert conf.broker_transport_options["master_name"] == "main"


SERVICE = """
import os, sys
from d3serve.settings import Settings
from d3serve.wake.celery_app import Waker
Waker(Settings.load())("interactive")
left = [name for name in os.environ if name.startswith(("CELERY_", "DJANGO_"))]
sys.exit(f"a child would have {left}" if left else 0)
"""
NOBODYS, NO_MODULE = "redis://127.0.0.1:1/0", "shop.settings"
OF_OTHER_PROJECTS = {
    **{f"CELERY_{name}": NOBODYS for name in ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL")},
    **{f"CELERY_{name}": NO_MODULE for name in ("CONFIG_MODULE", "LOADER", "CUSTOM_WORKER_POOL")},
    "CELERY_RESULT_BACKEND": "shop.results:Backend",
    "CELERY_TRACE_APP": "1",
    "CELERY_BENCH": "1",
    "DJANGO_SETTINGS_MODULE": NO_MODULE,
}


def test_a_celery_or_django_project_of_the_users_is_not_this_one(settings, tmp_path):
    wakes_in_a_process_with(settings, tmp_path, **OF_OTHER_PROJECTS)


def test_a_celery_configuration_beside_the_process_is_not_read(settings, tmp_path):
    (tmp_path / "celeryconfig.py").write_text("raise SystemExit('it was read')")
    wakes_in_a_process_with(settings, tmp_path)


def wakes_in_a_process_with(settings, folder, **environ):
    environ = {**os.environ, **settings.to_env(), **environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SERVICE], env=environ, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "wake.lost" in done.stdout + done.stderr) == (0, False), done.stderr
    with redis.Redis.from_url(settings.redis_url) as client:
        assert client.llen(Keys(settings.namespace)("mq", "interactive")) == 1
