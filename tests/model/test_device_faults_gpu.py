"""A GPU that really died, noticed by four libraries: each time a DeviceError, and never for a fault of our own.

Each case has a process of its own, since nothing can be done with the device afterwards.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys
import torch, triton, triton.language as tl
from d3serve.errors import DeviceError
from d3serve.model.backbone import Backbone
from d3serve.model.engine import DecisionEngine
from d3serve.schemas.questions import NoulQuestion

engine = DecisionEngine.load(sys.argv[1], device="cuda", state_cache_host_bytes=2**26)
job = engine.prepare("a parcel", {"q": NoulQuestion(type="noul")})
engine.decide([job])
forward = Backbone.forward
x = torch.ones(64, 64, device="cuda")


@triton.jit
def write(pointer, offset):
    tl.store(pointer + offset, 1.0)


def stray():
    write[(1,)](x, 2**44)


def assertion(*_):
    x[torch.tensor([10**9], device="cuda")]


def then(call):
    def broken(*_):
        stray()
        try:
            torch.cuda.synchronize()
        except Exception:
            pass
        return call()
    return broken


FAULTS = {
    "torch": assertion,
    "triton": then(stray),
    "cublas": then(lambda: x @ x),
    "healthy": lambda *_: (_ for _ in ()).throw(RuntimeError("a fault of our own")),
}
case = sys.argv[2]
if case == "copy":
    assert engine.cache.clear() and engine.cached_state_keys()
    then(lambda: None)()
else:
    engine.cache.forget(job.state_key)
    Backbone.forward = Backbone.steps = FAULTS[case]
    engine._graphs = None
try:
    engine.decide([job])
except Exception as error:
    print("found", type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("case", ["torch", "triton", "cublas", "copy", "healthy"])
def test_a_dead_device_is_a_device_error_whoever_notices_it(tiny_checkpoint, tmp_path, case):
    script = tmp_path / "fault.py"  # Triton reads a kernel's source from a file
    script.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(script), str(tiny_checkpoint), case],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    expected = "RuntimeError" if case == "healthy" else "DeviceError"
    assert f"found {expected}" in run.stdout, run.stderr[-2000:]
