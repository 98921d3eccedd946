"""API keys: who may call, who sees whose jobs, how often."""

import asyncio
import codecs
import re

import httpx
import pytest

from d3serve import api_keys
from d3serve.api.app import create_app
from d3serve.api_keys import ApiKey, KeyRing, append_key, new_key, read_keys
from d3serve.errors import InvalidSettings, Unauthorized
from d3serve.settings import Settings

BODY = {"model": "jev-latest", "state": "hello", "questions": {"q": {"type": "noul", "instructions": "x"}}}


@pytest.fixture
def keys(tmp_path):
    """Keys of two tenants, one that only reads, one that may send three requests a minute."""
    path, made = tmp_path / "keys.jsonl", {}
    for name, options in {
        "acme": {"tenant": "acme"},
        "globex": {"tenant": "globex"},
        "reader": {"tenant": "acme", "scopes": ["jobs:read"]},
        "unhooked": {"tenant": "acme", "scopes": ["jobs:read", "jobs:write"]},
        "slow": {"tenant": "acme", "requests_per_minute": 3},
        "admin": {"tenant": "acme", "scopes": ["admin"]},
        "operator": {"tenant": "ops", "scopes": ["admin", "jobs:read"]},
    }.items():
        made[name], line = new_key(**options)
        append_key(path, line)
    return path, made


@pytest.fixture
async def as_key(settings, keys):
    """A client that sends the key of the given name."""
    path, made = keys
    application = create_app(settings.model_copy(update={"api_keys_file": path}))
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)

        def client(name=None):
            headers = {"Authorization": f"Bearer {made.get(name, name)}"} if name else {}
            return httpx.AsyncClient(transport=transport, base_url="http://d3serve.test", headers=headers)

        yield client


