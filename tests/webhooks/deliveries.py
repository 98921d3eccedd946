"""A delivery as the outbox holds it, for tests that need no outbox."""

from d3serve.webhooks.outbox import Delivery, Try


def delivery(tries=0, schedule_from=0):
    past = tuple(Try(0.0, 500, "x", 1) for _ in range(tries))
    return Delivery(
        "msg_1", "t", "job_1", "job.failed", "https://x/", None, 0.0, tries=past, schedule_from=schedule_from
    )
