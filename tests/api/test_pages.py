"""`/console`, `/docs` and `/redoc` need nothing but this server, and run no script that is not a file of it."""

import re
from urllib.parse import urljoin

import httpx
import pytest

pytestmark = pytest.mark.anyio
PAGES = ("/docs", "/redoc", "/console")


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_and_all_that_it_names_is_served_here(page, client):
    answer = await client.get(page)
    assert answer.headers["content-type"].startswith("text/html")
    named = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert len(named) >= 3
    for name in named:
        if name == "data:,":
            continue
        url = urljoin(f"http://localhost{page}", name)
        assert httpx.URL(url).host == "localhost"
        file = await client.get(url)
        assert (file.status_code, file.headers["cache-control"]) == (200, "no-cache"), name
        kept = await client.get(url, headers={"If-None-Match": file.headers["etag"]})
        assert kept.status_code == 304


@pytest.mark.parametrize("page", PAGES)
async def test_a_browser_is_told_to_run_and_ask_nothing_else(page, client):
    answer = await client.get(page)
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|javascript:|https?:", answer.text)


@pytest.mark.parametrize("name", ["none.js", "..%2fdocs.html", "%2e%2e/redoc.html", "../docs.html", ""])
async def test_no_other_file_is_served(name, client):
    answer = await client.get(f"/docs/files/{name}")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json()["code"] == "not_found"


async def test_pages_of_other_hosts_embed_none_of_it(client):
    for path in (*PAGES, "/docs/files/docs.js"):
        headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        assert (await client.get(path, headers=headers)).status_code == 403
        assert (await client.request("HEAD", path)).status_code == 200


async def test_the_console_runs_nothing_that_stands_in_a_page_or_a_text(client):
    answer = await client.get("/console")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"\sstyle=", answer.text)


@pytest.mark.parametrize(
    ("accept", "status", "leads_to"),
    [
        ("text/html,application/xhtml+xml,*/*;q=0.8", 307, "console"),
        ("application/json", 404, None),
        ("*/*", 404, None),
        (None, 404, None),
    ],
)
async def test_the_root_leads_a_browser_to_the_console(accept, status, leads_to, client):
    headers = {"Accept": accept} if accept else {}
    answer = await client.get("/", headers=headers)
    assert (answer.status_code, answer.headers.get("location")) == (status, leads_to)
    if status == 404:
        assert answer.json()["code"] == "not_found"


async def test_the_console_with_a_slash_leads_to_the_one_without(client):
    answer = await client.get("/console/")
    assert urljoin("http://localhost/console/", answer.headers["location"]) == "http://localhost/console"
    assert (await client.get("/console/files/../index.html")).status_code == 404
