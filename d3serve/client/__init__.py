"""The Python client: submit a state with questions, wait for the answers, follow, cancel, verify a webhook.

    with Client.from_env() as client:
        answers = client.ask("...", {"spam": YesNo("Is it spam?"), "team": Choice("Which team?", ["a", "b"])}).answers
        print(answers["spam"].probability, answers["team"].choice)

`AsyncClient` has the same methods to await. Errors are those of `d3serve.errors`: what the server refused
with `invalid_question` is raised as `InvalidQuestion`.
"""

from d3serve.client.async_client import AsyncClient
from d3serve.client.clients import Client
from d3serve.client.events import Event
from d3serve.client.frames import ask_frame
from d3serve.client.jobs import Job, JobPage
from d3serve.client.questions import Answers, Choice, Score, YesNo
from d3serve.webhooks.signing import verify as verify_webhook

__all__ = [
    "Answers", "AsyncClient", "Choice", "Client", "Event", "Job", "JobPage", "Score", "YesNo", "ask_frame",
    "verify_webhook",
]  # fmt: skip
