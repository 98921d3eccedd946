"""States in files: the same answers, bit for bit, after a restart; and whatever is wrong with a file, never others."""

import gc
import json
import os
import threading
import time
import weakref
import zlib
from types import SimpleNamespace

import pytest

from d3serve.errors import InvalidSettings
from d3serve.model import disk_tier, state_files
from d3serve.model.buckets import ROW_SIZES
from d3serve.model.disk_tier import FOLDER, LEAST_TOKENS, DiskTier
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion

QUESTIONS = {"q": NoulQuestion(type="noul", instructions="Is it about a refund?")}
STATES = tuple(f"Ticket {n}: I was charged twice and want a refund. " * (9 + n) for n in range(3))
DEADLINE_S = 60


def test_what_a_worker_warms_up_with_is_never_written():
    """Its made-up states have no digest for a key, and those that it asks about twice are short."""
    assert max(ROW_SIZES) < LEAST_TOKENS


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Short states are kept too, in many chunks, which the readers share."""
    monkeypatch.setattr(disk_tier, "LEAST_TOKENS", 64)
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 5_000)  # no part of a state is a multiple of it


@pytest.fixture
def started(tiny_checkpoint, tmp_path):
    """An engine as a worker starts it; each one knows of the others by the folder alone."""

    def start(package=tiny_checkpoint, **options):
        return DecisionEngine.load(str(package), device="cpu", **({"state_cache_dir": tmp_path} | options))

    return start


def answer(engine, state=STATES[0], salt=""):
    """The probability, whether the state was cached, and how many states came back from a file so far."""
    (decided,) = engine.decide([engine.prepare(state, QUESTIONS, salt=salt)])
    return decided.answers["q"].noul, decided.usage.state_cached, engine.cache.stats.restored


def written(engine):
    """Wait until nothing is being written."""
    deadline = time.monotonic() + DEADLINE_S
    while engine.cache.is_writing:
        assert time.monotonic() < deadline, "it is being written for ever"
        time.sleep(0.005)


def kept(tmp_path):
    return sorted((tmp_path / FOLDER).glob("*.state"))


def test_what_is_asked_again_outlives_the_process_bit_for_bit(started, tmp_path):
    first = started()
    cold, _, _ = answer(first)
    written(first)
    assert kept(tmp_path) == [], "one use is no reason to write"
    warm, cached, _ = answer(first)
    written(first)
    assert (warm, cached, len(kept(tmp_path))) == (cold, True, 1)
    second = started()
    for pool in (second.backbone.pools.k, second.backbone.pools.v, second.backbone.pools.recurrent):
        pool.fill_(float("nan"))
    assert answer(second) == (cold, True, 1)
    assert answer(second) == (cold, True, 1), "on the device by now"
    written(second)
    assert len(kept(tmp_path)) == 1
    assert [path.stat().st_mode & 0o777 for path in kept(tmp_path)] == [0o600]
    assert not list((tmp_path / FOLDER).glob("*.new"))


@pytest.mark.parametrize("pool", ["k", "v", "recurrent", "conv"])
def test_every_part_of_a_state_is_written_and_read(started, monkeypatch, pool):
    first = started()
    expected = [answer(first) for _ in range(2)][-1][0]
    written(first)
    second, load = started(), DiskTier.load

    def forgetful(tier, file, entry):
        whole = load(tier, file, entry)
        place = slice(entry.start, entry.start + entry.length) if pool in "kv" else entry.slot
        getattr(tier._pools, pool)[:, place] = 0
        return whole

    monkeypatch.setattr(DiskTier, "load", forgetful)
    assert answer(second)[0] != expected


def flip(path, place):
    """Change one bit."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        at = place if place >= 0 else size + place
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


