"""Webhook endpoints, the outbox and the delivery log (async): used by the API and by the sender.

The script that ends a job writes the event, its delivery and the time when that is due, in the same step. So an
event tells what happened when it happened, whatever becomes of its job, and whatever is repeated after a crash is
the same delivery.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple, Self

from d3serve.errors import EventErased, InvalidRequest, NotFound
from d3serve.schemas import JobEvent
from d3serve.store.table import AsyncStore
from d3serve.webhooks.signing import new_secret

OLD_SECRET_S: Final = 86_400  # after a rotation both secrets sign for a day
MAX_ENDPOINTS: Final = 100
MAX_OPEN_BYTES: Final = 128 * 2**20  # a tenant's undelivered events; what the embedded broker has is 2 GiB
DeliveryState = Literal["pending", "delivered", "dead", "disabled", "erased"]


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


class Target(NamedTuple):
    """Where a delivery goes now and what signs it; `disabled` is its endpoint's state."""

    url: str
    secrets: list[str]
    disabled: bool = False


@dataclass(frozen=True)
class Delivery:
    """One event for one receiver; `id` is the `webhook-id` of every attempt.

    `data` is what the event tells, JSON; None where it was not asked for or is no longer kept.
    """

    id: str
    tenant: str
    job_id: str
    event: str
    url: str
    endpoint_id: str | None
    created_at: float
    state: DeliveryState = "pending"
    next_try_at: float | None = None
    tries: tuple[Try, ...] = field(default=())
    traceparent: str | None = None
    schedule_from: int = 0  # a redelivery begins the schedule anew after so many tries
    data: str | None = None

    @property
    def body(self) -> bytes:
        """The exact bytes of every attempt: type, time and data."""
        at = datetime.fromtimestamp(self.created_at, UTC).isoformat(timespec="milliseconds")
        stamp = at.replace("+00:00", "Z")
        return f'{{"type":"{self.event}","timestamp":"{stamp}","data":{self.data}}}'.encode()

    @classmethod
    def from_hash(cls, delivery_id: str, row: Mapping[str, str], data: str | None = None) -> Self:
        """Read the hash `delivery:<id>`."""
        created = int(row["created"]) / 1000
        due = int(row["due"]) / 1000 if "due" in row else created
        return cls(
            id=delivery_id,
            tenant=row["tenant"],
            job_id=row.get("job_id", ""),
            event=row["event"],
            url=row["url"],
            endpoint_id=row.get("endpoint_id") or None,
            created_at=created,
            state=row["state"],  # type: ignore[arg-type] # only our scripts write it
            next_try_at=due if row["state"] == "pending" else None,
            tries=tuple(Try(**one) for one in json.loads(row.get("tries", "[]"))),
            traceparent=row.get("traceparent") or None,
            schedule_from=int(row.get("schedule_from", 0)),
            data=data,
        )


