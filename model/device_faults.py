"""Whether an error is the device's end, whichever library noticed it first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d3serve.errors import DeviceError


@contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Turn whatever the block raises into DeviceError if the device does not answer afterwards.

    After an illegal access every call fails, and torch, Triton, cuBLAS and a copy each say so in a way of their
    own, some of them only at a later call. So the device is asked, and not the exception.

    Raises:
        DeviceError: this process can do nothing more with the device.
    """
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        if answers(device):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"the accelerator failed: {reason}") from error


def answers(device: torch.device) -> bool:
    """Whether the device still does a tiny piece of work and waits for all that it was given before."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).add(1).item() == 2)
    except torch.OutOfMemoryError:
        return True  # full is not dead
    except Exception:  # whatever the libraries raise
        return False
