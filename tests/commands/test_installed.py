"""The wheel with and without its extras: what a command lacks is told in a line that says what to install."""

import sys

import installed
import pytest

from d3serve.commands.demo import REQUEST

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links")
UP = ["up", "--port", "0", "--data-dir", "data", "--model", "demo-d3"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return installed.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def with_extras(wheel, tmp_path_factory):
    """Makes environments, each once."""
    made = {}

    def make(extras):
        if extras not in made:
            folder = tmp_path_factory.mktemp(extras or "base") / "venv"
            made[extras] = installed.install(wheel, folder, *filter(None, extras.split(",")))
        return made[extras]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "arguments", "advice"),
    [
        ("", UP, "embedded,worker"),
        ("", [*UP, "--redis-url", "redis://127.0.0.1:1"], "worker"),
        ("", ["demo"], "embedded,worker"),
        ("", ["worker", "--redis-url", "redis://127.0.0.1:1"], "worker"),
        ("", ["pull", "vllm-sr/d3-turbo"], "worker"),
        ("", ["check", "."], "worker"),
        ("embedded", UP, "worker"),
        ("worker", UP, "embedded"),
    ],
)
def test_a_command_that_lacks_an_extra_says_which(with_extras, tmp_path, extras, arguments, advice):
    done = installed.run(with_extras(extras), *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert line.endswith(f"pip install 'd3serve[{advice}]'")


@pytest.mark.slow
def test_all_that_is_wrong_is_said_at_once_a_line_each(with_extras, tmp_path):
    up = ["up", "--port", "0", "--data-dir", "data", "--model", "./none", "--device", "cuda"]
    done = installed.run(with_extras(""), *up, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    extras, model, device = done.stderr.splitlines()
    assert extras.endswith("pip install 'd3serve[embedded,gpu]'")
    assert "none is no folder" in model
    assert "device is cuda, but" in device


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["models"], ["new-key", "keys", "--tenant", "me"]],
    ids=lambda arguments: arguments[0],
)
def test_what_the_base_is_for_needs_no_extra(with_extras, tmp_path, arguments):
    done = installed.run(with_extras(""), *arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
def test_the_doctor_of_the_base_says_what_is_missing(with_extras, tmp_path):
    done = installed.run(with_extras(""), "doctor", "--port", "0", "--data-dir", "data", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'd3serve[embedded,worker]'" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_the_demo_of_a_wheel_needs_no_hub_and_no_clone(with_extras, tmp_path):
    done = installed.run(with_extras("worker,embedded"), "demo", "--data-dir", "data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in REQUEST["questions"])
    assert "network tools" in done.stdout
