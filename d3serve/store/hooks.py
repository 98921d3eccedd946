"""Webhook endpoints, the outbox and the delivery log (async): used by the API and by the sender.

The script that ends a job writes `<job id>:<event>` into the outbox. The sender turns it into a delivery with
an id that follows from job, event and attempt, and stored bytes; so whatever is repeated after a crash is the
same delivery.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Self

from d3serve.errors import InvalidRequest, NotFound
from d3serve.schemas import JobEvent
from d3serve.settings import Settings
from d3serve.signing import new_secret
from d3serve.store.connect import AsyncClient, open_async, storage_errors
from d3serve.store.keys import Keys
from d3serve.store.lua import run_script_async

KEEP_S: Final = 7 * 86_400  # deliveries, dead ones included
OLD_SECRET_S: Final = 86_400  # after a rotation both secrets sign for a day
MAX_ENDPOINTS: Final = 100
MAX_LOGGED: Final = 10_000  # deliveries listed per tenant
DeliveryState = Literal["pending", "delivered", "dead", "disabled"]


@dataclass(frozen=True)
class Endpoint:
    """A registered receiver. `secrets` are (secret, until when it signs or 0), newest first."""

    id: str
    tenant: str
    url: str
    events: tuple[JobEvent, ...]
    secrets: tuple[tuple[str, float], ...]
    created_at: float
    disabled_reason: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        row = json.loads(text)
        row["events"] = tuple(row["events"])
        row["secrets"] = tuple((secret, until) for secret, until in row["secrets"])
        return cls(**row)

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Try:
    """One attempt at a delivery: when, what the receiver said (None: nothing), why it did not count."""

    at: float
    status: int | None
    error: str | None
    duration_ms: int


@dataclass(frozen=True)
class Delivery:
    """One event for one receiver; `id` is the `webhook-id` of every attempt, `body` its exact bytes."""

    id: str
    tenant: str
    job_id: str
    event: str
    url: str
    endpoint_id: str | None
    body: str
    created_at: float
    state: DeliveryState = "pending"
    next_try_at: float | None = None
    tries: tuple[Try, ...] = field(default=())
    traceparent: str | None = None
    schedule_from: int = 0  # a redelivery begins the schedule anew after so many tries

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        row = json.loads(text)
        row["tries"] = tuple(Try(**one) for one in row["tries"])
        return cls(**row)

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps(asdict(self), ensure_ascii=False)


def delivery_id(job_id: str, event: str, attempt: int) -> str:
    """The id of an event's delivery: the same for ever, and free of dots, which separate what is signed."""
    return "msg_" + hashlib.sha256(f"{job_id} {event} {attempt}".encode()).hexdigest()[:24]


