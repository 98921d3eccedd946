"""Receivers of webhooks, the secret that signs, and what became of deliveries: `client.webhooks`."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from d3serve.client import protocol

Told = Mapping[str, Any]  # a resource as the HTTP API has it
ENDPOINTS, DELIVERIES = "/v1/webhook-endpoints", "/v1/webhook-deliveries"


class Webhooks:
    """What a blocking client does with webhooks."""

    def __init__(self, run: Callable[[protocol.Steps[Any]], Any]) -> None:
        self._run = run

    def add(self, url: str, events: Iterable[str] = ()) -> Told:
        """Register a receiver; the answer is the only one that shows its secret. No events: all of them."""
        told: Told = self._run(protocol.change("POST", ENDPOINTS, {"url": url, "events": list(events)}))
        return told

    def list(self) -> Sequence[Told]:
        """The caller's receivers."""
        told: Told = self._run(protocol.read(ENDPOINTS))
        return list_of(told)

    def remove(self, endpoint_id: str) -> None:
        """Remove a receiver; what is still due for it is dropped."""
        self._run(protocol.change("DELETE", protocol.step(ENDPOINTS, endpoint_id)))

    def secret(self) -> str:
        """The secret that signs deliveries to the URLs that jobs name themselves."""
        return str(self._run(protocol.read("/v1/webhook-secret"))["secret"])

    def deliveries(self, job_id: str | None = None) -> Sequence[Told]:
        """Deliveries, newest first, with every attempt and why it did not count."""
        told: Told = self._run(protocol.read(DELIVERIES, {"job_id": job_id} if job_id else {}))
        return list_of(told)

    def redeliver(self, delivery_id: str) -> Told:
        """Send an event again that no receiver has taken."""
        told: Told = self._run(protocol.change("POST", protocol.step(DELIVERIES, delivery_id) + "/redeliver"))
        return told


class AsyncWebhooks:
    """The same to await."""

    def __init__(self, run: Callable[[protocol.Steps[Any]], Awaitable[Any]]) -> None:
        self._run = run

    async def add(self, url: str, events: Iterable[str] = ()) -> Told:
        """Register a receiver."""
        told: Told = await self._run(protocol.change("POST", ENDPOINTS, {"url": url, "events": list(events)}))
        return told

    async def list(self) -> Sequence[Told]:
        """The caller's receivers."""
        told: Told = await self._run(protocol.read(ENDPOINTS))
        return list_of(told)

    async def remove(self, endpoint_id: str) -> None:
        """Remove a receiver."""
        await self._run(protocol.change("DELETE", protocol.step(ENDPOINTS, endpoint_id)))

    async def secret(self) -> str:
        """The secret that signs deliveries to the URLs that jobs name themselves."""
        return str((await self._run(protocol.read("/v1/webhook-secret")))["secret"])

    async def deliveries(self, job_id: str | None = None) -> Sequence[Told]:
        """Deliveries, newest first."""
        told: Told = await self._run(protocol.read(DELIVERIES, {"job_id": job_id} if job_id else {}))
        return list_of(told)

    async def redeliver(self, delivery_id: str) -> Told:
        """Send an event again that no receiver has taken."""
        told: Told = await self._run(
            protocol.change("POST", protocol.step(DELIVERIES, delivery_id) + "/redeliver")
        )
        return told


def list_of(page: Told) -> Sequence[Told]:
    """The entries of a page."""
    return tuple(page["data"])
