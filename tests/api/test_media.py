"""Images and videos in requests, however they are carried: stored with their state once, or refused by name."""

import base64
import json
from collections import Counter

import httpx
import openai
import pytest
import typesafe_sdk
import zstandard
from hostile_files import READ, hostile_files
from media_files import picture, saved, video
from typesafe_sdk import Image, Noul, TypeSafeClient

from d3serve.api.app import create_app
from d3serve.media.files import split_state
from d3serve.media.sizes import MOST_VIDEO_TOKENS, image_tokens
from d3serve.store.encode import decode_state

PNG = saved(picture(64, 48), "PNG")
JPEG = saved(picture(64, 48, seed=1), "JPEG")
WEBP = saved(picture(64, 48, seed=2), "WEBP")
QUESTIONS = {"q": {"type": "noul", "instructions": "Is it red?"}}
READS_ALL = ("text", "image", "video")

pytestmark = pytest.mark.anyio


def url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def request(state="see", **more):
    return {"model": "jev-latest", "state": state, "questions": QUESTIONS, **more}


def multipart(body, parts, boundary="0123456789abcdef"):
    """A body as the stock SDK writes it."""
    heads = [('name="request"', "application/json", json.dumps(body).encode())]
    heads += [(f'name="{name}"; filename="{name}"', "application/octet-stream", data) for name, data in parts]
    lines = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\nContent-Type: %b\r\n\r\n%b\r\n"
        % (boundary.encode(), head.encode(), kind.encode(), data)
        for head, kind, data in heads
    ]  # fmt: skip
    content = b"".join(lines) + f"--{boundary}--\r\n".encode()
    return {"content": content, "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}


@pytest.fixture
def reader(worker):
    """A worker of a model that reads images and videos."""
    worker.show_itself(modalities=READS_ALL)
    return worker


@pytest.fixture
def seen(reader, monkeypatch):
    """The stored states of the jobs that the worker takes."""
    states, claim = [], reader.claim

    def noted():
        turn = claim()
        states.extend(job.state for job in turn.jobs)
        return turn

    monkeypatch.setattr(reader, "claim", noted)
    return states


@pytest.fixture
def shown(reader):
    """What the jobs that wait show, and the texts of their states."""

    def found():
        opened = [split_state(job.state) for job in reader.work()]
        return [(decode_state(text), [(file.kind, file.data()) for file in files]) for text, files in opened]

    return found


async def test_images_and_videos_come_with_the_state(client, shown):
    clip = video(count=4)
    body = request({"a": "b\n&c"}, images=[url(PNG), url(JPEG, "image/jpeg"), url(WEBP, "IMAGE/webp")],
                   videos=[url(clip, "video/mp4;codecs=x")])  # fmt: skip
    answered = await client.post("/v1/jobs", json=body)
    assert answered.status_code == 202, answered.text
    text = 4
    assert answered.json()["request"]["state_tokens"] == 3 * image_tokens(64, 48) + MOST_VIDEO_TOKENS + text
    assert shown() == [({"a": "b\n&c"}, [("image", PNG), ("image", JPEG), ("image", WEBP), ("video", clip)])]


@pytest.mark.parametrize("none", [None, []])
async def test_none_and_an_empty_list_mean_none(client, shown, none):
    assert (await client.post("/v1/jobs", json=request(images=none, videos=none))).status_code == 202
    assert shown() == [("see", [])]


async def test_states_are_one_if_text_and_files_and_their_order_are(client, reader):
    for images in ([PNG, JPEG], [PNG, JPEG], [JPEG, PNG], [PNG], []):
        await client.post("/v1/jobs", json=request(images=[url(data) for data in images]))
    await client.post("/v1/jobs", json=request("other", images=[url(PNG)]))
    assert len({job.group for job in reader.work()}) == 5


def test_large_files_are_kept_once_beside_redis(tmp_path, settings, reader, serving):
    large = saved(picture(900, 900), "PNG", compress_level=0)
    with serving(create_app(settings.model_copy(update={"state_dir": tmp_path}))) as address:
        for instructions in ("a", "b"):
            asked = {"q": {"type": "noul", "instructions": instructions}}
            body = request(images=[url(large)]) | {"questions": asked}
            assert httpx.post(f"{address}/v1/jobs", json=body, timeout=30).status_code == 202
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert base64.b64encode(large) in file.read_bytes()
    group = file.name.partition(".")[0]
    assert reader.turns._table.client.strlen(reader.turns._key("st", group)) < 200


def test_the_stock_sdk_sends_images_unchanged(service, seen, take_turns):
    twice = Image(PNG)
    state = {"first": Image(WEBP), "text": "and", "again": twice, "list": [Image(JPEG), twice]}
    with take_turns(), TypeSafeClient(api_key="any-key", base_url=service) as client:
        answer = client.system_one(state=state, questions={"q": Noul(instructions="Is it red?")})
    assert answer.nouls["q"].noul == 0.75
    text, files = split_state(seen[0])
    assert [file.data() for file in files] == [WEBP, PNG, JPEG]
    told = decode_state(text)
    assert told["again"] == told["list"][1] != told["list"][0]


@pytest.mark.usefixtures("reader")
def test_the_stock_sdk_is_told_of_an_image_in_a_question(service):
    with (
        TypeSafeClient(api_key="any-key", base_url=service) as client,
        pytest.raises(typesafe_sdk.TypeSafeAPIError, match="stands in a question") as caught,
    ):
        client.system_one(state="x", questions={"q": Noul(instructions=[Image(PNG), "red?"])})
    assert caught.value.body["code"] == "unsupported_modality"


async def test_a_body_in_parts_may_be_compressed(client, shown):
    body = request("photo", assets={"photo": {"type": "image", "part": "asset-0"}})
    sent = multipart(body, [("asset-0", PNG)])
    packed = zstandard.compress(sent["content"])
    headers = sent["headers"] | {"content-encoding": "zstd"}
    assert (await client.post("/v1/jobs", content=packed, headers=headers)).status_code == 202
    assert shown() == [("photo", [("image", PNG)])]


async def test_assets_in_json_stand_in_the_order_of_their_mention(client, shown):
    assets = {name: {"type": "image", "format": "png", "data_base64": base64.b64encode(data).decode()}
              for name, data in (("b", PNG), ("zz", JPEG), ("a", WEBP))}  # fmt: skip
    body = request({"x": "the zz, then a", "y": ["b"]}, assets=assets, images=[url(PNG)])
    assert (await client.post("/v1/jobs", json=body)).status_code == 202
    [(state, files)] = shown()
    assert state == {"x": "the zz, then a", "y": ["b"]}
    assert [data for _, data in files] == [PNG, JPEG, WEBP, PNG]


def test_the_stock_openai_client_sends_images_unchanged(service, seen, take_turns):
    content = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": url(PNG), "detail": "high"},
        {"type": "input_image", "image_url": url(JPEG, "image/jpeg")},
    ]
    body = {"model": "jev-latest", "input": [{"role": "user", "content": content}],
            "questions": [{"type": "predicate", "name": "q", "instructions": "Is it red?"}]}  # fmt: skip
    with take_turns(), openai.OpenAI(api_key="any-key", base_url=f"{service}/v1") as client:
        answer = client.post("/decisions", body=body, cast_to=httpx.Response)
    assert answer.json()["answers"][0]["probability"] == 0.75
    text, files = split_state(seen[0])
    assert [file.data() for file in files] == [PNG, JPEG]
    texts = [part["text"] for part in decode_state(text)[0]["content"]]
    assert texts == ["look", "image-1", "image-2"]


