"""Which worker of `d3serve up` gets what: its GPU by index or name, or its share of the cores."""

import os
import threading

import httpx
import pytest
from gpus import Driver

from d3serve.commands import preflight
from d3serve.errors import InvalidSettings
from d3serve.settings import Settings
from d3serve.up import crew, devices
from d3serve.up.local import _are_ready, running

TWO = ("NVIDIA H200", "NVIDIA H200")
PARTS = "MIG-7e1f, MIG-9c02,MIG-b5"


@pytest.fixture
def host(monkeypatch):
    """A host with these GPUs, and these of them shown."""

    def gpus(*names, visible=None, build="CUDA 13.0"):
        monkeypatch.setattr(devices, "_driver", lambda: Driver(*names))
        for module in (crew, preflight):
            monkeypatch.setattr(module, "torch_build", lambda: build)
        monkeypatch.delenv(crew.THREADS, raising=False)
        monkeypatch.delenv(devices.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(devices.VISIBLE, visible)

    return gpus


@pytest.mark.parametrize(
    ("names", "visible", "shown"),
    [
        (TWO, None, ["0", "1"]),
        (TWO, "5,3", ["5", "3"]),
        (TWO, " 5 , GPU-8c1d ", ["5", "GPU-8c1d"]),
        (TWO, "3,5,77,1", ["3", "5"]),  # there is no 77: the list ends before it
        (TWO[:1], PARTS, ["MIG-7e1f", "MIG-9c02", "MIG-b5"]),  # of which the driver shows one
    ],
)
def test_each_worker_gets_one_of_the_gpus_that_are_shown(host, names, visible, shown):
    host(*names, visible=visible)
    for workers in ("auto", len(shown)):
        crowd = crew.places(Settings(workers=workers))
        assert [place.env[devices.VISIBLE] for place in crowd] == shown
        assert {place.env["D3SERVE_DEVICE"] for place in crowd} == {"cuda"}


def test_fewer_workers_than_gpus_take_the_first_and_one_alone_the_host_as_it_is(host):
    host(*TWO, "NVIDIA L4", visible="4,5,6")
    assert [place.env[devices.VISIBLE] for place in crew.places(Settings(workers=2))] == ["4", "5"]
    assert [place.env for place in crew.places(Settings())] == [{}]
    host("NVIDIA L4")
    assert [place.env for place in crew.places(Settings(workers="auto"))] == [{}]


@pytest.mark.parametrize("names", [TWO, ()])
def test_more_workers_than_gpus_are_refused_by_name(host, names):
    host(*names)
    with pytest.raises(InvalidSettings, match=rf"workers is 3.* shows {len(names)} here") as refused:
        crew.places(Settings(workers=3, device="cuda"))
    assert refused.value.field == "workers"
    found = preflight.look(preflight.workers, Settings(workers=3, device="cuda"))
    assert (found.good, found.words) == (False, refused.value.message)


@pytest.mark.parametrize(("device", "build"), [("cpu", "CUDA 13.0"), (None, "cpu")])
def test_without_a_gpu_to_use_they_share_the_cores(host, monkeypatch, device, build):
    host(*TWO, build=build)
    monkeypatch.setattr(crew, "_cores", lambda: 7)
    assert [place.env for place in crew.places(Settings(workers="auto", device=device))] == [{}]
    crowd = crew.places(Settings(workers=3, device=device))
    assert [place.env for place in crowd] == [{crew.THREADS: "2"}] * 3
    assert {place.env[crew.THREADS] for place in crew.places(Settings(workers=9, device=device))} == {"1"}
    monkeypatch.setenv(crew.THREADS, "5")  # who says how knows better
    assert [place.env for place in crew.places(Settings(workers=3, device=device))] == [{}] * 3


def test_gpus_that_nobody_uses_are_noted(host):
    host(*TWO)
    words, good = preflight.workers(Settings())
    assert (good, "--workers auto" in words) == (None, True)
    assert preflight.workers(Settings(workers="auto")) == ("GPU 0; GPU 1", True)


@pytest.mark.parametrize("workers", ["0", "65", "-1", "two", "1.5", "²"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers):
    with pytest.raises(InvalidSettings, match="D3SERVE_WORKERS must be auto or a number from 1 to 64"):
        Settings.load(workers=workers)


def test_workers_start_beside_each_other_each_with_its_own_gpu(host, tmp_path, monkeypatch):
    """Real processes, and ready only once all of them are."""
    host(*TWO, visible="2,GPU-8c1d")
    monkeypatch.setattr(
        "d3serve.up.local.configure_logging", lambda *_, **__: None
    )  # the process is pytest's
    settings = Settings(model="fake:", workers="auto", data_dir=tmp_path, port=0)
    seen = {}

    def look():
        with running(settings) as (tree, url):
            seen["workers"] = httpx.get(f"{url}/readyz", trust_env=False).json()["workers"]
            for name, child in tree._children.items():
                with open(f"/proc/{child.pid}/environ", "rb") as file:
                    pairs = dict(line.partition("=")[::2] for line in file.read().decode().split("\0"))
                seen[name] = pairs.get(devices.VISIBLE)

    assert threading.current_thread() is threading.main_thread(), "signals are taken there"
    look()
    assert os.environ[devices.VISIBLE] == "2,GPU-8c1d"
    assert (seen["worker 1"], seen["worker 2"], seen["workers"]) == ("2", "GPU-8c1d", 2)


@pytest.mark.parametrize(
    ("status", "loaded", "ready"), [(200, 2, True), (200, 3, True), (200, 1, False), (503, 2, False)]
)
def test_up_is_ready_once_all_of_its_workers_are(status, loaded, ready):
    answer = httpx.Response(status, json={"workers": loaded})
    with httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as probe:
        assert _are_ready(2, probe, "http://up") is ready
