"""The Celery app: it carries wake-ups ("lane X has work") and nothing else; the job table owns the work.

So its messages are not acknowledged at all, its results are dropped, and losing or doubling one does no harm.
"""

import json
import os
from collections.abc import Callable
from typing import Any, Final

import structlog
from celery import Celery
from celery.signals import setup_logging
from kombu.entity import Queue

from d3serve.errors import InvalidSettings
from d3serve.schemas import Lane
from d3serve.settings import Settings
from d3serve.settings.redis_url import RedisURL
from d3serve.store.connect import server_of
from d3serve.store.keys import Keys
from d3serve.wake import transport

TURN_TASK = "d3.turn"
POOL = "prefork"
TURN_LIMIT_S: Final = 1_800  # a turn that takes longer is taken for stuck, and its process replaced
CONNECTIONS = 4  # wake-ups in flight; one takes about a millisecond
CONNECTION_S = 5
FOREIGN: Final = ("CELERY_", "DJANGO_")
WakeSender = Callable[[Lane], None]  # a Waker, or what stands in for one

log = structlog.get_logger(__name__)


@setup_logging.connect(weak=False)  # type: ignore[untyped-decorator] # celery has no types
def leave_logging_alone(**_: Any) -> None:
    """Celery sets up no handlers of its own where somebody listens to this."""


def queue_name(lane: Lane) -> str:
    """The Celery queue of a lane's wake-ups."""
    return f"wake.{lane}"


def is_wake(message: bytes) -> bool:
    """Whether what stood in a wake-up's queue is one, and not what somebody else has written there."""
    try:
        return bool(json.loads(message)["headers"]["task"] == TURN_TASK)
    except transport.UNREADABLE:
        return False


def broker_url(server: RedisURL) -> str:
    """What kombu is told of a server: which transport, and what it prints. The transport itself reads our own URL."""
    scheme = "sentinel" if server.master else "redis"
    return (
        ";".join(f"{scheme}://{_spelled(host)}:{port}" for host, port in server.hosts) or "redis://localhost"
    )


def _spelled(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def celery_config(settings: Settings) -> dict[str, Any]:
    """Every Celery setting that differs from its default; facts behind them stand beside them."""
    server = server_of(settings)
    queues = {lane: queue_name(lane) for lane in ("interactive", "offline")}
    return {
        "broker_url": broker_url(server),
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_channel_error_retry": True,  # no answer of Redis ends a worker: it connects again, and waits
        "broker_transport_options": {
            "global_keyprefix": Keys(settings.namespace).broker_prefix,
            # A half-open connection costs twice the socket timeout; a wake-up is waited for by the second.
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "health_check_interval": 5,
            transport.SERVER: settings.redis_url,
            **({"master_name": server.master} if server.master else {}),
        },
        "result_backend": None,
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        # A late ack would be redelivered after the visibility timeout, while the turn still runs.
        "task_acks_late": False,
        "task_time_limit": TURN_LIMIT_S,
        "task_queues": [
            # Popped is done: to note it as unacknowledged is a write, and one refused by a full Redis ends a worker.
            Queue(name, routing_key=name, no_ack=True)  # type: ignore[no-untyped-call] # kombu has no types
            for name in queues.values()
        ],
        "task_default_queue": queues["interactive"],
        "task_publish_retry_policy": {"max_retries": 1, "interval_start": 0},
        # The only pool in which time limits, cold shutdown and restarts all work while the GPU is busy;
        # spawn, because CUDA must not be touched before a fork.
        "worker_pool": POOL,
        "worker_pool_start_method": "spawn",
        "worker_concurrency": 1,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,  # a busy worker holds no wake-up that an idle one could use
        "worker_proc_alive_timeout": 1_800,  # loading a large checkpoint takes minutes
        "worker_soft_shutdown_timeout": 10,
        "worker_redirect_stdouts": False,
        "worker_cancel_long_running_tasks_on_connection_loss": True,  # of late acks, which we have not; else it warns
        # Workers tell how they are in the job table. Commands would cost a subscription, and a key for each worker
        # that was killed; and whoever writes to Redis could send them.
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "include": ["d3serve.worker.tasks"],
    }


def forget_other_projects() -> None:
    """Drop what a Celery or Django project of the user's has left in this process' environment, and its children's.

    Celery asks some of these before the app's own settings (CELERY_BROKER_URL), and imports what others name.
    """
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]


def make_app(settings: Settings) -> Celery:
    """The app of one process."""
    transport.install()
    forget_other_projects()
    app = Celery("d3serve", set_as_current=False)
    app.conf.update(celery_config(settings))
    app.amqp.Connection = transport.PromptConnection
    return app


def require_safe_pool(app: Celery) -> None:
    """Return when the app will run turns in a spawned child process.

    Raises:
        InvalidSettings: solo and threads stop answering, or lose messages, while a turn runs.
    """
    pool, start, size = app.conf.worker_pool, app.conf.worker_pool_start_method, app.conf.worker_concurrency
    if (pool, start, size) != (POOL, "spawn", 1):
        raise InvalidSettings(
            f"worker pool {pool}/{start} of {size}: only prefork/spawn of 1 survives a busy GPU",
            field="worker_pool",
        )


class Waker:
    """Sends a lane's wake-up, from any thread; never raises, since a sweep repairs a lost one."""

    def __init__(self, settings: Settings) -> None:
        self._app = make_app(settings)
        # A pool of its own: Celery's is shared by all apps of a process, and once closed stays closed.
        self._pool = self._app.connection_for_write().Pool(limit=CONNECTIONS)

    def __call__(self, lane: Lane) -> None:
        """Tell the workers of the lane that there is work."""
        try:
            with self._pool.acquire(block=True, timeout=CONNECTION_S) as connection:
                self._app.send_task(
                    TURN_TASK, queue=queue_name(lane), ignore_result=True, connection=connection
                )
        except Exception as error:  # kombu raises its transport's errors, whatever they are
            log.warning("wake.lost", lane=lane, error=type(error).__name__)

    def close(self) -> None:
        """Close the connections; later wake-ups are lost."""
        self._pool.force_close_all()
        self._app.close()
