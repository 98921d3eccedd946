"""Any jobs over pools of any size: every question is asked once over its own state, or does not fit even alone."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from d3serve.errors import OutOfDeviceMemory
from d3serve.model.backbone import Pools
from d3serve.model.host_tier import HostTier
from d3serve.model.packing import Bounds, Packer
from d3serve.model.passes import JobReadout, PinnedPass, Placing, PreparedJob, note
from d3serve.model.state_cache import StateCache
from d3serve.schemas.questions import NoulQuestion

ONE_LAYER_EACH = SimpleNamespace(
    full_layers=1, linear_layers=1, kv_heads=1, head_dim=2, linear_value_heads=1, linear_key_dim=2,
    linear_value_dim=2, conv_channels=2, conv_width=3,
)  # fmt: skip
SCRATCH = -1.0


class Device:
    """Pools in which every row and slot holds the number of its state."""

    def __init__(self, chance: random.Random) -> None:
        self.rows, self.slots = chance.randint(20, 120), chance.randint(1, 5)
        self.pools = Pools.allocate(
            ONE_LAYER_EACH, rows=self.rows, slots=self.slots, device=torch.device("cpu"), dtype=torch.float32
        )
        tier = (
            HostTier(self.pools, chance.choice([1, 500, 3_000, 100_000])) if chance.random() < 0.6 else None
        )
        self.cache = StateCache(rows=self.rows, slots=self.slots, row_bytes=1, slot_bytes=1, tier=tier)
        self.pass_rows = chance.randint(10, self.rows)
        self.pass_states = chance.randint(1, self.slots)
        self.pass_tokens, self.pass_questions = chance.randint(1, 2 * self.rows), chance.randint(1, 20)

    def run(self, filled, scratch) -> None:
        for entry in filled.fresh.values():
            for part in self.parts(entry.start, entry.length, entry.slot):
                part.fill_(float(entry.key))
        for pool in (self.pools.k, self.pools.v):
            pool[:, scratch : scratch + filled.question_tokens] = SCRATCH
        for asked, rows in zip(filled.asked, filled.rows, strict=True):
            if rows.state is not None:
                parts = self.parts(rows.state.start, rows.state.length, rows.state.slot)
                assert all((part == float(asked.cost.state_key)).all() for part in parts)

    def parts(self, start, length, slot):
        rows = slice(start, start + length)
        return (
            self.pools.k[:, rows],
            self.pools.v[:, rows],
            self.pools.recurrent[:, slot],
            self.pools.conv[:, slot],
        )

    def decide(self, jobs, fails) -> None:
        readouts = [JobReadout(job) for job in jobs]
        bounds = Bounds(self.pass_rows, self.pass_states, self.pass_tokens, self.pass_questions)
        packer = Packer(jobs, bounds, self.cache.holds)
        while choice := packer.choose():
            filled = Placing(jobs, self.cache, self.pass_rows).place(choice.asked)
            assert choice.asked[: len(filled.asked)] == filled.asked
            packer.give_back(choice.asked[len(filled.asked) :])
            assert filled.tokens <= self.pass_rows
            assert len(filled.pinned) <= self.pass_states
            assert len(filled.asked) <= self.pass_questions
            with PinnedPass(filled, self.cache) as held:
                self.run(filled, held.scratch)
                if fails:
                    raise ZeroDivisionError
            for asked in filled.asked:
                assert asked.question not in readouts[asked.job].probabilities
            note(filled, [[]] * len(filled.asked), readouts)
            packer.succeeded(filled.asked)
        assert all(len(each.probabilities) == each.job.questions for each in readouts)

    def check(self) -> None:
        entries = list(self.cache._entries.values())
        assert all(entry.pins == 0 for entry in entries)
        assert self.cache._ranges._used == sorted((e.start, e.start + e.length) for e in entries)
        assert sorted([*self.cache._free_slots, *(e.slot for e in entries)]) == list(range(self.slots))
        if tier := self.cache._tier:
            assert not set(tier._kept) & {entry.key for entry in entries}
            assert tier._ranges._used == sorted((k.start, k.start + k.size) for k in tier._kept.values())


def drawn_job(chance: random.Random) -> PreparedJob:
    number, question = chance.randint(0, 7), NoulQuestion(type="noul")
    blocks = tuple(np.zeros(chance.randint(1, 12), dtype=np.int32) for _ in range(chance.randint(1, 5)))
    state = np.zeros(number * 7 % 40, dtype=np.int32)
    return PreparedJob(str(number), state, dict.fromkeys(map(str, range(len(blocks))), question), blocks)


@pytest.mark.parametrize("seed", range(400))
def test_batches(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  (repeatable, not secret)
    device = Device(chance)
    for _ in range(chance.randint(1, 12)):
        try:
            device.decide([drawn_job(chance) for _ in range(chance.randint(1, 6))], chance.random() < 0.1)
        except ZeroDivisionError:
            pass
        except OutOfDeviceMemory as refused:
            needed = refused.details["state_tokens"] + refused.details["question_tokens"]
            assert needed > min(device.rows, device.pass_rows)
        device.check()