DAMAGE = {
    "a bit of the state": lambda path: flip(path, 12_345),
    "a bit of the last chunk": lambda path: flip(path, -700),
    "a bit of its description": lambda path: flip(path, -60),
    "a bit of its end": lambda path: flip(path, -1),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by one byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "bytes between": lambda path: path.write_bytes(b"x" + path.read_bytes()),
    "another file": lambda path: path.write_bytes(os.urandom(50_000)),
    "one that says it is endless": lambda path: path.write_bytes(b"\xff" * 8 + state_files.MAGIC),
    "one of another kind": lambda path: described(path, {"sums": [], "of": "another day"}),
    "one that tells no sums": lambda path: described(path, {}),
    "one whose description is a list": lambda path: described(path, []),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


def sparse(path, size):
    """A file of that size, almost all of which its end calls the description."""
    end = bytes(4) + (size - 100).to_bytes(4, "little") + state_files.MAGIC
    with path.open("wb") as file:
        file.truncate(size - len(end))
        file.seek(0, os.SEEK_END)
        file.write(end)


def test_no_more_is_read_of_a_description_than_one_may_have(tmp_path, monkeypatch):
    sparse(tmp_path / "file", 3 * 2**30)
    asked, pread = [], os.pread

    def watched(file, count, offset):
        asked.append(count)
        return pread(file, min(count, 100), offset)

    monkeypatch.setattr(state_files.os, "pread", watched)
    with pytest.raises(ValueError, match="it has no end"):
        state_files.StateFile.read(tmp_path / "file")
    assert max(asked) <= state_files.MOST_TOLD_BYTES


def described(path, told):
    """A file with that for a description, and a good sum of it."""
    text = json.dumps(told).encode()
    sums = zlib.crc32(text).to_bytes(4, "little") + len(text).to_bytes(4, "little")
    path.write_bytes(text + sums + state_files.MAGIC)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_removed_and_the_state_read_by_the_model(damage, started, tmp_path):
    first = started()
    expected = [answer(first) for _ in range(2)][-1][0]
    written(first)
    (path,) = kept(tmp_path)
    DAMAGE[damage](path)
    second = started()
    assert answer(second) == (expected, False, 0)
    assert kept(tmp_path) == []
    answer(second)
    written(second)
    assert answer(started()) == (expected, True, 1), "written anew"


def test_a_drive_that_fails_is_left_only_when_no_reader_writes_any_more(started, monkeypatch):
    """The rows go to another state at once, into which a reader that goes on would write."""
    first = started()
    expected = [answer(first) for _ in range(2)][-1][0]
    written(first)
    fill, failed, ended = state_files._fill, threading.Event(), []

    def failing(file, begin, view):
        if begin == 0:
            failed.set()
            raise OSError(5, "Input/output error")
        assert failed.wait(DEADLINE_S)
        time.sleep(0.05)  # as a drive takes its time
        ended.append(begin)
        return fill(file, begin, view)

    second, at_removal = started(), []
    monkeypatch.setattr(state_files, "_fill", failing)
    forget = DiskTier.forget
    monkeypatch.setattr(DiskTier, "forget", lambda *given: (at_removal.append(len(ended)), forget(*given)))
    assert answer(second) == (expected, False, 0)
    assert at_removal == [len(ended)]
    assert len(ended) >= state_files.READERS - 1


def test_a_file_under_the_name_of_another_state_answers_nothing(started, tmp_path):
    first = started()
    for state in STATES[:2]:
        for _ in range(2):
            answer(first, state)
            written(first)
    one, other = kept(tmp_path)
    os.replace(one, other)
    second = started()
    assert [answer(second, state)[1:] for state in STATES[:2]] == [(False, 0), (False, 0)]


def test_tenants_share_no_file_and_neither_do_weights(started, tmp_path, checkpoint_tool, tmp_path_factory):
    first = started()
    for _ in range(2):
        answer(first, salt="a")
    written(first)
    second = started()
    assert answer(second, salt="b")[1:] == (False, 0)
    assert answer(second, salt="a")[1:] == (True, 1)
    other = checkpoint_tool.write_checkpoint(tmp_path_factory.mktemp("tiny"), checkpoint_tool.Variant(seed=7))
    assert answer(started(other), salt="a")[1:] == (False, 0)
    assert answer(started(dtype="bfloat16"), salt="a")[1:] == (False, 0)
    assert len(kept(tmp_path)) == 1


def test_another_version_reads_the_state_itself(started, monkeypatch):
    first = started()
    for _ in range(2):
        answer(first)
    written(first)
    monkeypatch.setattr(disk_tier, "version", lambda _: "of another day")
    assert answer(started())[1:] == (False, 0)


def test_files_that_nobody_asks_about_go_after_their_time(started, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "SWEEP_EVERY_S", 0.01)
    engine = started(state_ttl_s=3_600)
    for _ in range(2):
        answer(engine)
    written(engine)
    (path,) = kept(tmp_path)
    left = path.with_name("0.0.new")
    left.touch()
    young = path.with_name("1.1.new")
    young.touch()
    mine = path.with_name("notes.txt")
    mine.touch()
    for each in (path, left, mine):
        os.utime(each, (1, time.time() - 3_700))
    deadline = time.monotonic() + DEADLINE_S
    while path.exists() or left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert young.exists()
    assert mine.exists()


def test_what_is_no_file_of_ours_is_left_alone_and_stops_no_sweep(started, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "SWEEP_EVERY_S", 0.01)
    engine = started(state_ttl_s=3_600)
    folder, others = tmp_path / FOLDER, [tmp_path / FOLDER / "0.state", tmp_path / FOLDER / "1.new"]
    for path in others:
        path.mkdir()
    for number in range(8):  # whichever order the folder lists them in
        (folder / f"old{number}.state").touch()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    deadline = time.monotonic() + DEADLINE_S
    while sorted(folder.iterdir()) != others:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.cache.stats.restored == 0


def test_the_pools_of_an_engine_that_is_let_go_go_with_it(started, monkeypatch):
    """A worker that fails while it warms up loads again in the same process, and needs that memory."""
    monkeypatch.setattr(disk_tier, "SWEEP_EVERY_S", 0.01)
    engine = started()
    for _ in range(2):
        answer(engine)
    written(engine)
    pools = weakref.ref(engine.backbone.pools)
    del engine
    deadline = time.monotonic() + DEADLINE_S
    while pools() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_one_too_old_is_not_read_though_no_sweep_came(started, tmp_path, monkeypatch):
    monkeypatch.setattr(DiskTier, "sweep", lambda _: None)
    first = started()
    for _ in range(2):
        answer(first)
    written(first)
    os.utime(kept(tmp_path)[0], (1, time.time() - 90_000))
    assert answer(started())[1:] == (False, 0)


def test_files_take_no_more_than_they_leave_and_the_longest_unused_goes(started, tmp_path, monkeypatch):
    engine = started()

    def keep(state):
        for _ in range(2):
            answer(engine, state)
        written(engine)

    def disk_of(size):
        """A disk of that size, on which nothing else is."""
        monkeypatch.setattr(
            disk_tier.shutil, "disk_usage", lambda _: SimpleNamespace(free=size - held(tmp_path))
        )

    keep(STATES[0])
    (first,) = kept(tmp_path)
    disk_of(5 * held(tmp_path))  # so two of them have room, which are a little larger
    keep(STATES[1])
    os.utime(first, (1, time.time() - 60))
    keep(STATES[2])
    assert len(kept(tmp_path)) == 2
    assert not first.exists()
    before = kept(tmp_path)
    disk_of(held(tmp_path))
    keep(STATES[2] + STATES[2])
    assert kept(tmp_path) == before, "one that has no room at all pushes no other out"


def held(tmp_path):
    return sum(path.stat().st_size for path in kept(tmp_path))


def test_a_state_gives_up_its_file_where_a_pass_needs_its_place(started, tmp_path, monkeypatch):
    """It is pinned while it is written; a slow disk must cost no job its room."""
    engine = started()
    waits, go_on = threading.Event(), threading.Event()
    write = state_files._write_all

    def slow(file, view):
        waits.set()
        assert go_on.wait(DEADLINE_S)
        write(file, view)

    monkeypatch.setattr(state_files, "_write_all", slow)
    expected = [answer(engine) for _ in range(2)][-1][0]
    assert waits.wait(DEADLINE_S)
    assert engine.cache.clear(), "its rows are free at once, though the disk has not taken them"
    assert answer(engine)[:2] == (expected, False)
    go_on.set()
    written(engine)
    assert kept(tmp_path) == []
    assert not list((tmp_path / FOLDER).glob("*.new"))


def test_a_state_that_broke_its_answers_leaves_no_file(started, tmp_path):
    engine = started()
    for _ in range(2):
        answer(engine)
    written(engine)
    (key,) = engine.cached_state_keys()
    engine.cache.forget(key)
    assert kept(tmp_path) == []


def test_a_full_disk_costs_no_answer(started, monkeypatch, caplog):
    engine = started()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_files, "_write_all", full)
    expected = [answer(engine) for _ in range(2)][-1][0]
    written(engine)
    assert answer(engine)[0] == expected
    assert "a state was not written: No space left on device" in caplog.text


