"""Which models are served, under which names a client may ask for them."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from d3serve.errors import ModelNotFound, UnsupportedModality
from d3serve.schemas import ModelInfo
from d3serve.settings import Settings
from d3serve.store.jobs import JobStore
from d3serve.text.wording import shown

REFRESH_S: Final = 1.0  # a submission should not cost a look at the workers each time


class ServedModels:
    """The models of live workers, remembered for a second; the configured model stands in when none lives."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._models: list[ModelInfo] = []
        self._read_at = -REFRESH_S

    async def live(self) -> list[ModelInfo]:
        """What live workers serve, as of a second ago at most, or of the look before while somebody looks again."""
        now = time.monotonic()
        if now - self._read_at >= REFRESH_S:
            if self._read_at >= 0:
                self._read_at = now  # one looks, and not each of those that come meanwhile
            try:
                self._models = await self._store.models()
            except BaseException:
                self._read_at = -REFRESH_S
                raise
            self._read_at = time.monotonic()
        return self._models

    async def answered_alike(self, identity: str, name: str, revision: str) -> bool:
        """Whether weights of `identity` are the only ones that would answer now, as of this moment."""
        live = {
            model.identity
            for model in await self._store.models()
            if model.name == name and revision in ("", model.revision)
        }
        return live == {identity} != {""}

    async def resolve(self, asked: str, kinds: Collection[str] = ()) -> tuple[str, str]:
        """The served name for a name, a `name@revision` or an alias; and the revision, empty where any will do.

        Raises:
            ModelNotFound: lists what there is.
            UnsupportedModality: no live worker reads media of these kinds with it.
        """
        name, revision = await self._resolved(asked)
        readers = [one for one in self._models if one.name == name and revision in ("", one.revision)]
        for kind in sorted(kinds):
            if readers and not any(kind in one.modalities for one in readers):
                raise UnsupportedModality(f"{shown(name)} reads no {kind}s here", field=f"{kind}s")
        return name, revision

    async def _resolved(self, asked: str) -> tuple[str, str]:
        models = await self.live()
        default = models[0].name if models else configured_name(self._settings)
        names = (default, self._settings.model, *self._settings.model_alias, *(one.name for one in models))
        if asked in names:
            return (asked if any(asked == one.name for one in models) else default), ""
        for model in models:
            if model.revision and asked == model.full_name:
                return model.name, model.revision
        if not models and asked == f"{default}@{self._settings.revision}":
            return default, str(self._settings.revision)
        known = ", ".join(dict.fromkeys([default, *(one.full_name for one in models), *names[2:]]))
        raise ModelNotFound(f"the model {shown(asked)} is not served here; there is {known}", field="model")


def configured_name(settings: Settings) -> str:
    """What a worker will call the configured model: a Hub id as it is, a folder by its name (not its path)."""
    return Path(settings.model).resolve().name if settings.model.startswith("/") else settings.model
