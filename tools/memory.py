"""How many bytes are live: on CUDA from the caching allocator, on the CPU from tools/alloc_meter.c."""

import ctypes
from typing import Protocol

import torch


class Meter(Protocol):
    """Bytes in use by this process, on the device that trains."""

    def live_bytes(self) -> int | None:
        """Bytes live now; None when nothing counts them."""

    def peak_bytes(self) -> int | None:
        """Most bytes live at once since `reset_peak`; None when nothing counts them."""

    def reset_peak(self) -> None:
        """Start a new peak from the bytes live now."""


class HostMeter:
    """The preloaded counter: heap blocks of 16 KiB and more, all threads, other libraries' included."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._live, self._peak = library.meter_live_bytes, library.meter_peak_bytes
        self._live.restype = self._peak.restype = ctypes.c_long
        self._reset = library.meter_reset_peak

    def live_bytes(self) -> int:
        return self._live()

    def peak_bytes(self) -> int:
        return self._peak()

    def reset_peak(self) -> None:
        self._reset()


class CudaMeter:
    """Allocated (not reserved) bytes of torch's caching allocator on the current device."""

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class NoMeter:
    """Stands in when the counter was not preloaded."""

    def live_bytes(self) -> None:
        return None

    def peak_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        return None


def open_meter(device: torch.device) -> Meter:
    """The meter for `device`; one that answers None on a CPU without the preloaded counter."""
    if device.type == "cuda":
        return CudaMeter()
    library = ctypes.CDLL(None)
    return HostMeter(library) if hasattr(library, "meter_live_bytes") else NoMeter()
