"""Memory for staging: slots back to back, of one memory kind, touched once so that no transfer pays for it.

Host memory is private and anonymous, on huge pages where the kernel gives them (scatter is 10-27 %
faster, and a slot is 1 entry of the TLB instead of 512). Device memory comes from torch's allocator.
Emulated VRAM is host memory: its arena is one of kind DRAM, as its registration with NIXL is.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from contextlib import suppress
from typing import Any

import numpy as np

from pdtransfer.agent.port import Descriptors
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import StagingArena
from pdtransfer.errors import TransferError

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
"""Bytes; also the alignment of every arena."""


class Arena:
    """`nbytes` (rounded down to whole slots of `slot_bytes`) of memory of a real kind. Raises TransferError
    when there is not so much. Any thread may make it."""

    def __init__(self, kind: MemoryKind, nbytes: int, slot_bytes: int, *, device: int = 0) -> None:
        if slot_bytes <= 0 or nbytes < slot_bytes:
            raise ValueError(f"{nbytes} bytes of staging memory hold no slot of {slot_bytes} bytes")
        self.kind = kind
        self.device = device if kind is MemoryKind.VRAM else 0
        self.slot_bytes = slot_bytes
        self.slots = nbytes // slot_bytes
        self.nbytes = self.slots * slot_bytes
        self._held: Any
        try:
            if kind is MemoryKind.VRAM:
                self._held, start = _device_memory(self.nbytes + HUGE_PAGE, device)
            else:
                self._held, start = _host_memory(self.nbytes + HUGE_PAGE)
        except (AssertionError, ImportError, OSError, RuntimeError) as error:  # torch without CUDA asserts
            raise TransferError(f"no {self.nbytes} bytes of {kind} for staging: {error}") from error
        self.address = start + -start % HUGE_PAGE
        if kind is MemoryKind.DRAM:
            ctypes.memset(self.address, 0, self.nbytes)  # every page is there before the first transfer

    @property
    def descriptors(self) -> Descriptors:
        """(1, 3): what to register with the agent, as `kind`."""
        return np.array([[self.address, self.nbytes, self.device]], dtype=np.uint64)

    @property
    def told(self) -> StagingArena:
        """What the rank's card says of it."""
        return StagingArena(
            memory=self.kind,
            device=self.device,
            address=self.address,
            slot_bytes=self.slot_bytes,
            slots=self.slots,
        )

    def close(self) -> None:
        """Give the memory back. Only after the agent is destroyed: a late write over TCP to memory that
        is gone ends the process."""
        held, self._held = self._held, None
        if isinstance(held, mmap.mmap):
            with suppress(BufferError):  # a view is left: the memory goes with it
                held.close()


def _host_memory(nbytes: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError) as error:
        logger.info("staging memory gets no huge pages: %s", error)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _device_memory(nbytes: int, device: int) -> tuple[Any, int]:
    import torch  # only a rank with device memory needs it here

    memory = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    return memory, memory.data_ptr()