def test_a_folder_that_others_write_to_is_refused_by_name(started, tmp_path):
    (tmp_path / FOLDER).mkdir(mode=0o700)
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(InvalidSettings, match="not this user's alone") as refused:
        started()
    assert refused.value.field == "state_cache_dir"


def test_a_folder_that_is_none_is_refused_by_name(started, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidSettings, match="cannot write to") as refused:
            started(state_cache_dir=folder)
        assert refused.value.field == "state_cache_dir"


def test_a_link_in_the_place_of_a_file_is_not_followed(started, tmp_path):
    first = started()
    for _ in range(2):
        answer(first)
    written(first)
    (path,) = kept(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert answer(started())[1:] == (False, 0)


@pytest.mark.parametrize("host_bytes", [0, 2**24])
def test_a_state_that_was_evicted_before_its_second_use_is_written_at_that(started, tmp_path, host_bytes):
    """Where memory is short nothing waits on the device until it is asked about again."""
    engine = started(state_cache_host_bytes=host_bytes)
    cold, _, _ = answer(engine)
    engine.cache.clear()
    assert answer(engine)[:2] == (cold, host_bytes > 0)
    written(engine)
    assert len(kept(tmp_path)) == 1
    assert answer(started()) == (cold, True, 1)


def test_passes_of_one_turn_are_one_use(started, tmp_path):
    """A job whose questions take several passes asks about its state once."""
    engine = started(pass_questions=1)
    asked = {f"q{n}": QUESTIONS["q"] for n in range(3)}
    engine.decide([engine.prepare(STATES[0], asked)])
    written(engine)
    assert kept(tmp_path) == []