class HookStore:
    """Raises StorageUnavailable when Redis is unreachable or full; a tenant sees only what is its own."""

    def __init__(self, client: AsyncClient, settings: Settings) -> None:
        self._client = client
        self._key = Keys(settings.namespace)

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Make a store on `settings.redis_url`; it connects on first use."""
        return cls(open_async(settings), settings)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def now_s(self) -> float:
        """Redis' clock."""
        with storage_errors():
            seconds, micros = await self._client.time()
        return int(seconds) + int(micros) / 1e6

    # --- endpoints ---------------------------------------------------------------------------------

    async def add_endpoint(self, tenant: str, url: str, events: Sequence[JobEvent]) -> Endpoint:
        """Register a receiver with a fresh secret.

        Raises:
            InvalidRequest: the tenant has a hundred already.
        """
        endpoint = Endpoint(
            id=f"ep_{secrets.token_hex(10)}", tenant=tenant, url=url, events=tuple(events),
            secrets=((new_secret(), 0.0),), created_at=await self.now_s(),
        )  # fmt: skip
        with storage_errors():
            if await self._client.hlen(self._key("endpoints", tenant)) >= MAX_ENDPOINTS:
                raise InvalidRequest(f"there are {MAX_ENDPOINTS} webhook endpoints already; delete one")
        return await self.save_endpoint(endpoint)

    async def save_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Write an endpoint as it now is."""
        with storage_errors():
            await self._client.hset(self._key("endpoints", endpoint.tenant), endpoint.id, endpoint.to_json())
        return endpoint

    async def endpoint(self, tenant: str, endpoint_id: str) -> Endpoint:
        """Read one endpoint.

        Raises:
            NotFound: the tenant has none of this id.
        """
        with storage_errors():
            text = await self._client.hget(self._key("endpoints", tenant), endpoint_id)
        if text is None:
            raise NotFound("no such webhook endpoint", field="endpoint_id")
        return Endpoint.from_json(text)

    async def endpoints(self, tenant: str) -> list[Endpoint]:
        """Read a tenant's endpoints, oldest first."""
        with storage_errors():
            texts = await self._client.hvals(self._key("endpoints", tenant))
        return sorted(map(Endpoint.from_json, texts), key=lambda endpoint: endpoint.created_at)

    async def delete_endpoint(self, tenant: str, endpoint_id: str) -> None:
        """Remove an endpoint; what is due for it dies at its next try."""
        await self.endpoint(tenant, endpoint_id)
        with storage_errors():
            await self._client.hdel(self._key("endpoints", tenant), endpoint_id)

    async def rotate_secret(self, tenant: str, endpoint_id: str) -> Endpoint:
        """Give the endpoint a new secret; for a day the one before it signs too."""
        endpoint = await self.endpoint(tenant, endpoint_id)
        newest, until = endpoint.secrets[0][0], await self.now_s() + OLD_SECRET_S
        return await self.save_endpoint(replace(endpoint, secrets=((new_secret(), 0.0), (newest, until))))

    async def tenant_secret(self, tenant: str) -> str:
        """The secret that signs deliveries to the URLs that jobs name themselves; made when first asked for."""
        key = self._key("hook_secret", tenant)
        with storage_errors():
            await self._client.set(key, new_secret(), nx=True)
            return str(await self._client.get(key))

    async def signing_secrets(self, delivery: Delivery) -> list[str]:
        """The secrets that sign a delivery now.

        Raises:
            NotFound: its endpoint has been deleted.
        """
        if delivery.endpoint_id is None:
            return [await self.tenant_secret(delivery.tenant)]
        endpoint, now = await self.endpoint(delivery.tenant, delivery.endpoint_id), await self.now_s()
        return [secret for secret, until in endpoint.secrets if until == 0 or until > now]

    # --- the outbox --------------------------------------------------------------------------------

    async def claim(self, most: int, lease_s: float) -> list[str]:
        """Take members of the outbox that are due; one not settled within `lease_s` is due again."""
        with storage_errors():
            lease_ms = round(lease_s * 1000)
            return list(await run_script_async(self._client, "hook_claim", self._key.prefix, most, lease_ms))

    async def put(self, delivery: Delivery, *, instead_of: str | None = None) -> None:
        """Write a delivery and, if it is pending, when it is due; `instead_of` leaves the outbox in the same step."""
        with storage_errors():
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.set(self._key("hook", delivery.id), delivery.to_json(), ex=KEEP_S)
                pipe.zadd(self._key("hooks_of", delivery.tenant), {delivery.id: delivery.created_at})
                pipe.zremrangebyrank(self._key("hooks_of", delivery.tenant), 0, -MAX_LOGGED - 1)
                pipe.expire(self._key("hooks_of", delivery.tenant), KEEP_S)
                if delivery.next_try_at is None:
                    pipe.zrem(self._key("hooks_due"), delivery.id)
                else:
                    pipe.zadd(self._key("hooks_due"), {delivery.id: round(delivery.next_try_at * 1000)})
                if instead_of is not None:
                    pipe.zrem(self._key("hooks_due"), instead_of)
                await pipe.execute()

    async def postpone(self, member: str, seconds: float) -> None:
        """Make a claimed member due again after `seconds`."""
        due_ms = round((await self.now_s() + seconds) * 1000)
        with storage_errors():
            await self._client.zadd(self._key("hooks_due"), {member: due_ms}, xx=True)

    async def drop(self, member: str) -> None:
        """Take a member out of the outbox: there is nothing to deliver."""
        with storage_errors():
            await self._client.zrem(self._key("hooks_due"), member)

    async def delivery(self, delivery_id: str, tenant: str | None = None) -> Delivery:
        """Read a delivery; with `tenant`, only if it is that tenant's.

        Raises:
            NotFound: there is none, or no longer.
        """
        with storage_errors():
            text = await self._client.get(self._key("hook", delivery_id))
        delivery = Delivery.from_json(text) if text else None
        if delivery is None or tenant not in (None, delivery.tenant):
            raise NotFound("no such webhook delivery", field="delivery_id")
        return delivery

    async def deliveries(
        self, tenant: str, *, job_id: str | None = None, state: DeliveryState | None = None, limit: int = 50
    ) -> list[Delivery]:
        """Read a tenant's deliveries, newest first."""
        with storage_errors():
            ids = await self._client.zrevrange(self._key("hooks_of", tenant), 0, MAX_LOGGED)
            found: list[Delivery] = []
            for start in range(0, len(ids), 100):
                texts = await self._client.mget([self._key("hook", one) for one in ids[start : start + 100]])
                rows = [Delivery.from_json(text) for text in texts if text]
                found += [
                    row
                    for row in rows
                    if (job_id is None or row.job_id == job_id) and (state is None or row.state == state)
                ]
                if len(found) >= limit:
                    break
        return found[:limit]

    async def job_to_tell(self, job_id: str) -> Mapping[str, Any] | None:
        """The raw hash of a job whose event is to be delivered, or None if the job is gone."""
        with storage_errors():
            row = await self._client.hgetall(self._key("job", job_id))
        return row or None

    async def result_to_tell(self, job_id: str, most_bytes: int) -> str | None:
        """The job's result if it is there and small enough to be put into an event."""
        with storage_errors():
            size = await self._client.strlen(self._key("res", job_id))
            text = await self._client.get(self._key("res", job_id)) if 0 < size <= most_bytes else None
        return str(text) if text else None
