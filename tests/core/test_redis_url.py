"""One reading of a Redis URL for everybody who connects: what it says, what is refused, what is never shown."""

import pytest

from d3serve.errors import InvalidSettings
from d3serve.settings import Settings
from d3serve.settings.redis_url import RedisURL, unix_url


@pytest.mark.parametrize(
    ("url", "shown", "expected"),
    [
        ("redis://h:1/2", "redis://h:1/2", {"hosts": (("h", 1),), "db": 2}),
        ("redis://", "redis://localhost:6379/0", {"db": 0}),
        ("redis://h?db=5", "redis://h:6379/5", {"db": 5}),
        ("redis://[::1]:7/1", "redis://[::1]:7/1", {"hosts": (("::1", 7),)}),
        ("redis://u%40x:p%23%2Fw@h", "redis://h:6379/0", {"username": "u@x", "password": "p#/w"}),
        ("redis://:p@h", "redis://h:6379/0", {"username": None, "password": "p"}),
        ("rediss://h/1?ssl_cert_reqs=none", "rediss://h:6379/1", {"tls": (("ssl_cert_reqs", "none"),)}),
        ("unix:///a%23b%3Bc?db=3", "unix:///a%23b%3Bc?db=3", {"path": "/a#b;c", "db": 3}),
        ("unix://u:p@/run/v.sock", "unix:///run/v.sock", {"username": "u", "password": "p"}),
        ("unix:///100%25%20done;x", "unix:///100%25%20done%3Bx", {"path": "/100% done;x"}),
        (
            "sentinel://u:p%2F@a:1,[::1]:2/main/3",
            "sentinel://a:1,[::1]:2/main/3",
            {"hosts": (("a", 1), ("::1", 2)), "master": "main", "db": 3, "username": "u", "password": "p/"},
        ),
    ],
)
def test_what_a_url_says(url, shown, expected):
    server = RedisURL.parse(url)
    assert str(server) == shown
    assert {name: getattr(server, name) for name in expected} == expected
    assert RedisURL.parse(shown).place == server.place if server.master is None and not server.tls else True


SECRET = "S3CRET"  # noqa: S105 - none
REFUSED = [
    "http://h",
    "localhost:6379",
    f"redis://:{SECRET}#1@h/0",
    f"redis://:#{SECRET}@h/0",
    f"redis://:1?{SECRET}@h/0",
    f"redis://:1/{SECRET}@h/0",
    f"redis://u:{SECRET}@h:port/0",
    "redis://h:70000/0",
    "redis://[::1/0",
    "redis://h/queue",
    "redis://h/-1",
    "redis://h/1/2",
    "redis://h?db=x",
    "unix://",
    "unix://relative.sock",
    "unix:///a#b",
    "sentinel://a:1",
    "sentinel:///main",
    "sentinel://a/main",
    "sentinel://a:1/main/x",
    "sentinel://a:1,:2/main",
    *(
        f"redis://h/0?{option}"
        for option in (
            "protocol=3",
            "socket_timeout=3",
            "health_check_interval=5",
            "max_connections=7",
            "client_name=x",
            "decode_responses=false",
            f"password={SECRET}",
            "ssl_cert_reqs=none",
        )
    ),
]


@pytest.mark.parametrize("url", REFUSED)
def test_what_is_refused_before_anything_starts_in_one_line_without_a_secret(url):
    with pytest.raises(InvalidSettings) as refused:
        Settings.load(redis_url=url)
    assert refused.value.message.startswith("D3SERVE_REDIS_URL ")
    assert SECRET not in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.__context__ is None or SECRET not in str(refused.value.__cause__)


@pytest.mark.parametrize(
    "name", ["a#b", "a?b", "100%25 done", "semi;colon", "sp ace", "@:,+&", "日本", "\udcff"]
)
def test_a_socket_file_may_be_called_anything(name):
    assert RedisURL.parse(unix_url(f"/run/{name}/v.sock")).path == f"/run/{name}/v.sock"
