"""What the command line hands to the processes that it starts."""

import contextlib
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from d3serve.api import main as api_main
from d3serve.commands import start
from d3serve.errors import StartupError
from d3serve.settings import Settings
from d3serve.up.local import shared_state_dir
from d3serve.up.supervisor import ProcessTree, bind, listening


def test_the_api_serves_an_inherited_descriptor_as_the_tcp_socket_that_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken for a unix socket it would go without TCP_NODELAY, and each keep-alive answer would wait 40 ms."""
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda _self, sockets=None: served.extend(sockets or []))
    monkeypatch.setattr(api_main, "configure_logging", lambda _settings: None)
    for told in ("freeze", "set_threshold"):
        monkeypatch.setattr(gc, told, lambda *_: None)  # the process is pytest's
    monkeypatch.setattr(start, "leave_start_folder", lambda: None)
    with bind("127.0.0.1", 0) as listener:
        start.api(redis_url="redis://127.0.0.1:1", fd=listener.detach())
    with served[0] as inherited:
        assert inherited.family == socket.AF_INET


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux deals connections out")
def test_connections_opened_at_once_are_dealt_out_among_processes() -> None:
    with listening("127.0.0.1", 0, 2) as listeners, contextlib.ExitStack() as stack:
        address = listeners[0].getsockname()
        assert listeners[1].getsockname() == address
        for _ in range(64):
            stack.enter_context(socket.create_connection(address))
        for listener in listeners:
            listener.setblocking(False)
            taken = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    stack.enter_context(listener.accept()[0])
                    taken += 1
            assert 12 < taken < 52  # 64 throws of a coin: outside once in a million runs


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_another_service_shares_among_its_processes_is_taken(processes: int) -> None:
    with (
        listening("127.0.0.1", 0, 2) as theirs,
        pytest.raises(StartupError, match="cannot listen"),
        listening("127.0.0.1", theirs[0].getsockname()[1], processes),
    ):
        pytest.fail("two services would share the port, and their clients")


def test_a_child_imports_nothing_from_the_folder_that_its_parent_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "d3serve.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    tree = ProcessTree()
    tree.start("child", ["--help"], {})
    try:
        with pytest.raises(StartupError, match="exit code 2"):  # --help with a flag that it does not know
            tree.wait_until(lambda: False, 60, "nothing")
    finally:
        tree.stop()
    assert not (tmp_path / "ran").exists()


def test_states_are_files_only_where_everybody_who_needs_them_is_on_this_host(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    assert shared_state_dir(Settings(data_dir=tmp_path)) == tmp_path / "states"
    assert shared_state_dir(Settings(data_dir=tmp_path, redis_url="redis://elsewhere")) is None
    assert shared_state_dir(Settings(redis_url="redis://elsewhere", state_dir=asked)) == asked
