"""Takes images and videos out of a request, however it carries them; what is left is text and JSON.

The model reads all images of a state before its text, wherever they stood. So what named one stays in its place.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from d3serve.api.validation import Findings, Path
from d3serve.errors import InvalidMedia
from d3serve.media.files import MAX_FILES, MediaFile
from d3serve.media.headers import IMAGE_FORMATS, VIDEO_FORMATS
from d3serve.media.sizes import MAX_IMAGE_BYTES, MAX_VIDEO_BYTES, MediaKind
from d3serve.settings import Settings
from d3serve.text.wording import shown

Parts = Mapping[str, bytes]  # of a multipart body, by name

LISTS: Final[Mapping[str, MediaKind]] = {"images": "image", "videos": "video"}
FIELDS: Final = frozenset({*LISTS, "assets"})
FORMATS: Final = {"image": IMAGE_FORMATS, "video": VIDEO_FORMATS}
MAX_BYTES: Final = {"image": MAX_IMAGE_BYTES, "video": MAX_VIDEO_BYTES}
MAX_HEAD_CHARS: Final = 256
# The reference takes parameters on videos alone: data:video/mp4;codecs=avc1;base64,
DATA_URLS: Final = {
    "image": re.compile(r"data:image/(png|jpeg|jpg|webp);base64", re.IGNORECASE),
    "video": re.compile(r"data:video/(mp4|webm|quicktime|x-matroska)(;[^,]*)?;base64", re.IGNORECASE),
}
MAX_NAME_BYTES: Final = 1024
ASSET_FIELDS: Final = frozenset({"type", "format", "data_base64", "part"})


class MediaTaker:
    """Collects the files of one request, and what is wrong with them."""

    def __init__(self, parts: Parts) -> None:
        self.findings = Findings()
        self.files: list[MediaFile] = []
        self._parts = parts
        self._claimed: set[str] = set()

    def take(self, kind: MediaKind, encoded: str, path: Path) -> None:
        """One file in base64."""
        most = MAX_BYTES[kind]
        if len(encoded) > 4 * -(-most // 3):
            self.findings.add(
                "invalid_media", path, f"has more than {most:,} bytes, which is the most there may be"
            )
            return
        self._add(path, lambda: MediaFile.decoded(kind, encoded))

    def take_part(self, kind: MediaKind, name: Any, path: Path) -> None:
        """One file that is a part of the body."""
        if not isinstance(name, str) or name not in self._parts:
            told = f"is {shown(name)}; the body has no such part"
            self.findings.add("invalid_request", path, told)
        elif name in self._claimed:
            self.findings.add("invalid_request", path, f"is {shown(name)}, as of another asset")
        else:
            self._claimed.add(name)
            self._add(path, lambda: MediaFile.of(kind, self._parts[name]))

    def take_url(self, kind: MediaKind, url: Any, path: Path) -> None:
        """One file in a data URL."""
        head, comma, encoded = url.partition(",") if isinstance(url, str) else ("", "", "")
        if comma and len(head) <= MAX_HEAD_CHARS and DATA_URLS[kind].fullmatch(head.strip()):
            self.take(kind, encoded, path)
        elif isinstance(url, str) and re.match(r"\s*(https?|ftp|file|s3|gs):", url[:20], re.IGNORECASE):
            told = f"is an address, and this server fetches nothing; send the {kind} itself as a data URL"
            self.findings.add("unsupported_modality", path, told)
        else:
            told = f"must be a data URL, data:{kind}/…;base64,…, of {FORMATS[kind]}; not {shown(url, 30)}"
            self.findings.add("invalid_media", path, told)

    def check_whole(self, settings: Settings) -> None:
        """What only all together can be: too many, too long, left over."""
        for name in self._parts.keys() - self._claimed:
            self.findings.add("invalid_request", (name,), "is a part of the body that no asset names")
        tokens = sum(file.most_tokens for file in self.files if file.kind == "image")
        if tokens > settings.max_offline_tokens:
            told = f"take {tokens} tokens, past the maximum context length of {settings.max_offline_tokens} tokens"
            self.findings.add("max_tokens_exceeded", ("images",), told)

    def has_room(self, path: Path) -> bool:
        """Whether one more may come."""
        if len(self.files) < MAX_FILES:
            return not self.findings.full
        self.findings.add(
            "invalid_media", path, f"is one too many: a job may have {MAX_FILES} images and videos"
        )
        return False

    def _add(self, path: Path, make: Any) -> None:
        try:
            self.files.append(make())
        except InvalidMedia as error:
            self.findings.add("invalid_media", path, error.message)


def take_media(
    payload: Mapping[str, Any], parts: Parts, settings: Settings, *, messages: bool = False
) -> tuple[dict[str, Any], list[MediaFile]]:
    """The request without its images and videos, and these: of `images`, of `assets` or of messages, then of `videos`.

    `messages`: it speaks OpenAI's dialect, where images stand among the parts of messages and nowhere else.

    Raises:
        InvalidRequest: or a subclass; `details["errors"]` lists up to ten findings.
    """
    taker, rest = MediaTaker(parts), dict(payload)
    if messages:
        if isinstance(payload["input"], list):
            rest["input"] = [
                _without_images(message, ("input", place), taker)
                for place, message in enumerate(payload["input"])
            ]
    else:
        _take_list("images", payload, taker)
        if "assets" in payload:
            _take_assets(payload, taker)
        _take_list("videos", payload, taker)
        rest = {name: value for name, value in payload.items() if name not in FIELDS}
    taker.check_whole(settings)
    taker.findings.raise_if_any()
    return rest, taker.files


def _take_list(name: str, payload: Mapping[str, Any], taker: MediaTaker) -> None:
    urls = payload.get(name)
    if urls is None:
        return
    if not isinstance(urls, list):
        taker.findings.add("invalid_request", (name,), f"must be a list of data URLs, not {shown(urls, 30)}")
        return
    for place, url in enumerate(urls):
        if not taker.has_room((name, place)):
            return
        taker.take_url(LISTS[name], url, (name, place))


def _take_assets(payload: Mapping[str, Any], taker: MediaTaker) -> None:
    """Images that placeholders in the state name, in the order of their first mention."""
    assets, findings = payload["assets"], taker.findings
    if not isinstance(assets, dict) or not assets:
        findings.add("invalid_request", ("assets",), f"must be an object with an image, not {shown(assets)}")
        return
    found: list[tuple[tuple[int, int], str]] = []
    texts, asked = list(_texts(payload.get("state"))), list(_texts(payload.get("questions")))
    for name in assets:
        path = ("assets", name)
        if findings.full or not taker.has_room(path):
            return
        places = ((number, text.find(name)) for number, text in enumerate(texts) if name in text)
        place = next(places, None)
        if not name.strip() or len(name.encode()) > MAX_NAME_BYTES:
            findings.add(
                "invalid_request", path, f"has a name that is blank or longer than {MAX_NAME_BYTES} bytes"
            )
        elif any(name in text for text in asked):
            told = (
                "stands in a question; this model has no known way to read an image there, only in the state"
            )
            findings.add("unsupported_modality", path, told)
        elif place is None:
            findings.add("invalid_request", path, "is named nowhere in the state")
        else:
            found.append((place, name))
        if len(found) > MAX_FILES:
            return
    for _, name in sorted(found):
        if not taker.has_room(("assets", name)):
            return
        _take_asset(assets[name], ("assets", name), taker)


def _take_asset(asset: Any, path: Path, taker: MediaTaker) -> None:
    if not isinstance(asset, dict) or not isinstance(asset.get("type"), str):
        taker.findings.add("invalid_request", path, f"must be an object with a type, not {shown(asset, 30)}")
    elif asset["type"] != "image":
        told = f"is {shown(asset['type'])}; an asset is an image here, and videos are sent in videos"
        taker.findings.add("unsupported_modality", (*path, "type"), told)
    elif unknown := asset.keys() - ASSET_FIELDS:
        taker.findings.add(
            "invalid_request", (*path, min(unknown)), "is not a field here: check its spelling"
        )
    elif "part" in asset:
        taker.take_part("image", asset["part"], (*path, "part"))
    elif isinstance(asset.get("data_base64"), str):
        taker.take("image", asset["data_base64"], (*path, "data_base64"))
    else:
        taker.findings.add("invalid_request", path, "must have data_base64, or the name of a part")


def _without_images(message: Any, path: Path, taker: MediaTaker) -> Any:
    """A message of OpenAI's dialect, with the name of each image in its place."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = []
    for place, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "input_image":
            where = (*path, "content", place)
            if not taker.has_room(where):
                break
            if part.get("file_id") is not None and part.get("image_url") is None:
                told = "names a file; this server keeps none: send the image itself as a data URL"
                taker.findings.add("unsupported_modality", (*where, "file_id"), told)
            else:
                taker.take_url("image", part.get("image_url"), (*where, "image_url"))
            parts.append({"type": "input_text", "text": f"image-{len(taker.files)}"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _texts(value: Any) -> Iterator[str]:
    """Every string in a value, in the order in which it was written; keys are none of them."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            stack += reversed(part.values())
        elif isinstance(part, list):
            stack += reversed(part)
