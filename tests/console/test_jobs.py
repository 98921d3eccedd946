"""*Jobs*: paging through ten thousand, filters, and rows that change while they are looked at."""

import json
import time

import pytest
from playwright.sync_api import expect

MANY, PAGE = 10_000, 25
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


@pytest.fixture
def many(post, worker, raw_redis, key):
    """Ten thousand jobs, of which every hundredth failed: copies of one, a second apart."""
    model = post()
    worker.work()
    row, now_ms = raw_redis.hgetall(key("job", model)), int(time.time() * 1000)
    with raw_redis.pipeline(transaction=False) as pipe:
        for number in range(1, MANY):
            job_id, created = f"job_{number:024x}", now_ms - 1000 * number
            failed = {"status": "failed", "error": json.dumps({"code": "device_error", "message": "broken"})}
            pipe.hset(
                key("job", job_id), mapping=row | {"created": created} | (failed if number % 100 == 0 else {})
            )
            pipe.zadd(key("jobs", "public"), {job_id: created})
        pipe.execute()
    return model


def rows(page):
    return page.locator("table.jobs tbody tr")


def ids(page):
    return page.locator("table.jobs a").all_inner_texts()


def test_ten_thousand_jobs_are_paged_through_and_filtered(many, tab):
    page = tab.go("jobs")
    expect(rows(page)).to_have_count(PAGE)
    first = ids(page)
    assert first[0] == many
    for number in (2, 3):
        page.get_by_role("button", name="Older").click()
        expect(page.get_by_text(f"Page {number}", exact=True)).to_be_visible()
        expect(page.get_by_role("link", name=f"job_{(number - 1) * PAGE:024x}")).to_be_visible()
        expect(rows(page)).to_have_count(PAGE)
    page.get_by_role("button", name="Newer").click()
    page.get_by_role("button", name="Newer").click()
    expect(page.get_by_role("link", name=many)).to_be_visible()
    assert ids(page) == first
    page.get_by_label("Status").select_option("failed")
    expect(page.get_by_role("link", name=f"job_{100:024x}")).to_be_visible()
    assert set(page.locator("table.jobs .status").all_inner_texts()) == {"Failed"}
    assert page.url.endswith("#/jobs?status=failed"), "a filtered page can be kept"
    page.get_by_label("Status").select_option("expired")
    expect(
        page.get_by_role("heading", name="None on this page")
    ).to_be_visible()  # a page looks at a thousand jobs
    page.get_by_label("Created").select_option("Last hour")
    page.get_by_label("Status").select_option("")
    expect(rows(page)).to_have_count(PAGE)
    page.get_by_label("Open by ID").fill(many)  # the copies have no result
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=many)).to_be_visible()
    expect(page.locator(".answer")).to_be_visible()


def test_other_filters_begin_at_their_first_page(post, tab):
    for _ in range(PAGE + 1):
        post()
    page = tab.go("jobs")
    page.get_by_role("button", name="Older").click()
    expect(rows(page)).to_have_count(1)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_label("Status").select_option("queued")
    expect(rows(page)).to_have_count(PAGE)
    assert any("status=queued" in url for url in asked)
    assert not any("status=queued" in url and "cursor=" in url for url in asked)


def test_rows_change_while_they_are_looked_at(post, worker, tab):
    page = tab.go("jobs")
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    job_id = post()
    row = page.get_by_role("row").filter(has_text=job_id)
    expect(row).to_contain_text("Queued")
    turn = worker.claim()
    worker.turns.note_share(turn.lease, [job_id], 0.42, 5)
    expect(row).to_contain_text("Running")
    expect(row).to_contain_text("42%")
    worker.finish(turn)
    expect(row).to_contain_text("Succeeded")


def test_metadata_and_model_filter(post, tab):
    ours = post(metadata={"case": "7=seven"})
    post(metadata={"case": "8"})
    page = tab.go("jobs")
    expect(rows(page)).to_have_count(2)
    page.get_by_label("Metadata").fill("case=7=seven")
    page.keyboard.press("Tab")
    expect(rows(page)).to_have_count(1)
    assert ids(page) == [ours]
    page.get_by_label("Model").fill("another")
    page.keyboard.press("Tab")
    expect(page.get_by_role("heading", name="No job matches")).to_be_visible()
    page.get_by_role("link", name="show all jobs").click()
    expect(rows(page)).to_have_count(2)
    expect(page.get_by_label("Model")).to_have_value("")


def test_a_job_is_opened_and_left_by_the_keyboard(post, tab):
    job_id = post()
    page = tab.go("jobs")
    link = page.get_by_role("link", name=job_id)
    link.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=job_id)).to_be_visible()
    expect(page.get_by_role("main")).to_be_focused()
    assert page.title() == f"{job_id} · d3serve"
    page.go_back()
    expect(link).to_be_visible()
