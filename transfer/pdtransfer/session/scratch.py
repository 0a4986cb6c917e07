"""Registered host memory that probes read into and write to, in slots."""

from __future__ import annotations

from collections import deque

import numpy as np

from pdtransfer.agent.port import Descriptors

BLOCK = 1 << 20
"""Bytes of one scratch slot, and of a probe's random block."""
SLOTS = 16


class Scratch:
    """Registered host memory in slots of BLOCK bytes. A slot with a write in flight never returns."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.memory = np.zeros(slots * BLOCK, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self._free = deque(range(slots))

    @property
    def descriptors(self) -> Descriptors:
        """For registration."""
        return np.array([[self.address, self.memory.nbytes, 0]], dtype=np.uint64)

    def take(self) -> int | None:
        """Address of a free slot, or None."""
        return self.address + self._free.popleft() * BLOCK if self._free else None

    def give(self, address: int) -> None:
        """Return a slot; it rests as long as possible before it is used again."""
        self._free.append((address - self.address) // BLOCK)

    def read(self, address: int, size: int) -> bytes:
        """Bytes of a slot."""
        at = address - self.address
        return self.memory[at : at + size].tobytes()

    def write(self, address: int, data: bytes) -> None:
        """Fill a slot."""
        at = address - self.address
        self.memory[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
