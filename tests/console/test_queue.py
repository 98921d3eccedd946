"""*Queue* and the key: what an operator sees, what a tenant sees, and where the key is kept."""

import json
import time

import httpx
import pytest
from playwright.sync_api import expect

from d3serve.api.app import create_app
from d3serve.api_keys import append_key, new_key
from d3serve.settings import Settings

GB = 10**9
BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


def test_an_operator_sees_lanes_and_workers(service, worker, tab):
    for lane in ("interactive", "interactive", "offline"):
        httpx.post(f"{service}/v1/jobs", json=BODY | {"job": {"lane": lane}}).raise_for_status()
    page = tab.go("queue")
    expect(page.get_by_role("region", name="Lane interactive")).to_contain_text("2 jobs wait")
    expect(page.get_by_role("region", name="Lane offline")).to_contain_text("1 job waits")
    at_work = page.get_by_role("region", name="Worker hand:1")
    for told in ("Waits for work", "vllm-sr/d3-tiny", "abc123", "cpu, float32", "1,000 tokens/s"):
        expect(at_work).to_contain_text(told)
    turn = worker.claim()
    expect(at_work).to_contain_text(f"Runs {len(turn.jobs)} job")
    worker.finish(turn)
    memory = {
        "memory_bytes": 71 * GB, "memory_total_bytes": 151 * GB, "peak_memory_bytes": 3 * GB,
        "cached_states": 17, "cached_bytes": 2 * GB, "cache_size_bytes": 38 * GB,
    }  # fmt: skip
    worker.turns.publish(memory)
    expect(at_work).to_contain_text("Waits for work")
    for name, told in (
        ("GPU memory", "71 GB of 151 GB"), ("Host memory, peak", "3.0 GB"),
        ("Cached states", "17"), ("State cache", "2.0 GB of 38 GB"),
    ):  # fmt: skip
        stat = at_work.locator(".stats > div").filter(has=page.get_by_text(name, exact=True))
        expect(stat).to_have_text(f"{name}{told}")
    [told] = httpx.get(f"{service}/v1/workers").json()["data"]
    assert told.items() >= memory.items()
    expect(page.get_by_role("region", name="Since the start")).to_contain_text("Tokens asked")


def test_a_worker_that_could_not_load_says_why(worker, tab):
    worker.turns.publish({"load": "failed", "error": "no <b>such</b> folder"})
    page = tab.go("queue")
    at_work = page.get_by_role("region", name="Worker hand:1")
    expect(at_work).to_contain_text("Could not load its model")
    expect(at_work).to_contain_text("no <b>such</b> folder")


def test_without_workers_it_says_how_to_start_one(tab):
    expect(tab.go("queue").get_by_role("heading", name="No worker has shown itself")).to_be_visible()


@pytest.fixture
def guarded(redis_url, raw_redis, tmp_path, serving):  # noqa: ARG001 - the server is emptied first
    """The address of an API with keys, and a key of each kind."""
    file, secrets = tmp_path / "keys.jsonl", []
    for tenant, more in (("acme", []), ("boss", ["webhooks", "admin"])):
        secret, line = new_key(tenant=tenant, scopes=["jobs:read", "jobs:write", *more])
        append_key(file, line)
        secrets.append(secret)
    with serving(create_app(Settings(redis_url=redis_url, api_keys_file=file))) as address:
        yield address, *secrets


def enter(page, secret):
    page.get_by_role("button", name="Key").last.click()
    page.get_by_label("Key", exact=True).fill(secret)
    page.keyboard.press("Enter")


def test_the_key_is_kept_in_the_tab_alone(guarded, worker, open_tab):  # noqa: ARG001 - who serves a model
    address, plain, _ = guarded
    tab = open_tab(address, expected={401})
    page = tab.go("queue")
    expect(page.get_by_role("heading", name="This server asks for a key")).to_be_visible()
    page.get_by_role("button", name="Enter a key").click()
    for wrong in ("wrong", "wrong – 🙂"):  # which no header can hold
        page.get_by_label("Key", exact=True).fill(wrong)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="This key is not known here")).to_be_visible()
        page.get_by_role("button", name="Enter a key").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Enter a key")).to_be_focused()
    enter(page, plain)
    expect(page.get_by_role("region", name="Lane interactive")).to_contain_text("0 jobs wait")
    assert page.evaluate("[localStorage.length, document.cookie, indexedDB.length ?? 0]") == [0, "", 0]
    assert plain not in page.content()
    assert plain not in page.url
    other = page.context.new_page()
    other.goto(f"{address}/console#/queue")
    expect(other.get_by_role("heading", name="This server asks for a key")).to_be_visible()
    page.reload()
    expect(page.get_by_role("region", name="Lane interactive")).to_be_visible()
    page.get_by_role("button", name="Key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("heading", name="This server asks for a key")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('d3serve.key')") is None


