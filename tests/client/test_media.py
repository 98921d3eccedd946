"""Images and videos by path, as bytes or as Pillow images: from the client and the command line to the stored state."""

import base64
import io
import json

import pytest
from media_files import picture, saved, video
from rich.console import Console

from d3serve.client import AsyncClient, Client
from d3serve.client.media import media_fields, with_files
from d3serve.commands.main import app
from d3serve.commands.submit import submit_file
from d3serve.errors import InvalidMedia, InvalidRequest
from d3serve.media.files import split_state

IMAGE = picture(40, 30)
PNG, JPEG, WEBP = (saved(IMAGE, kind) for kind in ("PNG", "JPEG", "WEBP"))
CLIP = video(count=3)
NOUL = {"type": "noul", "instructions": "Is it red?"}


@pytest.fixture
def seen(worker, monkeypatch):
    """What the states of the jobs show that the worker takes, by kind and bytes."""
    worker.show_itself(modalities=("text", "image", "video"))
    found, claim = [], worker.claim

    def noted():
        turn = claim()
        found.extend([(file.kind, file.data()) for file in split_state(job.state)[1]] for job in turn.jobs)
        return turn

    monkeypatch.setattr(worker, "claim", noted)
    return found


def test_each_source_becomes_a_data_url_of_what_its_bytes_are(tmp_path):
    (tmp_path / "a.jpg").write_bytes(PNG)
    webm = video("libvpx", "webm", count=2, options={"deadline": "realtime"})
    fields = media_fields(
        [tmp_path / "a.jpg", str(tmp_path / "a.jpg"), JPEG, memoryview(WEBP), IMAGE, "data:image/png;base64,AA=="],
        [CLIP, webm, video("libx264", "matroska", count=2), video("libx264", "mov", count=2)],
    )  # fmt: skip
    kinds = [url.partition(";")[0] for url in fields["images"]]
    assert kinds == [f"data:image/{kind}" for kind in ("png", "png", "jpeg", "webp", "png", "png")]
    assert base64.b64decode(fields["images"][4].partition(",")[2]) == PNG
    kinds = [url.partition(";")[0] for url in fields["videos"]]
    assert kinds == [f"data:video/{kind}" for kind in ("mp4", "webm", "x-matroska", "quicktime")]
    assert media_fields((), ()) == {}


@pytest.mark.parametrize(
    ("source", "told"),
    [("no-such-file", "No such file"), (7, "is a int"), ("a\0b", "is no path"), ("/", "directory")],
)
def test_what_cannot_be_read_is_told_by_its_place(source, told):
    with pytest.raises(InvalidRequest, match=told) as caught:
        media_fields([PNG, source], [])
    assert caught.value.field == "images.1"


def test_a_client_sends_what_a_state_shows(service, take_turns, seen):
    with take_turns(), Client(service) as client:
        client.ask("see", {"q": NOUL}, images=[PNG, IMAGE], videos=[CLIP])
        with pytest.raises(InvalidMedia, match="begins like no image"):
            client.ask("see", {"q": NOUL}, images=[b"GIF89a"])
    assert seen == [[("image", PNG), ("image", PNG), ("video", CLIP)]]


@pytest.mark.anyio
async def test_the_same_awaited(service, take_turns, seen, tmp_path):
    (tmp_path / "a").write_bytes(JPEG)
    with take_turns():
        async with AsyncClient(service) as client:
            await client.ask("see", {"q": NOUL}, images=[tmp_path / "a"])
    assert seen == [[("image", JPEG)]]


def test_lines_name_files_as_of_their_own_folder(service, take_turns, seen, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(PNG)
    lines = [
        {"state": "", "questions": {"q": NOUL}, "images": [name]} for name in ("photos/a.png", "photos/b.png")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with take_turns():
        failed = submit_file(
            tmp_path / "in.jsonl", tmp_path / "out.jsonl", url=service, api_key=None, at_once=2,
            console=Console(file=io.StringIO()),
        )  # fmt: skip
    assert (failed, seen) == (1, [[("image", PNG)]])
    rows = {row["line"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "photos/b.png" in rows[2]["error"]["message"]


def test_a_request_keeps_urls_and_what_is_no_name(tmp_path):
    body = {"images": ["data:image/png;base64,AA==", "https://a.b/c.png", 7], "videos": None, "state": "x"}
    assert with_files(body, tmp_path) == body


def test_the_command_line_shows_files(service, take_turns, seen, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.mp4").write_bytes(CLIP)
    asked = ["--yes-no", "Is it red?", "--url", service]
    with take_turns(), pytest.raises(SystemExit) as ended:
        app(["ask", "--image", str(tmp_path / "a.png"), "--video", str(tmp_path / "b.mp4"), *asked])
    assert ended.value.code == 0
    assert seen == [[("image", PNG), ("video", CLIP)]]
