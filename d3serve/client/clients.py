"""`Client`, which blocks; what it does is written in `protocol`, once for both clients."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from d3serve.client.webhooks import Webhooks
from d3serve.errors import D3ServeError, RequestError


class Client:
    """A blocking client. Every method retries what retrying can mend, and raises `d3serve.errors` for the rest.

    Without `base_url` it asks the server that D3SERVE_URL names, or the one on this host, with the key of
    D3SERVE_API_KEY or D3SERVE_API_KEY_FILE.

    No answer, 429, 502, 503, 504 and a 500 that is not d3serve's own are tried again until they have lasted
    `patience_s`, which an API's restart does not. The environment's proxy is used, except for loopback hosts.

    Raises:
        InvalidRequest: `base_url` is no http or https URL, `api_key` is no key, or the environment's proxy or
            certificates cannot be used.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        patience_s: float = protocol.PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url, key = named_server(base_url, api_key)
        self._server, self._patience_s = Server.at(url), patience_s
        self._http = httpx.Client(
            base_url=self._server.url,
            headers=key_headers(key),
            transport=transport or self._server.transport(httpx.HTTPTransport),
        )
        self.webhooks = Webhooks(self._run)

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """The client of the server that the environment names; options as of the class."""
        return cls(None, **options)

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
        questions: Questions,
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
            questions: by name: `YesNo`, `Choice` and `Score`, or objects as the HTTP API has them.
            model: which one answers.
            job: its options: lane, webhook, metadata ...
            images: what the state shows: paths, bytes of files, data URLs or Pillow images.
            videos: the same: paths, bytes of files or data URLs.
            idempotency_key: makes a second job of the same key the first one; made up if there is none.
        """
        body = request_body(state, questions, model, job) | media_fields(images, videos)
        return self.submit_body(body, idempotency_key=idempotency_key)

    def submit_body(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Post a request body as it is: what is wrong with it is for the server to say."""
        return self._run(protocol.submit({"model": DEFAULT_MODEL, **body}, idempotency_key))

    def count_body(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a job of this body would read, whether it would be taken, and how long it would take; none is made."""
        return self._run(protocol.count({"model": DEFAULT_MODEL, **body}))

    def ask(self, state: Any, questions: Questions, **options: Any) -> Answers:
        """Submit, wait, and return the System One response; options as for `submit`."""
        return self.result(self.wait(self.submit(state, questions, **options).id).id)

    @overload
    def map(
        self, states: Iterable[Any], questions: Questions, *, return_exceptions: Literal[True], **options: Any
    ) -> Iterator[Answers | D3ServeError]: ...

    @overload
    def map(self, states: Iterable[Any], questions: Questions, **options: Any) -> Iterator[Answers]: ...

    def map(
        self,
        states: Iterable[Any],
        questions: Questions,
        *,
        at_once: int = AT_ONCE,
        retries: int = RETRIES,
        return_exceptions: bool = False,
        progress: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> Iterator[Answers | D3ServeError]:
        """Ask the same questions of many states; yield their answers in the order of the states, as they come.

        No more states are taken than `at_once` jobs are at the server. Those that are left when the caller stops early
        run on.

        Args:
            states: any number of them.
            questions: of each state, as for `submit`.
            at_once: how many jobs may be at the server.
            retries: how often a job is run again that failed through no fault of its request.
            return_exceptions: yield the error of a state that has no answers in their place, and go on.
            progress: is told after each state how many are done.
            options: of each job, as for `submit`.
        """
        rest, done = iter(states), 0
        waiting: deque[Job | D3ServeError] = deque()
        while True:
            for state in islice(rest, at_once - len(waiting)):
                try:
                    waiting.append(self.submit(state, questions, **options))
                except RequestError as error:
                    waiting.append(protocol.of_this_state(error))
            if not waiting:
                return
            job = waiting.popleft()
            found = self._run(protocol.settle(job, retries)) if isinstance(job, Job) else job
            if isinstance(found, D3ServeError) and not return_exceptions:
                raise found
            done += 1
            if progress is not None:
                progress(done)
            yield found

    def get(self, job_id: str) -> Job:
        """Read a job, with its result if it has one."""
        return self._run(protocol.get(job_id))

    def asked(self, job_id: str) -> Mapping[str, Any]:
        """Read back what a job was asked: `model`, `state`, `questions`, and what is known of its `media`.

        Raises:
            RequestErased: it is no longer kept, although the job is.
        """
        return self._run(protocol.asked(job_id))

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Return the job once it is done.

        Raises:
            JobNotFinished: not within `timeout_s`; the job goes on.
        """
        return self._run(protocol.wait(job_id, timeout_s))

    def result(self, job_id: str) -> Answers:
        """Return the System One response of a job that succeeded; raise the error of one that failed."""
        return self._run(protocol.result(job_id))

    def models(self) -> Sequence[Mapping[str, Any]]:
        """The models served, with their limits, as `/v1/models` has them."""
        return self._run(protocol.models())

    def queue(self) -> Mapping[str, Any]:
        """How much waits, as `/v1/queue` has it."""
        return self._run(protocol.queue())

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
