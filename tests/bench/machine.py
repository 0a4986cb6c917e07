"""The machine itself: how long a copy in memory takes, and what it is."""

from __future__ import annotations

import os
import platform
import time

import numpy as np
from shape import MIB

from pdtransfer.staging import copier

BUFFER = 256 * MIB


class Memcpy:
    """Copies of one thread between two buffers of 256 MiB, larger than any cache."""

    def __init__(self) -> None:
        self._source = np.ones(BUFFER, dtype=np.uint8)
        self._target = np.zeros(BUFFER, dtype=np.uint8)
        self._at = 0

    def seconds(self, nbytes: int) -> float:
        """For `nbytes`, from another place each time."""
        began = time.perf_counter()
        left = nbytes
        while left > 0:
            size = min(left, BUFFER)
            self._at = 0 if self._at + size > BUFFER else self._at
            np.copyto(self._target[self._at : self._at + size], self._source[self._at : self._at + size])
            self._at += size
            left -= size
        return time.perf_counter() - began


def facts() -> dict[str, object]:
    """For the report."""
    with open("/proc/cpuinfo") as lines:  # noqa: PTH123
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiled_copies": getattr(copier, "_rows", None) is not None,
        "load": [round(x, 2) for x in os.getloadavg()],
    }