def test_a_tenant_sees_its_own_alone(guarded, worker, open_tab):  # noqa: ARG001 - who serves a model
    address, plain, admin = guarded
    for secret, count in ((plain, 1), (admin, 2)):
        for _ in range(count):
            headers = {"Authorization": f"Bearer {secret}"}
            httpx.post(f"{address}/v1/jobs", json=BODY, headers=headers).raise_for_status()
    page = open_tab(address, expected={401}).go("queue")
    enter(page, plain)
    expect(page.get_by_role("region", name="Lane interactive")).to_contain_text("1 job waits")
    expect(page.get_by_text("These are your own jobs.")).to_be_visible()
    expect(page.get_by_role("region", name="Workers")).to_have_count(0)
    refused = httpx.get(f"{address}/v1/workers", headers={"Authorization": f"Bearer {plain}"})
    assert (refused.status_code, json.loads(refused.content)["code"]) == (403, "forbidden")
    enter(page, admin)
    expect(page.get_by_role("region", name="Lane interactive")).to_contain_text("3 jobs wait")
    expect(page.get_by_role("region", name="Worker hand:1")).to_be_visible()
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.locator("table.jobs tbody tr")).to_have_count(2)


def test_the_code_names_the_key_and_does_not_hold_it(guarded, worker, open_tab):  # noqa: ARG001 - who serves a model
    address, plain, _ = guarded
    page = open_tab(address, expected={401}).go()
    enter(page, plain)
    page.get_by_role("button", name="Fill in an example").click()
    code = page.locator(".code-card pre")
    expect(code).to_contain_text('-H "authorization: Bearer $D3SERVE_API_KEY"')
    assert plain not in page.content()


def test_a_key_that_is_revoked_locks_the_page(guarded, worker, open_tab, tmp_path):  # noqa: ARG001 - who serves a model
    address, plain, admin = guarded
    page = open_tab(address, expected={401}).page
    page.clock.install()
    page.goto(f"{address}/console#/ask")
    enter(page, plain)
    page.get_by_role("textbox", name="State", exact=True).fill("kept")
    file = tmp_path / "keys.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[1])
    headers = {"Authorization": f"Bearer {plain}"}
    while httpx.get(f"{address}/v1/models", headers=headers).status_code != 401:
        time.sleep(0.05)
    page.clock.fast_forward(10_000)
    expect(page.get_by_role("heading", name="This key is not known here")).to_be_visible()
    enter(page, admin)
    expect(page.get_by_role("textbox", name="State", exact=True)).to_have_value("kept")


def test_a_page_takes_half_of_what_its_key_may_ask(guarded, worker, open_tab, tmp_path):  # noqa: ARG001
    secret, line = new_key(tenant="few", scopes=["jobs:read", "admin"], requests_per_minute=60)
    append_key(tmp_path / "keys.jsonl", line)
    page, asked = open_tab(guarded[0], expected={401}).page, []
    page.clock.install(time=0)
    page.goto(f"{guarded[0]}/console#/queue")
    enter(page, secret)
    expect(page.get_by_role("region", name="Worker hand:1")).to_be_visible()
    with page.expect_response("**/v1/queue"), page.expect_response("**/v1/workers"):
        page.clock.pause_at(60_000)  # what is due is asked for, once
    page.wait_for_timeout(300)
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.clock.run_for(5_900)  # three requests each six seconds
    page.wait_for_timeout(300)
    assert asked == []
    with page.expect_request("**/v1/workers"):
        page.clock.run_for(200)


def test_a_browser_that_keeps_nothing_keeps_the_key_as_long_as_the_page(guarded, worker, open_tab):  # noqa: ARG001
    address, plain, _ = guarded
    tab = open_tab(address, expected={401})
    tab.page.add_init_script(
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('no', 'SecurityError'); } });"
    )
    page = tab.go("queue")
    enter(page, plain)
    expect(page.get_by_role("region", name="Lane interactive")).to_be_visible()
