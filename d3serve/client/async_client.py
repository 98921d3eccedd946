"""`AsyncClient`, which awaits; what it does is written in `protocol`, once for both clients."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Self, overload

import httpx

from d3serve.client import protocol
from d3serve.client.events import Event, EventReader
from d3serve.client.jobs import Job, JobPage
from d3serve.client.media import Source, media_fields
from d3serve.client.protocol import AT_ONCE, RETRIES, Outcome, Send, Sleep, Steps, T, Trouble
from d3serve.client.questions import Answers, Questions
from d3serve.client.sending import DEFAULT_MODEL, key_headers, named_server, request_body
from d3serve.client.server import Server
from d3serve.client.webhooks import AsyncWebhooks
from d3serve.errors import D3ServeError, RequestError


class AsyncClient:
    """The same to await; see `Client` for what each method promises."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        patience_s: float = protocol.PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url, key = named_server(base_url, api_key)
        self._server, self._patience_s = Server.at(url), patience_s
        self._http = httpx.AsyncClient(
            base_url=self._server.url,
            headers=key_headers(key),
            transport=transport or self._server.transport(httpx.AsyncHTTPTransport),
        )
        self.webhooks = AsyncWebhooks(self._run)

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """The client of the server that the environment names; options as of the class."""
        return cls(None, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ping(self) -> None:
        """Return if a d3serve server answers."""
        await self._run(protocol.ping())

    async def submit(
        self,
        state: Any,
        questions: Questions,
        *,
        model: str = DEFAULT_MODEL,
        job: Mapping[str, Any] | None = None,
        images: Iterable[Source] = (),
        videos: Iterable[Source] = (),
        idempotency_key: str | None = None,
    ) -> Job:
        """Post a job and return it as it was accepted."""
        body = request_body(state, questions, model, job) | await asyncio.to_thread(
            media_fields, images, videos
        )
        return await self.submit_body(body, idempotency_key=idempotency_key)

    async def submit_body(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Post a request body as it is."""
        return await self._run(protocol.submit({"model": DEFAULT_MODEL, **body}, idempotency_key))

    async def count_body(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a job of this body would read, whether it would be taken, and how long it would take; none is made."""
        return await self._run(protocol.count({"model": DEFAULT_MODEL, **body}))

    async def ask(self, state: Any, questions: Questions, **options: Any) -> Answers:
        """Submit, wait, and return the System One response."""
        return await self.result((await self.wait((await self.submit(state, questions, **options)).id)).id)

    @overload
    def map(
        self, states: Iterable[Any], questions: Questions, *, return_exceptions: Literal[True], **options: Any
    ) -> AsyncIterator[Answers | D3ServeError]: ...

    @overload
    def map(self, states: Iterable[Any], questions: Questions, **options: Any) -> AsyncIterator[Answers]: ...

    async def map(
        self,
        states: Iterable[Any],
        questions: Questions,
        *,
        at_once: int = AT_ONCE,
        retries: int = RETRIES,
        return_exceptions: bool = False,
        progress: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Answers | D3ServeError]:
        """Ask the same questions of many states; yield their answers in the order of the states."""
        rest, done = iter(states), 0
        waiting: deque[Job | D3ServeError] = deque()
        while True:
            for state in islice(rest, at_once - len(waiting)):
                try:
                    waiting.append(await self.submit(state, questions, **options))
                except RequestError as error:
                    waiting.append(protocol.of_this_state(error))
            if not waiting:
                return
            job = waiting.popleft()
            found = await self._run(protocol.settle(job, retries)) if isinstance(job, Job) else job
            if isinstance(found, D3ServeError) and not return_exceptions:
                raise found
            done += 1
            if progress is not None:
                progress(done)
            yield found

    async def get(self, job_id: str) -> Job:
        """Read a job."""
        return await self._run(protocol.get(job_id))

    async def asked(self, job_id: str) -> Mapping[str, Any]:
        """Read back what a job was asked."""
        return await self._run(protocol.asked(job_id))

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Return the job once it is done."""
        return await self._run(protocol.wait(job_id, timeout_s))

    async def result(self, job_id: str) -> Answers:
        """Return the System One response."""
        return await self._run(protocol.result(job_id))

    async def models(self) -> Sequence[Mapping[str, Any]]:
        """The models served."""
        return await self._run(protocol.models())

    async def queue(self) -> Mapping[str, Any]:
        """How much waits."""
        return await self._run(protocol.queue())

    async def cancel(self, job_id: str) -> Job | None:
        """Cancel a job."""
        return await self._run(protocol.act("POST", job_id, "/cancel"))

    async def retry(self, job_id: str) -> Job | None:
        """Queue a job again."""
        return await self._run(protocol.act("POST", job_id, "/retry"))

    async def delete(self, job_id: str) -> None:
        """Erase a job."""
        await self._run(protocol.act("DELETE", job_id))

    async def list(
        self,
        *,
        status: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> JobPage:
        """Return a page of jobs."""
        filters = {"status": status, "limit": limit, "cursor": cursor}
        return await self._run(protocol.list_jobs(filters, metadata or {}))

    async def events(self, job_id: str) -> AsyncIterator[Event]:
        """Yield what happens to a job until it is done."""
        reader = EventReader()
        trouble = Trouble(self._server, self._patience_s)
        while True:
            request = protocol.events(job_id, reader)
            outcome: Outcome
            try:
                async with self._http.stream(
                    request.method, request.path, headers=request.headers, timeout=request.timeout
                ) as response:
                    outcome = response
                    if not protocol.is_stream(response):
                        await response.aread()
                    else:
                        trouble.heard()
                        async for chunk in response.aiter_bytes():
                            for event in reader.feed(chunk):
                                trouble.over()
                                yield event
                            if reader.ended:
                                return
            except protocol.FOREIGN as error:
                outcome = error
            await asyncio.sleep(max(reader.retry_s, trouble.pause_s(outcome)))

    async def _run(self, steps: Steps[T]) -> T:
        patient = protocol.patiently(steps, self._server, self._patience_s)
        outcome: Outcome = None
        while True:
            try:
                step = patient.send(outcome)
            except StopIteration as end:
                value: T = end.value
                return value
            outcome = await self._carry_out(step)

    async def _carry_out(self, step: Send | Sleep) -> Outcome:
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(
                step.method, step.path, params=step.params, content=step.content, headers=step.headers,
                timeout=step.timeout,
            )  # fmt: skip
        except protocol.FOREIGN as error:
            return error
