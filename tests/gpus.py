"""A stand-in for NVIDIA's driver, for hosts without a GPU."""

import ctypes


class Driver:
    """As much of NVIDIA's library as is called."""

    def __init__(self, *names, code=0):
        self.names, self.code = names, code

    def cuInit(self, _):  # noqa: N802 - its name
        return self.code

    def cuDeviceGetCount(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = len(self.names)

    def cuDeviceGet(self, device, number):  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = number

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = self.names[device.value].encode()[: size - 1]

    def cuDriverGetVersion(self, version):  # noqa: N802
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 13010