class HookStore(AsyncStore):
    """Raises StorageUnavailable when Redis is unreachable or full; a tenant sees only what is its own."""

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
        if await self._table.send("hlen", self._key("endpoints", tenant)) >= MAX_ENDPOINTS:
            raise InvalidRequest(f"there are {MAX_ENDPOINTS} webhook endpoints already; delete one")
        return await self.save_endpoint(endpoint)

    async def save_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Write an endpoint as it now is."""
        key = self._key("endpoints", endpoint.tenant)
        await self._table.send("hset", key, endpoint.id, endpoint.to_json())
        return endpoint

    async def endpoint(self, tenant: str, endpoint_id: str) -> Endpoint:
        """Read one endpoint.

        Raises:
            NotFound: the tenant has none of this id.
        """
        text = await self._table.send("hget", self._key("endpoints", tenant), endpoint_id)
        if text is None:
            raise NotFound("no such webhook endpoint", field="endpoint_id")
        return Endpoint.from_json(text)

    async def endpoints(self, tenant: str) -> list[Endpoint]:
        """Read a tenant's endpoints, oldest first."""
        texts = await self._table.send("hvals", self._key("endpoints", tenant))
        return sorted(map(Endpoint.from_json, texts), key=lambda endpoint: endpoint.created_at)

    async def delete_endpoint(self, tenant: str, endpoint_id: str) -> None:
        """Remove an endpoint; what is due for it dies at its next try."""
        await self.endpoint(tenant, endpoint_id)
        await self._table.send("hdel", self._key("endpoints", tenant), endpoint_id)

    async def rotate_secret(self, tenant: str, endpoint_id: str) -> Endpoint:
        """Give the endpoint a new secret; for a day the one before it signs too."""
        endpoint = await self.endpoint(tenant, endpoint_id)
        newest, until = endpoint.secrets[0][0], await self.now_s() + OLD_SECRET_S
        return await self.save_endpoint(replace(endpoint, secrets=((new_secret(), 0.0), (newest, until))))

    async def tenant_secret(self, tenant: str) -> str:
        """The secret that signs deliveries to the URLs that jobs name themselves; made when first asked for."""
        key = self._key("hook_secret", tenant)
        await self._table.send("set", key, new_secret(), nx=True)
        return str(await self._table.send("get", key))

    async def target(self, delivery: Delivery) -> Target:
        """Where a delivery goes and what signs it now: an endpoint may have moved since the event.

        Raises:
            NotFound: its endpoint has been deleted.
        """
        if delivery.endpoint_id is None:
            return Target(delivery.url, [await self.tenant_secret(delivery.tenant)])
        endpoint, now = await self.endpoint(delivery.tenant, delivery.endpoint_id), await self.now_s()
        signing = [secret for secret, until in endpoint.secrets if until == 0 or until > now]
        return Target(endpoint.url, signing, disabled=endpoint.disabled_reason is not None)

    # --- the outbox --------------------------------------------------------------------------------

    async def claim(self, most: int, lease_s: float) -> list[str]:
        """Take deliveries that are due; one not settled within `lease_s` is due again."""
        return list(await self._table.run("hook_claim", most, round(lease_s * 1000)))

    async def open_delivery(
        self, tenant: str, event: str, url: str, endpoint_id: str | None, data: str
    ) -> Delivery:
        """Make a delivery that no job caused, due now, with an id that no other has."""
        delivery_id = f"msg_{secrets.token_hex(12)}"
        await self._table.run(
            "hook_open", delivery_id, tenant, data,
            "event", event, "url", url, "endpoint_id", endpoint_id or "",
        )  # fmt: skip
        return await self.delivery(delivery_id)

    async def settle(self, delivery: Delivery, *, was: DeliveryState = "pending") -> bool:
        """Write what became of a delivery that was in the state `was`; False when it no longer is, as after DELETE."""
        due = "" if delivery.next_try_at is None else int(delivery.next_try_at * 1000)  # "now" is due now
        tries = json.dumps([asdict(one) for one in delivery.tries])
        return bool(await self._table.run(
            "hook_settle", delivery.id, was, delivery.state, due,
            "url", delivery.url, "tries", tries, "schedule_from", delivery.schedule_from,
        ))  # fmt: skip

    async def redeliver(self, delivery_id: str, tenant: str) -> Delivery:
        """Make a delivery due now, its schedule begun anew.

        Raises:
            NotFound: the tenant has none of this id.
            EventErased: what it told is no longer kept.
        """
        while True:
            found = await self.delivery(delivery_id, tenant)
            if found.data is None:
                raise EventErased(
                    f"the event of this {found.state} delivery is no longer kept: it goes once it is delivered, when "
                    "its job is deleted, or after seven days"
                )
            now = await self.now_s()
            again = replace(found, state="pending", next_try_at=now, schedule_from=len(found.tries))
            if await self.settle(again, was=found.state):
                return again

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        """Make a claimed delivery due again after `seconds`; that is no try."""
        await self._table.run("hook_postpone", delivery.id, delivery.tenant, round(seconds * 1000))

    async def delivery(self, delivery_id: str, tenant: str | None = None) -> Delivery:
        """Read a delivery with what it tells; with `tenant`, only if it is that tenant's.

        Raises:
            NotFound: there is none, or no longer.
        """
        async with self._table.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._key("delivery", delivery_id)).get(self._key("told", delivery_id))
            row, data = await pipe.execute()
        if not row or tenant not in (None, row["tenant"]):
            raise NotFound("no such webhook delivery", field="delivery_id")
        return Delivery.from_hash(delivery_id, row, data)

    async def deliveries(
        self, tenant: str, *, job_id: str | None = None, state: DeliveryState | None = None, limit: int = 50
    ) -> list[Delivery]:
        """Read a tenant's deliveries, newest first, without what they tell."""
        ids = await self._table.send("zrevrange", self._key("hooks_of", tenant), 0, -1)
        found: list[Delivery] = []
        for start in range(0, len(ids), 100):
            some = ids[start : start + 100]
            async with self._table.pipeline() as pipe:
                for one in some:
                    pipe.hgetall(self._key("delivery", one))
                rows = await pipe.execute()
            found += [
                Delivery.from_hash(one, row)
                for one, row in zip(some, rows, strict=True)
                if row and job_id in (None, row.get("job_id")) and state in (None, row["state"])
            ]
            if len(found) >= limit:
                break
        return found[:limit]

    async def open_bytes(self, tenant: str) -> int:
        """How much a tenant's undelivered events take."""
        return int(await self._table.send("hget", self._key("hooks_open", tenant), "total") or 0)
