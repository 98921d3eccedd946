"""Routes that are called without FastAPI's search for what they ask for, and how often the workers are asked."""

import asyncio

import pytest
from fastapi import APIRouter, Request, Response

from d3serve.api.auth import Reader
from d3serve.api.dependencies import TheParts
from d3serve.api.direct_route import DirectRoute
from d3serve.api.served import ServedModels
from d3serve.errors import StorageUnavailable
from d3serve.schemas import ModelInfo
from d3serve.settings import Settings

pytestmark = pytest.mark.anyio
MODEL = ModelInfo(
    name="a", attention_mode="prefix_bidir", validated_length=1, max_length=1, dtype="float32", device="cpu"
)


def test_a_function_that_asks_for_more_is_refused_when_it_is_written():
    router = APIRouter(route_class=DirectRoute)
    with pytest.raises(TypeError, match="asks for request, parts, tenant, page"):

        @router.get("/")
        async def more(request: Request, parts: TheParts, tenant: Reader, page: int) -> Response:
            raise NotImplementedError

    with pytest.raises(TypeError, match="asks for request, parts, not"):

        @router.get("/open")
        async def nobody_admitted(request: Request, parts: TheParts) -> Response:
            raise NotImplementedError


class Store:
    def __init__(self):
        self.looks, self.away = 0, False

    async def models(self):
        self.looks += 1
        await asyncio.sleep(0)
        if self.away:
            raise StorageUnavailable("away")
        return [MODEL]


async def test_one_of_many_looks_what_is_served():
    store = Store()
    served = ServedModels(store, Settings())
    assert await served.live() == [MODEL]
    served._read_at -= 1  # a second later
    assert await asyncio.gather(*(served.live() for _ in range(20))) == [[MODEL]] * 20
    assert store.looks == 2
    served._read_at, store.away = served._read_at - 1, True
    with pytest.raises(StorageUnavailable):
        await served.live()
    store.away = False
    assert await served.live() == [MODEL]
    assert store.looks == 4, "what could not be read is read again at once"


async def test_the_first_look_is_waited_for():
    served = ServedModels(Store(), Settings())
    assert await asyncio.gather(*(served.live() for _ in range(5))) == [[MODEL]] * 5
