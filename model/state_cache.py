"""Which states the pools hold, and where: ranges of K/V rows and slots of the linear layers.

Bookkeeping only; the tensors belong to the backbone. An entry is complete or absent: it can be found only
after `publish`, it cannot be evicted while a pass has it pinned, and a pass that fails leaves no trace.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from d3serve.errors import InvalidSettings
from d3serve.model.disk_tier import DiskTier
from d3serve.model.host_tier import HostTier
from d3serve.model.ranges import Entry, RangeAllocator

REMEMBERED: Final = 1024  # keys of states that were read, wherever these are by now


@dataclass
class CacheStats:
    """Counters since the start."""

    hits: int = 0
    restored: int = 0  # hits among them that came back from host memory or a file
    misses: int = 0
    evictions: int = 0


class StateCache:
    """Places states in the pools, and evicts what no pass is using.

    Where rows run out, the least recently used goes: a row costs about as much to read as any other. A slot holds a
    state of any length, so where slots run out the one of least credit goes, and what stays ages by that
    (GreedyDual, Young 1994): short states make room for each other, and an unused long one for them in the end.
    """

    def __init__(
        self,
        *,
        rows: int,
        slots: int,
        row_bytes: int,
        slot_bytes: int,
        tier: HostTier | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """Manage `rows` K/V rows and `slots` recurrent slots; the byte sizes are for reports.

        What is evicted goes to `tier`, if there is one, and comes back when it is acquired. What a second turn asks
        about goes to `disk`, if there is one, and comes back when it is nowhere else.
        """
        if rows < 1 or slots < 1:
            raise InvalidSettings(f"a state cache needs rows and slots; got {rows} and {slots}")
        self.slots = slots
        self.stats = CacheStats()
        self._tier, self._disk = tier, disk
        self._writing: Entry | None = None  # to the disk, pinned meanwhile
        self._turn = 0
        self._read: OrderedDict[str, None] = OrderedDict()  # keys of states that were read, oldest first
        self._row_bytes, self._slot_bytes = row_bytes, slot_bytes
        self._ranges = RangeAllocator(rows)
        self._free_slots = list(reversed(range(slots)))
        self._age = 0  # the credit of the last state that gave up its slot
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # complete ones, oldest use first

    @property
    def rows(self) -> int:
        """Rows of the K/V pools."""
        return self._ranges.size

    @property
    def size_bytes(self) -> int:
        """Memory of the pools."""
        return self.rows * self._row_bytes + self.slots * self._slot_bytes

    @property
    def used_bytes(self) -> int:
        """Memory of the complete entries."""
        return sum(entry.length * self._row_bytes + self._slot_bytes for entry in self._entries.values())

    @property
    def is_writing(self) -> bool:
        """Whether a state is being written to the disk."""
        return self._disk is not None and self._disk.busy

    def keys(self) -> list[str]:
        """Keys of the states in memory that need not be read again, oldest use first."""
        return [*(self._tier.keys() if self._tier else ()), *self._entries]

    def holds(self, key: str) -> bool:
        """Whether a state need not be read again."""
        tiers = (tier for tier in (self._tier, self._disk) if tier is not None)
        return key in self._entries or any(tier.holds(key) for tier in tiers)

    def begin_turn(self) -> None:
        """What is acquired from here on is asked about by others than before, and may be asked about again."""
        self._turn += 1

    def acquire(self, key: str) -> Entry | None:
        """Pin and return a complete entry; None when the state must be read."""
        self._end_writing(at_once=False)
        entry = self._entries.get(key)
        if entry is not None:
            is_asked_again = entry.turn != self._turn
            self._use(entry)
            entry.pins += 1
            if is_asked_again:
                self._write(entry)
        elif (entry := self._restore(key) or self._read_file(key)) is None:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        return entry

    def _restore(self, key: str) -> Entry | None:
        """Bring a state back from host memory, pinned; None when it is not there or finds no room."""
        if self._tier is None or (kept := self._tier.take(key)) is None:
            return None
        entry = self.reserve(key, kept.length, kept.delta)
        if entry is None:
            self._tier.put_back(kept)
            return None
        self._tier.load(kept, entry)
        self._use(entry)
        self._write(entry)
        self.stats.restored += 1
        return entry

    def _read_file(self, key: str) -> Entry | None:
        """Bring a state back from its file, pinned; None when there is none, or no room, or it is damaged."""
        if self._disk is None or (kept := self._disk.find(key)) is None:
            return None
        entry = self.reserve(key, kept.length, kept.delta)
        if entry is None:
            return None
        if not self._disk.load(kept, entry):
            self.release(entry)
            return None
        self._use(entry)
        self.stats.restored += 1
        return entry

    def _write(self, entry: Entry) -> None:
        """Have a state written to the disk, where that pays; it is pinned until then."""
        if self._disk is not None and self._writing is None and self._disk.begin(entry):
            self._writing = entry
            entry.pins += 1

    def _end_writing(self, *, at_once: bool) -> bool:
        """Unpin the state that was written, or that need not be any more; whether there was one."""
        if self._disk is None or self._writing is None:
            return False
        if at_once:
            self._disk.give_up()
        elif self._disk.busy:
            return False
        entry, self._writing = self._writing, None
        self.release(entry)
        return True

    def reserve(self, key: str, length: int, delta: int = 0) -> Entry | None:
        """Place a new state, pinned and not yet findable; None when what is pinned leaves no room.

        `delta` goes with it: questions behind it take their positions from it.
        """
        while not self._free_slots:
            if not (idle := self._idle()):
                if self._end_writing(at_once=True):
                    continue
                return None
            least = min(idle, key=lambda entry: entry.credit)
            self._age = least.credit
            self._evict(least)
        start = self._allocate(length, high=False)
        if start is None:
            return None
        return Entry(key, start, length, self._free_slots.pop(), delta)

    def publish(self, entry: Entry) -> None:
        """Make a reserved entry findable: its rows and slot are written; the pin stays."""
        self._use(entry)
        if entry.key in self._read:  # it was evicted before anybody asked again
            self._write(entry)
        self._read[entry.key] = None
        self._read.move_to_end(entry.key)
        if len(self._read) > REMEMBERED:
            self._read.popitem(last=False)

    def release(self, entry: Entry) -> None:
        """Take one pin off; an entry that was never published goes away with it."""
        entry.pins -= 1
        if not entry.pins and self._entries.get(entry.key) is not entry:
            self._free(entry)

    def forget(self, key: str) -> None:
        """Make a state absent at once; rows in use stay until their pins are gone."""
        if self._writing is not None and self._writing.key == key:
            self._end_writing(at_once=True)
        for tier in (self._tier, self._disk):
            if tier is not None:
                tier.forget(key)
        entry = self._entries.pop(key, None)
        if entry is not None and not entry.pins:
            self._free(entry)

    def clear(self) -> bool:
        """Evict every state that no pass is using; whether all rows are free then."""
        self._end_writing(at_once=True)
        for entry in self._idle():
            self._evict(entry)
        return list(self._ranges.gaps()) == [(0, self.rows)]

    def reserve_scratch(self, length: int) -> int | None:
        """Take a range for the question rows of one pass, from the high end so that states stay together."""
        return self._allocate(length, high=True)

    def scratch_fits(self, length: int) -> bool:
        """Whether `reserve_scratch` would succeed; makes the room for it."""
        start = self.reserve_scratch(length)
        if start is not None:
            self.release_scratch(start, length)
        return start is not None

    def release_scratch(self, start: int, length: int) -> None:
        """Give a scratch range back."""
        self._ranges.free(start, length)

    def _allocate(self, length: int, *, high: bool) -> int | None:
        if length > self.rows:
            return None  # emptying the cache would not help
        while (start := self._ranges.allocate(length, high=high)) is None:
            if not (idle := self._idle()):
                if self._end_writing(at_once=True):
                    continue
                return None
            self._evict(idle[0])
        return start

    def _idle(self) -> list[Entry]:
        """Complete entries that no pass is using, oldest use first."""
        return [entry for entry in self._entries.values() if not entry.pins]

    def _use(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._entries.move_to_end(entry.key)
        entry.credit, entry.turn = self._age + entry.length, self._turn

    def _evict(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if self._tier:
            self._tier.save(entry)
        self._free(entry)
        self.stats.evictions += 1

    def _free(self, entry: Entry) -> None:
        self._ranges.free(entry.start, entry.length)
        self._free_slots.append(entry.slot)