PROTECTED = [
    ("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/x"), ("GET", "/v1/jobs/x/result"),
    ("POST", "/v1/count"),
    ("GET", "/v1/jobs/x/events"), ("POST", "/v1/jobs/x/cancel"), ("POST", "/v1/jobs/x/retry"),
    ("DELETE", "/v1/jobs/x"), ("POST", "/v1/systemone"), ("POST", "/v1/decisions"), ("GET", "/v1/models"),
    ("GET", "/v1/queue"), ("GET", "/metrics"), ("POST", "/v1/webhook-endpoints"), ("GET", "/v1/webhook-endpoints"),
    ("GET", "/v1/webhook-endpoints/x"), ("PUT", "/v1/webhook-endpoints/x"), ("DELETE", "/v1/webhook-endpoints/x"),
    ("POST", "/v1/webhook-endpoints/x/rotate-secret"), ("POST", "/v1/webhook-endpoints/x/test"),
    ("GET", "/v1/webhook-secret"), ("GET", "/v1/webhook-deliveries"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/x"),
    ("GET", "/v1/files/x/content"),
    ("DELETE", "/v1/files/x"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/x"),
    ("POST", "/v1/batches/x/cancel"),
    ("POST", "/v1/webhook-deliveries/x/redeliver"),
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("key", [None, "", "x", "d3k_", "d3k_000000000000_x", "d3k_é_x"])
async def test_without_a_key_nothing_is_told(key, as_key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    async with as_key() as client:
        for method, path in PROTECTED:
            answer = await client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), path
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.anyio
async def test_every_route_but_the_probes_asks_for_a_key(as_key, settings):
    listed = {
        (method.upper(), re.sub(r"\{\w+\}", "x", path))
        for path, operations in create_app(settings).openapi()["paths"].items()
        for method in operations
    }
    unprotected = listed - set(PROTECTED)
    async with as_key() as client:
        open_ones = {(m, p) for m, p in unprotected if (await client.request(m, p)).status_code != 401}
    assert open_ones == {("GET", "/healthz"), ("GET", "/readyz")}


@pytest.mark.anyio
async def test_a_tenant_sees_only_its_own_jobs(as_key):
    headers = {"Idempotency-Key": "the same"}
    async with as_key("acme") as acme, as_key("globex") as globex, as_key("reader") as reader:
        mine = (await acme.post("/v1/jobs", json=BODY, headers=headers)).json()
        theirs = (await globex.post("/v1/jobs", json=BODY, headers=headers)).json()
        assert mine["id"] != theirs["id"], "an idempotency key leads to another tenant's job"
        for client, path in ((globex, mine["urls"]["self"]), (acme, theirs["urls"]["self"])):
            for method, suffix in (("GET", ""), ("GET", "?include=request"), ("GET", "/result"), ("GET", "/events"),
                                   ("POST", "/cancel"), ("POST", "/retry"), ("DELETE", "")):  # fmt: skip
                answer = await client.request(method, path + suffix)
                assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found"), (method, suffix)
        assert [job["id"] for job in (await globex.get("/v1/jobs")).json()["data"]] == [theirs["id"]]
        assert (await reader.get(mine["urls"]["self"])).status_code == 200, "a key of the same tenant"


@pytest.mark.anyio
async def test_tenants_never_share_a_state_group(as_key, worker):
    async with as_key("acme") as acme, as_key("globex") as globex:
        for client in (acme, globex, acme):
            await client.post("/v1/jobs", json=BODY)
    jobs = worker.claim().jobs
    assert len(jobs) == 3
    assert len({job.group for job in jobs}) == 2


@pytest.mark.anyio
async def test_a_key_does_only_what_its_scopes_say(as_key):
    async with as_key("reader") as client:
        assert (await client.get("/v1/jobs")).status_code == 200
        for path in ("/v1/jobs", "/v1/systemone"):
            answer = await client.post(path, json=BODY)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert "jobs:write" in answer.json()["detail"]
        assert (await client.get("/metrics")).status_code == 403
    async with as_key("admin") as client:
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.anyio
async def test_the_rate_of_a_key_is_shown_and_held(as_key):
    async with as_key("slow") as client:
        answers = [await client.get("/v1/jobs") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[0].headers["ratelimit-policy"] == '"default";q=3;w=60'
    assert answers[0].headers["ratelimit"].startswith('"default";r=2;t=')
    refused = answers[3]
    assert refused.json()["code"] == "rate_limited"
    resets = int(refused.headers["ratelimit"].rpartition("=")[2])
    assert 0 < int(refused.headers["retry-after"]) == resets <= 60, "both headers tell one time"
    async with as_key("acme") as client:
        assert "ratelimit" not in (await client.get("/v1/jobs")).headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])  # noqa: S104 - what must be refused
def test_listening_beyond_this_host_needs_keys_or_an_explicit_wish(host, settings, keys):
    public = settings.model_copy(update={"host": host})
    with pytest.raises(InvalidSettings, match="refusing to listen"):
        create_app(public)
    create_app(public.model_copy(update={"allow_anonymous": True}))
    create_app(public.model_copy(update={"api_keys_file": keys[0]}))


@pytest.mark.anyio
async def test_with_keys_any_name_will_do(as_key):
    page = {"Host": "d3.example", "Origin": "https://app.example"}
    async with as_key("acme") as client:
        assert (await client.get("/v1/jobs", headers=page)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_none(host, settings):
    create_app(settings.model_copy(update={"host": host}))


def test_the_file_holds_no_key(keys):
    path, made = keys
    text = path.read_text()
    assert not any(key.split("_", 2)[2] in text for key in made.values())
    assert path.stat().st_mode & 0o077 == 0, "others can read it"


def test_a_key_removed_from_the_file_stops_working_without_a_restart(keys, monkeypatch):
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    path, made = keys
    ring = KeyRing(path)
    assert ring.identify(made["acme"]).tenant == "acme"
    path.write_text("\n".join(path.read_text().splitlines()[1:]))
    with pytest.raises(Unauthorized):
        ring.identify(made["acme"])
    assert ring.identify(made["globex"]).tenant == "globex"


def test_a_right_id_with_a_wrong_secret_is_nobody(keys):
    path, made = keys
    forged = made["acme"][:-1] + ("A" if made["acme"][-1] != "A" else "B")
    with pytest.raises(Unauthorized):
        KeyRing(path).identify(forged)


@pytest.mark.anyio
async def test_a_damaged_line_grants_nothing_and_takes_nothing_from_the_others(
    keys, as_key, monkeypatch, capsys
):
    """The keys read last once stayed good as a whole: a key that had been removed went on working."""
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    path, made = keys
    acme, globex, *others = path.read_text().splitlines()
    async with as_key("acme") as client, as_key("globex") as other, as_key("reader") as third:
        path.write_text("\n".join([globex[:-9], *others, others[0]]))
        assert (await client.get("/v1/jobs")).status_code == 401, "its line was removed"
        assert (await other.get("/v1/jobs")).status_code == 401, "its line is damaged"
        assert (await third.get("/v1/jobs")).status_code == 401, "its line stands twice: which one is meant?"
        assert str(path) not in (await other.get("/v1/jobs")).text
        path.write_text("\n".join([acme, globex[:-9], *others]))
        assert (await client.get("/v1/jobs")).status_code == 200
        assert (await third.get("/v1/jobs")).status_code == 200
    told = capsys.readouterr().out
    assert told.count("keys.damaged") == 3, "once for each damage, not for each request"
    assert not any(key.split("_", 2)[2] in told for key in made.values())


@pytest.mark.anyio
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.write_text(""),
    ],
    ids=["gone", "a folder", "empty"],
)
async def test_a_key_file_that_stays_away_grants_nothing(spoil, keys, as_key, monkeypatch, capsys):
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    monkeypatch.setattr(api_keys, "REPLACED_WITHIN_S", 0.3)
    path, _ = keys
    text = path.read_bytes()
    async with as_key("acme") as client:
        spoil(path)
        async with asyncio.timeout(60):
            while (await client.get("/v1/jobs")).status_code != 401:  # noqa: ASYNC110 - nothing tells us
                await asyncio.sleep(0.02)
        assert capsys.readouterr().out.count("keys.unreadable") <= 1
        if path.is_dir():
            path.rmdir()
        path.write_bytes(text)
        assert (await client.get("/v1/jobs")).status_code == 200


def test_a_key_file_may_be_away_while_another_takes_its_place(keys, monkeypatch):
    monkeypatch.setattr(api_keys, "RECHECK_S", 0.0)
    path, made = keys
    ring = KeyRing(path)
    path.rename(path.with_suffix(".old"))
    assert ring.identify(made["acme"]).tenant == "acme"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o620, 0o602])
