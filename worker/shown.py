"""What states show: files that came with stored states, decoded while the device reads others."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from d3serve.errors import InvalidMedia, MaxTokensExceeded, UnsupportedModality
from d3serve.media.files import MediaFile, split_state
from d3serve.media.sizes import MAX_VIDEO_TOKENS
from d3serve.model.media import Medium
from d3serve.store.encode import decode_state
from d3serve.store.turns import ClaimedJob

if TYPE_CHECKING:  # with torch, which a worker loads with its engine
    from d3serve.worker.media_decoder import MediaDecoder

LIBRARIES = ("PIL", "av")


@dataclass(frozen=True)
class OpenState:
    """A state, and what it shows once that is decoded."""

    state: Any
    files: Sequence[MediaFile] = ()
    decoding: Sequence[Future[Medium]] = ()

    @property
    def ready(self) -> bool:
        """Whether nobody has to wait."""
        return all(one.done() for one in self.decoding)

    def media(self) -> list[Medium]:
        """What it shows.

        Raises:
            InvalidMedia: a file cannot be read; `field` names it.
            MaxTokensExceeded: the videos are too long together.
        """
        found: list[Medium] = []
        for number, (file, one) in enumerate(zip(self.files, self.decoding, strict=True)):
            try:
                found.append(one.result())
            except InvalidMedia as error:
                place = f"{file.kind}s.{[each.kind for each in self.files[:number]].count(file.kind)}"
                raise InvalidMedia(f"{place} {error.message}", field=place) from None
        tokens = sum(medium.pads for medium in found if medium.kind == "video")
        if tokens > MAX_VIDEO_TOKENS:
            raise MaxTokensExceeded(
                f"the videos take {tokens} tokens; those of a job may take {MAX_VIDEO_TOKENS}: send fewer or shorter",
                field="videos",
                details={"tokens": tokens, "limit": MAX_VIDEO_TOKENS},
            )
        return found


class StateOpener:
    """Opens stored states for one engine, which reads media of some kinds or none."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = frozenset(kinds)
        self._decoder: MediaDecoder | None = None

    def open(self, stored: str) -> OpenState:
        """A state; what it shows is being decoded.

        Raises:
            UnsupportedModality: the engine reads no such media, or this host cannot decode them.
        """
        text, files = split_state(stored)
        return OpenState(decode_state(text), files, [self._begin(file) for file in files])

    def close(self) -> None:
        """End what decodes."""
        if self._decoder is not None:
            self._decoder.close()

    def _begin(self, file: MediaFile) -> Future[Medium]:
        if file.kind not in self._kinds:
            raise UnsupportedModality(f"this model reads no {file.kind}s", field=f"{file.kind}s")
        if self._decoder is None:
            if missing := [name for name in LIBRARIES if find_spec(name) is None]:
                raise UnsupportedModality(
                    f"this worker has no {' and no '.join(missing)} to decode {file.kind}s with: "
                    "install d3serve[media] there",
                    field=f"{file.kind}s",
                )
            from d3serve.worker.media_decoder import MediaDecoder  # noqa: PLC0415 # with what the extra brings

            self._decoder = MediaDecoder()
        return self._decoder.begin(file.kind, file.digest, file.data)


Opened = tuple[ClaimedJob, OpenState]


def as_they_are_ready(jobs: Sequence[Opened]) -> Iterator[Sequence[Opened]]:
    """Jobs whose states wait for no file, then those whose files are decoded meanwhile, and so on."""
    left = list(jobs)
    while left:
        ready: list[Opened] = []
        waiting: list[Opened] = []
        for each in left:
            (ready if each[1].ready else waiting).append(each)
        if ready:
            yield ready
        else:
            undone = [one for _, state in waiting for one in state.decoding if not one.done()]
            wait(undone, return_when=FIRST_COMPLETED)
        left = waiting
