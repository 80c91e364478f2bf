"""The streams of a device. What is sent has two of its own beside the current one, which computes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch


class Streams:
    """On the CPU, where the host computes, they are torch's stand-ins, which order nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __deepcopy__(self, memo: dict[int, Any]) -> Streams:
        return Streams(self._device)

    @cached_property
    def gather(self) -> Stream:
        return Stream(self._device)

    @cached_property
    def reduce(self) -> Stream:
        return Stream(self._device)


class Stream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def follow_compute(self) -> None:
        """What is given to this stream from now on starts once what was computed is over."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def current(self) -> AbstractContextManager[Any]:
        """What is given to the device meanwhile is given to this stream."""
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context
