"""A job as the server told it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from d3serve.client.questions import Answers
from d3serve.errors import D3ServeError, JobNotFinished, error_class


@dataclass(frozen=True)
class Job:
    """A job as the server told it; `raw` holds all of it. Trust `done`, not a list of final statuses.

    `result` are its answers, if it succeeded and they were asked for.
    """

    id: str
    status: str
    done: bool
    attempt: int
    error: Mapping[str, Any] | None
    raw: Mapping[str, Any]
    result: Answers | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read the job resource."""
        result = Answers.from_json(body["result"]) if "result" in body else None
        return cls(body["id"], body["status"], body["done"], body["attempt"], body.get("error"), body, result)

    @property
    def failure(self) -> D3ServeError | None:
        """Why a job that is done has no answers, as the error that its code names."""
        if not self.done or self.status == "succeeded":
            return None
        if self.error is None:
            return JobNotFinished(f"job {self.id} is {self.status}", details={"status": self.status})
        return error_class(self.error["code"])(self.error["message"], details={"job_id": self.id})


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, newest first; `cursor` asks for the next one, None is the end."""

    jobs: tuple[Job, ...]
    cursor: str | None
