"""`/docs` and `/redoc` need nothing but this server, and run no script that is not a file of it."""

import re
from urllib.parse import urljoin

import httpx
import pytest

pytestmark = pytest.mark.anyio
PAGES = ("/docs", "/redoc")


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
