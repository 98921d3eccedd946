"""The webhook sender: drains the outbox, signs, sends, tries again, gives up honestly.

It is a process of its own: a receiver that hangs holds up no turn of a model, and, through a limit and a
breaker for each receiver, no other receiver either. Whatever it was doing when it was killed is due again
when its claim runs out, under the same `webhook-id` and with the same bytes.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Final

import structlog

from d3serve.errors import NotFound, StorageUnavailable
from d3serve.tracing import Attributes, telling
from d3serve.webhooks.egress import destination
from d3serve.webhooks.names import TryLater
from d3serve.webhooks.outbound import Outbound, Reply, SendFailed
from d3serve.webhooks.outbox import Delivery, DeliveryState, HookStore, Try
from d3serve.webhooks.signing import signature_headers

log = structlog.get_logger(__name__)

# Standard Webhooks' example schedule: ten tries over three days.
SCHEDULE_S: Final = (5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
JITTER: Final = 0.1
MAX_RETRY_AFTER_S: Final = 86_400
CLAIM_AT_ONCE: Final = 64
SENDING_AT_ONCE: Final = 256
PER_RECEIVER: Final = 4  # deliveries to one receiver at a time
PER_TENANT = SENDING_AT_ONCE // 2  # one tenant's many receivers, all of which hang, leave room for others
CROWDED_S: Final = 1.0
LEASE_SPARE_S = 5.0  # for the name and for Redis, beside what a receiver may take
IDLE_S = 0.25
BREAKER_FAILURES: Final = 5
BREAKER_OPEN_S = 60.0
MAX_RECEIVERS = 10_000  # remembered; jobs name what URLs they like


@dataclass
class Receiver:
    """What the sender remembers of one receiver: how busy it is, how often it failed in a row."""

    sending: int = 0
    failures: int = 0
    closed_until: float = 0.0

    def wait_s(self, now: float) -> float:
        """How long a delivery to it should be put off; 0 to send now."""
        if now < self.closed_until:
            return self.closed_until - now
        return CROWDED_S if self.sending >= PER_RECEIVER else 0.0

    def note(self, *, worked: bool, now: float) -> None:
        """Count an attempt; after five failures in a row nothing is sent for a minute, then one by one."""
        self.failures = 0 if worked else self.failures + 1
        if self.failures >= BREAKER_FAILURES:
            self.closed_until = now + BREAKER_OPEN_S


class Sender:
    """Claims due deliveries and attempts each once a claim."""

    def __init__(self, store: HookStore, outbound: Outbound) -> None:
        self._store = store
        self._outbound = outbound
        self._lease_s = outbound.timeout_s * 2 + LEASE_SPARE_S
        self._receivers: defaultdict[str, Receiver] = defaultdict(Receiver)
        self._sending: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then let what is under way end."""
        while not stop.is_set():
            try:
                room = min(CLAIM_AT_ONCE, SENDING_AT_ONCE - len(self._tasks))
                due = await self._store.claim(room, self._lease_s) if room > 0 else []
            except StorageUnavailable as error:
                log.warning("webhooks.storage", reason=error.message)
                due = []
            for delivery_id in due:
                task = asyncio.create_task(self._settle(delivery_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if not due:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), IDLE_S)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _settle(self, delivery_id: str) -> None:
        try:
            delivery = await self._store.delivery(delivery_id)
            if delivery.state == "pending":  # else erased, or settled by another sender, since it was claimed
                await self._attempt(delivery)
        except StorageUnavailable as error:  # the claim runs out, and the delivery is due again
            log.warning("webhooks.storage", delivery=delivery_id, reason=error.message)
        except Exception as error:  # one delivery that breaks us must not stop the others
            log.error("webhooks.unforeseen", delivery=delivery_id, kind=type(error).__name__, exc_info=error)

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            target = await self._store.target(delivery)
        except NotFound:
            await self._end(delivery, "dead", "the endpoint has been deleted")
            return
        delivery = replace(delivery, url=target.url)
        if delivery.data is None:
            await self._end(delivery, "dead", "seven days have passed")
        elif target.disabled:
            await self._end(delivery, "disabled", "the endpoint is disabled")
        else:
            await self._try(delivery, target.secrets)

    async def _try(self, delivery: Delivery, signing_secrets: Sequence[str]) -> None:
        receiver = self._receiver(delivery)
        wait_s = receiver.wait_s(time.monotonic())
        if self._sending[delivery.tenant] >= PER_TENANT:
            wait_s = wait_s or CROWDED_S
        if wait_s:
            await self._store.postpone(delivery, wait_s)
            return
        receiver.sending += 1
        self._sending[delivery.tenant] += 1
        try:
            tried, reply = await self._send(delivery, signing_secrets)
        except TryLater as error:  # our own limit, so it costs the delivery none of its tries
            await self._store.postpone(delivery, error.wait_s)
            return
        finally:
            receiver.sending -= 1
            self._sending[delivery.tenant] -= 1
        receiver.note(worked=tried.error is None, now=time.monotonic())
        settled = after(delivery, tried, reply, now_s=tried.at)
        if settled.state == "disabled" and settled.endpoint_id is not None:
            await self._disable(settled)
        await self._store.settle(settled)
        log.info(
            "webhooks.try", delivery=delivery.id, job_id=delivery.job_id, outcome=settled.state,
            status=tried.status, tries=len(settled.tries), duration_ms=tried.duration_ms,
        )  # fmt: skip

    async def _end(self, delivery: Delivery, state: DeliveryState, reason: str) -> None:
        """Settle a delivery that is not to be tried."""
        log.warning("webhooks.not_sent", delivery=delivery.id, job_id=delivery.job_id, reason=reason)
        await self._store.settle(replace(delivery, state=state, next_try_at=None))

    def _receiver(self, delivery: Delivery) -> Receiver:
        """What is remembered of a delivery's receiver; where there are too many, the idle are forgotten first.

        However its URL is spelled it is one. Of a host that jobs of several tenants name, each has its own: what one
        sends there must not hold up another.
        """
        if len(self._receivers) >= MAX_RECEIVERS:
            now = time.monotonic()
            busy = {name: one for name, one in self._receivers.items() if one.wait_s(now) or one.sending}
            self._receivers = defaultdict(Receiver, busy)
        to = destination(delivery.url)
        return self._receivers[f"{delivery.tenant} {to.host} {to.port}"]

    async def _send(self, delivery: Delivery, signing_secrets: Sequence[str]) -> tuple[Try, Reply | None]:
        at, body = await self._store.now_s(), delivery.body
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "User-Agent": "d3serve-webhooks",
            **signature_headers(delivery.id, int(at), body, signing_secrets),
        }
        began, reply, error = time.monotonic(), None, None
        about: Attributes = {
            "d3serve.job_id": delivery.job_id,
            "http.request.method": "POST",
            "http.request.resend_count": len(delivery.tries),
        }
        with telling("webhook", delivery.traceparent, about, kind="client") as told:
            if told.traceparent is not None:
                headers["traceparent"] = told.traceparent
            try:
                reply = await self._outbound.post(delivery.tenant, delivery.url, headers, body)
                told.attributes["http.response.status_code"] = reply.status
                error = None if 200 <= reply.status < 300 else f"the receiver answered {reply.status}"
            except SendFailed as failure:
                error = str(failure)
            told.error = None if error is None else str(reply.status if reply else "send_failed")
        duration_ms = round((time.monotonic() - began) * 1000)
        return Try(at, reply.status if reply else None, error, duration_ms), reply

    async def _disable(self, delivery: Delivery) -> None:
        with contextlib.suppress(NotFound):
            endpoint = await self._store.endpoint(delivery.tenant, str(delivery.endpoint_id))
            if endpoint.url == delivery.url:  # it may have moved while the old address answered
                await self._store.save_endpoint(
                    replace(endpoint, disabled_reason="the receiver answered 410")
                )


def after(delivery: Delivery, tried: Try, reply: Reply | None, *, now_s: float) -> Delivery:
    """The delivery after an attempt: delivered, due again, dead after ten tries, or disabled by a 410. Pure."""
    tries = (*delivery.tries, tried)
    settled = replace(delivery, tries=tries, next_try_at=None)
    if tried.error is None:
        return replace(settled, state="delivered")
    if tried.status == 410:
        return replace(settled, state="disabled")
    place = len(tries) - delivery.schedule_from - 1
    if place >= len(SCHEDULE_S):
        return replace(settled, state="dead")
    delay_s = SCHEDULE_S[place] * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - not a secret
    if reply is not None and reply.status in (429, 502, 503, 504):
        delay_s = max(delay_s, retry_after_s(reply.retry_after, now_s))
    return replace(settled, next_try_at=now_s + delay_s)


def retry_after_s(header: str | None, now_s: float) -> float:
    """How long a receiver asks to wait, in seconds, at most a day; 0 if it does not say."""
    if header is None:
        return 0.0
    try:
        wait_s = (
            float(header) if header.strip().isdecimal() else parsedate_to_datetime(header).timestamp() - now_s
        )
    except (ValueError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)
