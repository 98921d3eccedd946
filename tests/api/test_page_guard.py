"""Without keys: programs of this host are served, web pages of others are not, whatever address we listen on."""

import contextlib
import json

import httpx
import pytest

from d3serve.api.app import create_app
from d3serve.errors import InvalidSettings
from d3serve.settings import Settings

pytestmark = pytest.mark.anyio
JOB = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}
OWN_NAMES = ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5:8000", "d3.localhost"]
OTHER_NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[::1",
]
PAGES = [
    *({"Host": name} for name in OTHER_NAMES),
    *({"Origin": origin} for origin in ("https://evil.example", "null", "http://6.6.6.6", "")),
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.5:9000"},
    {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.6:8000"},
    {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
]
PROGRAMS = [
    *({"Host": name} for name in OWN_NAMES),
    {"Origin": "http://localhost:3000"},
    {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.5:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "[fd00::5]:8000", "Origin": "http://[fd00::5]:8000"},
    {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
    {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
    },  # a link to /v1/jobs that somebody follows
]
CONTAINER = {"host": "0.0.0.0", "allow_anonymous": True}  # noqa: S104 - as in a container


@contextlib.asynccontextmanager
async def calling(settings, **change):
    """A client of an API whose settings are changed so."""
    application = create_app(settings.model_copy(update=change))
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@pytest.mark.parametrize("change", [{}, CONTAINER], ids=["loopback", "container"])
async def test_no_web_page_calls_through_the_browser_of_this_host(settings, change):
    """By DNS rebinding a page would read every job of this host; by a plain form it would fill the queue."""
    async with calling(settings, **change) as client:
        for headers in PAGES:
            for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/webhook-secret")):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), headers
                assert "D3SERVE_ALLOWED_HOSTS" in answer.json()["detail"]
            for path in ("/healthz", "/readyz", "/openapi.json", "/nowhere"):
                assert (await client.get(path, headers=headers)).status_code == 403, (path, headers)
        for headers in PROGRAMS:
            assert (await client.get("/v1/jobs", headers=headers)).status_code == 200, headers


async def test_a_second_header_does_not_hide_the_first(settings):
    async with calling(settings) as client:
        for name, own in (("Host", "localhost"), ("Origin", "http://localhost")):
            for values in ([own, "https://evil.example"], ["https://evil.example", own]):
                headers = httpx.Headers([(name, value) for value in values])
                assert (await client.get("/v1/jobs", headers=headers)).status_code == 400, values


async def test_the_operator_admits_names_and_their_pages(settings):
    async with calling(settings, **CONTAINER, allowed_hosts=("api", "app.example")) as client:
        for headers in (
            {"Host": "api:8000"},
            {"Host": "APP.example"},
            {"Origin": "https://app.example"},
            {"Origin": "http://app.example:8080", "Sec-Fetch-Site": "cross-site"},
        ):
            assert (await client.get("/v1/jobs", headers=headers)).status_code == 200, headers
        for headers in PAGES:
            assert (await client.get("/v1/jobs", headers=headers)).status_code == 403, headers
    async with calling(settings, **CONTAINER, allowed_hosts=("*",)) as client:
        for headers in PAGES:
            assert (await client.get("/v1/jobs", headers=headers)).status_code == 200, headers


async def test_a_page_posts_nothing_without_its_browser_asking_first(settings):
    """A body without a type, or of a plain one, is posted to any host unasked; one of JSON is asked about."""
    body = json.dumps(JOB).encode()
    page = {"Origin": "http://localhost:3000"}
    async with calling(settings) as client:
        for path in ("/v1/jobs", "/v1/systemone", "/v1/decisions", "/v1/webhook-endpoints"):
            for unasked in (
                {},
                {"Content-Type": "text/plain"},
                {"Content-Type": "application/x-www-form-urlencoded"},
            ):
                answer = await client.post(path, content=body, headers=page | unasked)
                assert answer.status_code == 415, (path, unasked)
        typed = {"Content-Type": "application/json"}
        assert (await client.post("/v1/jobs", content=body, headers=page | typed)).status_code == 202
        assert (await client.post("/v1/jobs", content=body)).status_code == 202, "a program need not say"
        asked = await client.options("/v1/jobs", headers={**page, "Access-Control-Request-Method": "POST"})
        assert not [name for name in asked.headers if name.startswith("access-control")], "and gets no leave"


async def test_readiness_names_no_process(settings, worker):
    worker.show_itself("loading")
    async with calling(settings) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert "1 loading" in answer.json()["detail"]
    assert "hand" not in answer.text


@pytest.mark.parametrize("names", ['["http://app.example"]', '["app.example:80"]', '[""]', '["a b"]'])
async def test_what_is_no_name_is_no_setting(names, monkeypatch):
    monkeypatch.setenv("D3SERVE_ALLOWED_HOSTS", names)
    with pytest.raises(InvalidSettings, match="ALLOWED_HOSTS"):
        Settings.load()
