"""`d3serve batches` as a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from d3serve.settings import Settings
from d3serve.store.batches import BatchStore, BatchTerms
from d3serve.up.broker import EmbeddedBroker

pytestmark = pytest.mark.anyio
WITHIN_S = 50


def start(settings):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "d3serve", "batches"], env=os.environ | settings.to_env(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def test_it_waits_for_a_broker_that_is_away_as_it_starts(tmp_path):
    """`up` starts it last: a broker that is killed just then must not end all the rest."""
    broker = EmbeddedBroker(tmp_path / "broker", 2**28).start()
    settings = Settings(redis_url=broker.url)
    broker.stop()
    process = start(settings)
    try:
        async with asyncio.timeout(WITHIN_S):
            while "batches.storage" not in await asyncio.to_thread(process.stderr.readline):
                assert process.poll() is None
            broker.start()
            async with contextlib.aclosing(BatchStore.open(settings)) as table:
                upload = await table.files.upload("public")
                await upload.add(b"[]")
                file = await upload.finish("a", "batch", None)
                made = await table.create("public", BatchTerms(file.id, "/v1/decisions", None, None))
                while (await table.get(made.id, "public")).status != "failed":  # noqa: ASYNC110 # in Redis
                    await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WITHIN_S) == 0
    finally:
        process.kill()
        process.communicate()
        broker.stop()