def test_a_key_file_that_others_may_write_is_told(mode, keys, capsys):
    """Whoever writes it makes keys."""
    path, _ = keys
    path.chmod(mode)
    KeyRing(path)
    assert ("keys.others_may_write" in capsys.readouterr().out) is bool(mode & 0o022)


def test_a_byte_order_mark_and_line_ends_of_another_system_do_no_harm(keys):
    path, made = keys
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert KeyRing(path).identify(made["acme"]).tenant == "acme"


def test_a_key_added_below_a_line_without_an_end_spoils_neither(tmp_path):
    path = tmp_path / "keys.jsonl"
    (_, first), (_, second) = new_key("a"), new_key("b")
    path.write_text(first.model_dump_json())
    append_key(path, second)
    assert list(read_keys(path)) == [first.id, second.id]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "line 1"), ('{"id":"x"}', "line 1"), ("\n\n[]", "line 3"), ("{line}\n{line}", "stands twice")],
)
def test_a_bad_key_file_stops_the_start_and_names_the_line(text, reason, tmp_path):
    path = tmp_path / "keys.jsonl"
    path.write_text(text.replace("{line}", new_key("acme")[1].model_dump_json()))
    with pytest.raises(InvalidSettings, match=reason):
        read_keys(path)


def test_a_missing_key_file_stops_the_start(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot read"):
        create_app(Settings(redis_url="unix:///nowhere", api_keys_file=tmp_path / "none"))


@pytest.mark.parametrize(
    "change", [{"tenant": "a b"}, {"scopes": []}, {"scopes": ["root"]}, {"requests_per_minute": 0}]
)
def test_a_key_that_means_nothing_is_not_made(change):
    with pytest.raises(InvalidSettings):
        new_key(**{"tenant": "acme"} | change)


def test_lines_survive_a_round_trip(tmp_path):
    path = tmp_path / "keys.jsonl"
    lines = [new_key("acme")[1], new_key("globex", ["jobs:read"], 7)[1]]
    for line in lines:
        append_key(path, line)
    assert list(read_keys(path).values()) == lines
    assert isinstance(lines[0], ApiKey)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/systemone", "/v1/decisions"])
@pytest.mark.parametrize("target", [{"url": "https://203.0.113.9/x"}, {"endpoint_id": "whep_x"}])
async def test_who_may_not_use_webhooks_names_none_in_a_job(path, target, as_key):
    """An operator who withholds the scope expects no posts with answers to anywhere."""
    hooked = BODY | {"job": {"webhook": target}}
    async with as_key("unhooked") as client:
        answer = await client.post(path, json=hooked)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert answer.json()["error"]["field"] == "job.webhook"
        assert (await client.post("/v1/jobs", json=BODY)).status_code == 202
    async with as_key("acme") as client:
        assert (await client.post(path, json=hooked)).status_code == 422, "may, but not there"


@pytest.mark.anyio
async def test_the_queue_shows_a_tenant_its_own_jobs_and_an_admin_all(as_key):
    async with as_key("acme") as acme, as_key("globex") as globex, as_key("operator") as operator:
        before = (await globex.get("/v1/queue")).json()
        assert (await acme.post("/v1/jobs", json=BODY)).status_code == 202
        assert (await globex.get("/v1/queue")).json() == before
        assert before["lanes"]["interactive"] == {"queued_jobs": 0, "queued_tokens": 0}
        assert (await acme.get("/v1/queue")).json()["lanes"]["interactive"]["queued_jobs"] == 1
        whole = (await operator.get("/v1/queue")).json()
        assert whole["lanes"]["interactive"]["queued_jobs"] == 1
        assert {"work", "finished", "workers"} <= whole.keys()
