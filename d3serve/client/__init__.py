"""The Python client: submit a state with questions, wait for the answers, follow, cancel, verify a webhook.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit(state="...", questions={"spam": {"type": "noul", "instructions": "Is it spam?"}})
        answers = client.result(client.wait(job.id).id)["answers"]

`AsyncClient` has the same methods to await. Errors are those of `d3serve.errors`: what the server refused
with `invalid_question` is raised as `InvalidQuestion`.
"""

from d3serve.client.clients import AsyncClient, Client
from d3serve.client.events import Event
from d3serve.client.protocol import Job, JobPage
from d3serve.webhooks.signing import verify as verify_webhook

__all__ = ["AsyncClient", "Client", "Event", "Job", "JobPage", "verify_webhook"]
