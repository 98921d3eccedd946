"""`d3serve doctor`, and what its checks look at: folders, disk, driver, torch, port and broker."""

import socket
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
from answering import answering
from gpus import Driver
from huggingface_hub import constants
from typer.testing import CliRunner

from d3serve.commands import doctor, preflight
from d3serve.commands.main import app
from d3serve.errors import InvalidSettings, StartupError
from d3serve.settings import Settings
from d3serve.up import devices


def run(*arguments, **env):
    return CliRunner().invoke(
        app, ["doctor", *arguments], env={"COLUMNS": "300"} | env, catch_exceptions=False
    )


def row(output, name):
    [line] = [line for line in output.splitlines() if line.split()[:1] == [name]]
    return line


def test_all_is_well_and_the_versions_are_told(tmp_path):
    done = run("--model", "demo-d3", "--device", "cpu", "--port", "0", "--data-dir", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    assert "fails" not in done.output
    for name in (
        "settings",
        "packages",
        "model",
        "device",
        "folders",
        "disk",
        "webhooks",
        "broker",
        "keys",
        "address",
    ):
        assert row(done.output, name).split()[1] == "ok"
    for name in ("d3serve", "Python", "torch", "triton", "transformers", "NVIDIA"):
        assert row(done.output, name)
    assert not (tmp_path / "new").exists(), "it looks, and makes nothing"


def test_whatever_fails_is_a_row_and_the_exit_code(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("--model", str(tmp_path), "--port", port, "--redis-url", "redis://127.0.0.1:1")
    assert done.exit_code == 1
    failed = [line.split()[0] for line in done.output.splitlines() if line.split()[1] == "fails"]
    assert failed == ["model", "broker", "address"]


def test_a_setting_that_is_refused_is_a_row_too():
    done = run(D3SERVE_LANES="interactive")
    assert done.exit_code == 1
    assert "D3SERVE_LANES must be a JSON list" in row(done.output, "settings")


def test_a_service_that_runs_is_no_fault(service_url, redis_url):
    port = service_url.rpartition(":")[2]
    done = run("--model", "demo-d3", "--device", "cpu", "--port", port, "--redis-url", redis_url)
    assert done.exit_code == 0, done.output
    assert f"d3serve answers on 127.0.0.1:{port}" in row(done.output, "address")


@pytest.fixture
def service_url():
    """Something that answers as an API process does when it is asked whether it lives."""
    with answering("/healthz", {"X-Request-Id": "1"}) as url:
        yield url


def test_the_checks_before_a_start_are_done_in_a_moment(tmp_path):
    settings = Settings(model="demo-d3", data_dir=tmp_path)
    preflight.preflight(settings, preflight.CHECKS)  # modules are imported once
    began = time.process_time()
    preflight.preflight(settings, preflight.CHECKS)
    assert time.process_time() - began < 2


def test_folders_that_cannot_be_written_to_are_named(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StartupError, match=f"{file} is no folder"):
        preflight.folders(Settings(data_dir=file / "data"))
    monkeypatch.setattr(preflight.os, "access", lambda path, _: path != tmp_path)
    for settings in (
        Settings(data_dir=tmp_path / "a" / "b"),
        Settings(redis_url="redis://x", state_dir=tmp_path / "c"),
    ):
        with pytest.raises(StartupError, match=f"cannot write to {tmp_path}"):
            preflight.folders(settings)
    preflight.folders(Settings(redis_url="redis://x", data_dir=tmp_path / "unused"))


def test_a_disk_that_is_nearly_full_is_told(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(200 * 2**20))
    with pytest.raises(StartupError, match=r"200 MiB are free for .* at least 256"):
        preflight.disk(Settings(data_dir=tmp_path))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage(preflight.LEAST_FREE_BYTES))
    assert preflight.disk(Settings(data_dir=tmp_path)).good


def test_a_model_of_the_hub_is_in_the_cache_or_yet_to_come(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    settings = Settings(model="vllm-sr/d3-turbo")
    words, good = preflight.model(settings)
    assert ("to be downloaded, up to 72 GiB" in words, good) == (True, None)
    snapshot = tmp_path / "models--vllm-sr--d3-turbo" / "snapshots" / "689b3af1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    assert preflight.model(settings) == (f"vllm-sr/d3-turbo, in {tmp_path}", True)


@pytest.mark.parametrize(
    ("line", "build"),
    [
        ("cuda: Optional[str] = None", "cpu"),
        ("cuda: Optional[str] = '13.0'", "CUDA 13.0"),
        ("cuda = '12.8'", "CUDA 12.8"),
        ("", "unknown"),
    ],
)
def test_what_torch_is_built_for_is_read_without_it(tmp_path, monkeypatch, line, build):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("d3serve.up.devices.find_spec", lambda _: found)
    assert devices.torch_build() == build


@pytest.mark.parametrize(
    ("driver", "build", "asked", "expected"),
    [
        (Driver("NVIDIA H200", "NVIDIA L4"), "CUDA 13.0", None, "cuda: NVIDIA H200, NVIDIA L4"),
        (Driver("NVIDIA H200"), "CUDA 13.0", "cuda", "cuda: NVIDIA H200"),
        (Driver("NVIDIA H200"), "CUDA 13.0", "cpu", "cpu"),
        (Driver("NVIDIA H200"), "cpu", None, "NVIDIA H200 stays idle"),
        (Driver("NVIDIA H200"), "cpu", "cuda", InvalidSettings("this torch is built for CPUs")),
        (Driver(), "CUDA 13.0", "cuda", InvalidSettings("sees no GPU")),
        (Driver(code=100), "CUDA 13.0", "cuda", InvalidSettings("sees no GPU")),
        (Driver(code=803), "CUDA 13.0", "cuda", InvalidSettings("restart the host")),
        (Driver(code=7), "CUDA 13.0", "cuda", InvalidSettings(r"CUDA error 7")),
        (Driver(code=803), "CUDA 13.0", None, "cpu (the driver's parts"),
    ],
)
def test_a_gpu_is_asked_of_the_driver(monkeypatch, driver, build, asked, expected):
    monkeypatch.setattr(devices, "_driver", lambda: driver)
    monkeypatch.setattr(preflight, "torch_build", lambda: build)
    settings = Settings(device=asked)
    if isinstance(expected, InvalidSettings):
        with pytest.raises(InvalidSettings, match=expected.message):
            preflight.device(settings)
    else:
        assert expected in preflight.device(settings).words


def test_the_driver_says_which_cuda_it_runs(monkeypatch):
    monkeypatch.setattr(devices, "_driver", Driver)
    assert devices.driver_cuda() == "13.1"
    monkeypatch.setattr(devices, "LIBRARIES", ("no-such-library.so",))
    monkeypatch.undo()
    monkeypatch.setattr(devices, "LIBRARIES", ("no-such-library.so",))
    assert doctor.versions()["NVIDIA driver"] == devices.NO_DRIVER
