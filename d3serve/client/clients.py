"""The two clients: `Client` blocks, `AsyncClient` awaits; what they do is written once in `protocol`."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Self

import httpx

from d3serve.client import protocol
from d3serve.client.events import Event, EventReader
from d3serve.client.media import Source, media_fields
from d3serve.client.protocol import Job, JobPage, Outcome, Send, Sleep, Steps, T, Trouble
from d3serve.client.server import Server
from d3serve.errors import InvalidRequest

DEFAULT_MODEL = "jev-latest"


def _headers(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidRequest(
            "the API key holds a blank, a line break or a character beyond ASCII: it is no key of ours",
            field="api_key",
        )
    return {"Authorization": f"Bearer {api_key}"}


def _body(
    state: Any, questions: Mapping[str, Any], model: str, job: Mapping[str, Any] | None
) -> dict[str, Any]:
    body = {"model": model, "state": state, "questions": questions}
    return body | ({"job": job} if job else {})


class Client:
    """A blocking client. Every method retries what retrying can mend, and raises `d3serve.errors` for the rest.

    No answer, 429, 502, 503, 504 and a 500 that is not d3serve's own are tried again until they have lasted
    `patience_s`, which an API's restart does not. The environment's proxy is used, except for loopback hosts.

    Raises:
        InvalidRequest: `base_url` is no http or https URL, `api_key` is no key, or the environment's proxy or
            certificates cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        patience_s: float = protocol.PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._server, self._patience_s = Server.at(base_url), patience_s
        self._http = httpx.Client(
            base_url=self._server.url,
            headers=_headers(api_key),
            transport=transport or self._server.transport(httpx.HTTPTransport),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ping(self) -> None:
        """Return if a d3serve server answers, whether or not it has a worker.

        Raises:
            StorageUnavailable: nobody answers.
            InternalError: another server does.
        """
        self._run(protocol.ping())

    def submit(
        self,
        state: Any,
        questions: Mapping[str, Any],
        *,
        model: str = DEFAULT_MODEL,
        job: Mapping[str, Any] | None = None,
        images: Iterable[Source] = (),
        videos: Iterable[Source] = (),
        idempotency_key: str | None = None,
    ) -> Job:
        """Post a job and return it as it was accepted.

        Args:
            state: what is asked about: a text, or JSON.
            questions: by name, as the HTTP API has them.
            model: which one answers.
            job: its options: lane, webhook, metadata ...
            images: what the state shows: paths, bytes of files, data URLs or Pillow images.
            videos: the same: paths, bytes of files or data URLs.
            idempotency_key: makes a second job of the same key the first one; made up if there is none.
        """
        body = _body(state, questions, model, job) | media_fields(images, videos)
        return self.submit_body(body, idempotency_key=idempotency_key)

    def submit_body(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Post a request body as it is: what is wrong with it is for the server to say."""
        return self._run(protocol.submit({"model": DEFAULT_MODEL, **body}, idempotency_key))

    def ask(self, state: Any, questions: Mapping[str, Any], **options: Any) -> Mapping[str, Any]:
        """Submit, wait, and return the System One response; options as for `submit`."""
        return self.result(self.wait(self.submit(state, questions, **options).id).id)

    def get(self, job_id: str) -> Job:
        """Read a job, with its result if it has one."""
        return self._run(protocol.get(job_id))

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Return the job once it is done.

        Raises:
            JobNotFinished: not within `timeout_s`; the job goes on.
        """
        return self._run(protocol.wait(job_id, timeout_s))

    def result(self, job_id: str) -> Mapping[str, Any]:
        """Return the System One response of a job that succeeded; raise the error of one that failed."""
        return self._run(protocol.result(job_id))

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a job; one that is done stays as it is."""
        return self._run(protocol.act("POST", job_id, "/cancel"))

    def retry(self, job_id: str) -> Job | None:
        """Queue a job that failed, expired or was canceled again."""
        return self._run(protocol.act("POST", job_id, "/retry"))

    def delete(self, job_id: str) -> None:
        """Erase a job's input and result."""
        self._run(protocol.act("DELETE", job_id))

    def list(
        self,
        *,
        status: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> JobPage:
        """Return a page of the caller's jobs, newest first."""
        filters = {"status": status, "limit": limit, "cursor": cursor}
        return self._run(protocol.list_jobs(filters, metadata or {}))

    def events(self, job_id: str) -> Iterator[Event]:
        """Yield what happens to a job until it is done; a broken connection is taken up where it broke."""
        reader = EventReader()
        trouble = Trouble(self._server, self._patience_s)
        while True:
            request = protocol.events(job_id, reader)
            outcome: Outcome
            try:
                with self._http.stream(
                    request.method, request.path, headers=request.headers, timeout=request.timeout
                ) as response:
                    outcome = response
                    if not protocol.is_stream(response):
                        response.read()
                    else:
                        trouble.heard()
                        for chunk in response.iter_bytes():
                            for event in reader.feed(chunk):
                                trouble.over()
                                yield event
                            if reader.ended:
                                return
            except protocol.FOREIGN as error:
                outcome = error
            time.sleep(max(reader.retry_s, trouble.pause_s(outcome)))

    def _run(self, steps: Steps[T]) -> T:
        patient = protocol.patiently(steps, self._server, self._patience_s)
        outcome: Outcome = None
        while True:
            try:
                step = patient.send(outcome)
            except StopIteration as end:
                value: T = end.value
                return value
            outcome = self._carry_out(step)

    def _carry_out(self, step: Send | Sleep) -> Outcome:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(
                step.method, step.path, params=step.params, content=step.content, headers=step.headers,
                timeout=step.timeout,
            )  # fmt: skip
        except protocol.FOREIGN as error:
            return error


class AsyncClient:
    """The same to await; see `Client` for what each method promises."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        patience_s: float = protocol.PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._server, self._patience_s = Server.at(base_url), patience_s
        self._http = httpx.AsyncClient(
            base_url=self._server.url,
            headers=_headers(api_key),
            transport=transport or self._server.transport(httpx.AsyncHTTPTransport),
        )

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
        questions: Mapping[str, Any],
        *,
        model: str = DEFAULT_MODEL,
        job: Mapping[str, Any] | None = None,
        images: Iterable[Source] = (),
        videos: Iterable[Source] = (),
        idempotency_key: str | None = None,
    ) -> Job:
        """Post a job and return it as it was accepted."""
        body = _body(state, questions, model, job) | await asyncio.to_thread(media_fields, images, videos)
        return await self.submit_body(body, idempotency_key=idempotency_key)

    async def submit_body(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Post a request body as it is."""
        return await self._run(protocol.submit({"model": DEFAULT_MODEL, **body}, idempotency_key))

    async def ask(self, state: Any, questions: Mapping[str, Any], **options: Any) -> Mapping[str, Any]:
        """Submit, wait, and return the System One response."""
        return await self.result((await self.wait((await self.submit(state, questions, **options)).id)).id)

    async def get(self, job_id: str) -> Job:
        """Read a job."""
        return await self._run(protocol.get(job_id))

    async def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Return the job once it is done."""
        return await self._run(protocol.wait(job_id, timeout_s))

    async def result(self, job_id: str) -> Mapping[str, Any]:
        """Return the System One response."""
        return await self._run(protocol.result(job_id))

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