ASSET = {"type": "image", "data_base64": base64.b64encode(PNG).decode()}
REFUSED = {
    "address": (request(images=["https://example.com/a.png"]), "unsupported_modality", "/images/0", "fetches nothing"),
    "file": (request(videos=["file:///etc/passwd"]), "unsupported_modality", "/videos/0", "fetches nothing"),
    "no url": (request(images=["iVBOR"]), "invalid_media", "/images/0", "must be a data URL"),
    "no text": (request(images=[7]), "invalid_media", "/images/0", "must be a data URL"),
    "no list": (request(images=url(PNG)), "invalid_request", "/images", "must be a list"),
    "a gif": (request(images=[url(PNG), url(b"GIF89a" + bytes(99), "image/gif")]), "invalid_media", "/images/1", "PNG"),
    "other bytes": (request(images=[url(b"GIF89a" + bytes(99))]), "invalid_media", "/images/0", "begins like no image"),
    "no base64": (request(images=["data:image/png;base64,a b"]), "invalid_media", "/images/0", "not base64"),
    "a video": (request(images=[url(video(count=2))]), "invalid_media", "/images/0", "is MP4"),
    "pixels": (
        request(images=[url(PNG[:16] + (20_000).to_bytes(4) * 2 + PNG[24:])]), "invalid_media", "/images/0",
        "20,000 x 20,000 pixels; there may be 16,000,000",
    ),
    "bytes": (request(images=[url(PNG + bytes(8_000_001))]), "invalid_media", "/images/0", "8,000,000 bytes"),
    "count": (request(images=[url(PNG)] * 65), "invalid_media", "/images/64", "a job may have 64"),
    "audio": (request(audio=["x"]), "unsupported_modality", "/audio", "not supported"),
    "no assets": (request(assets={}), "invalid_request", "/assets", "an object with an image"),
    "not named": (request(assets={"photo": ASSET}), "invalid_request", "/assets/photo", "named nowhere"),
    "in a question": (request("red", assets={"red": ASSET}), "unsupported_modality", "/assets/red", "in a question"),
    "kind of asset": (
        request("a", assets={"a": {"type": "video"}}), "unsupported_modality", "/assets/a/type", "is an image here",
    ),
    "empty asset": (request("a", assets={"a": {"type": "image"}}), "invalid_request", "/assets/a", "data_base64"),
    "misspelled": (request("a", assets={"a": ASSET | {"b": 1}}), "invalid_request", "/assets/a/b", "spelling"),
    "no part": (
        request("a", assets={"a": {"type": "image", "part": "x"}}), "invalid_request", "/assets/a/part", "no such part",
    ),
    "an image in the state": (
        request([{"type": "image_url", "image_url": url(PNG)}]), "unsupported_modality", "/state", "image_url",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_read_is_refused_by_name(client, name):
    body, code, pointer, told = REFUSED[name]
    answered = await client.post("/v1/jobs", json=body)
    assert answered.status_code == 422, answered.text
    found = answered.json()
    assert (found["code"], found["errors"][0]["pointer"]) == (code, pointer)
    assert told in found["errors"][0]["detail"]
    assert len(answered.content) < 4096


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("part", "code"),
    [({"image_url": "https://example.com/a.png"}, "unsupported_modality"), ({"file_id": "f"}, "unsupported_modality"),
     ({"image_url": url(b"x")}, "invalid_media"), ({}, "invalid_media")],
)  # fmt: skip
async def test_an_image_of_a_message_is_refused_by_its_place(client, part, code):
    body = {"model": "jev-latest", "input": [{"role": "user", "content": [{"type": "input_image", **part}]}],
            "questions": [{"type": "predicate", "instructions": "?"}]}  # fmt: skip
    answered = await client.post("/v1/decisions", json=body)
    assert answered.status_code == 422
    assert answered.json()["code"] == code
    assert answered.json()["errors"][0]["pointer"].startswith("/input/0/content/0/")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda sent: sent.replace(b"--\r\n", b"\r\n"), "cut off"),
        (lambda sent: sent[: len(sent) // 2], "cut off"),
        (lambda sent: sent.replace(b'name="request"', b'name="other"'), '"request"'),
        (lambda sent: sent.replace(b'name="asset-0"', b'name="request"'), "two parts"),
        (lambda sent: sent.replace(b'; name="asset-0"', b""), "has no name"),
        (lambda sent: sent.replace(b'name="asset-0"', b'name="x"'), "no such part"),
        (lambda sent: sent.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"), "encoded"),
        (lambda sent: sent.replace(b"octet-stream\r\n", b"x\r\n" + b"X: y\r\n" * 999), "headers of more"),
        (lambda _: b"", "cut off"),
    ],
)  # fmt: skip
async def test_a_body_in_parts_that_are_not_right_is_refused(client, change, told):
    body = request("photo", assets={"photo": {"type": "image", "part": "asset-0"}})
    sent = multipart(body, [("asset-0", PNG)])
    answered = await client.post("/v1/jobs", content=change(sent["content"]), headers=sent["headers"])
    assert answered.status_code == 422, answered.text
    assert told in answered.json()["detail"]


@pytest.mark.usefixtures("reader")
async def test_parts_that_nobody_names_or_too_many_are_refused(client):
    assets = {"photo": {"type": "image", "part": "a"}}
    answered = await client.post(
        "/v1/jobs", **multipart(request("photo", assets=assets), [("a", PNG), ("b", PNG)])
    )
    assert answered.json()["errors"] == [
        {"pointer": "/b", "code": "invalid_request", "detail": "is a part of the body that no asset names"}
    ]
    answered = await client.post("/v1/jobs", **multipart(request(), [(str(n), PNG) for n in range(70)]))
    assert "71 parts; there may be 65" in answered.json()["detail"]


@pytest.mark.usefixtures("reader")
async def test_a_web_page_cannot_post_a_form(client):
    sent = multipart(request(), [])
    headers = sent["headers"] | {"origin": "http://localhost"}
    answered = await client.post("/v1/jobs", content=sent["content"], headers=headers)
    assert answered.status_code == 415


async def test_a_model_that_reads_text_alone_says_so(client, worker):
    for name, data in (("images", PNG), ("videos", video(count=2))):
        kind = "image/png" if name == "images" else "video/mp4"
        answered = await client.post("/v1/jobs", json=request(**{name: [url(data, kind)]}))
        assert answered.status_code == 422
        assert answered.json()["code"] == "unsupported_modality"
        assert f"reads no {name}" in answered.json()["detail"]
    assert not worker.claim().jobs


@pytest.mark.usefixtures("reader")
async def test_a_hostile_file_is_refused_or_taken_and_never_a_fault_of_ours(client):
    """Those that a header cannot tell are taken here, and fail in the worker."""
    statuses = Counter()
    for name, kind, data, expected in hostile_files("/etc/hostname", "127.0.0.1:9"):
        if len(data) < 10**6:
            mime = "image/png" if kind == "image" else "video/mp4"
            answered = await client.post("/v1/jobs", json=request(**{f"{kind}s": [url(data, mime)]}))
            statuses[answered.status_code] += 1
            assert answered.status_code == 202 or answered.json()["code"] == "invalid_media", name
            assert answered.status_code == 202 or expected != READ, name
    assert statuses.keys() == {202, 422}
    assert statuses[422] > 40
