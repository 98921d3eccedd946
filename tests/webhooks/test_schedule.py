"""When a delivery that failed is tried again, and when no more."""

from dataclasses import replace
from email.utils import formatdate

import pytest
from webhooks.deliveries import delivery

from d3serve.webhooks import sender as webhooks
from d3serve.webhooks.outbound import Reply
from d3serve.webhooks.outbox import Try

FAILED = Try(1000.0, 503, "the receiver answered 503", 1)


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("120", 120),
        (formatdate(1120, usegmt=True), 120),
        ("999999999", 86_400),
        ("-5", 0),
        ("soon", 0),
        (None, 0),
    ],
)
def test_a_receivers_retry_after_is_obeyed_within_a_day(header, wait_s):
    due = webhooks.after(delivery(), FAILED, Reply(503, header), now_s=1000.0).next_try_at - 1000.0
    assert due == pytest.approx(max(wait_s, 5), rel=0.11)


def test_retry_after_is_only_heard_where_it_has_a_meaning():
    due = webhooks.after(delivery(), FAILED, Reply(500, "3600"), now_s=1000.0).next_try_at - 1000.0
    assert due < 6


def test_the_schedule_spans_three_days_and_then_ends():
    waits, one = [], delivery()
    while one.state == "pending":
        one = webhooks.after(one, replace(FAILED, at=0.0), None, now_s=0.0)
        waits.append(one.next_try_at)
    assert one.state == "dead"
    assert len(one.tries) == 10
    assert 2.5 * 86_400 < sum(waits[:-1]) < 4 * 86_400, "an event is kept for seven days"
    assert webhooks.after(delivery(10, 10), FAILED, None, now_s=0.0).state == "pending", (
        "a redelivery begins anew"
    )
