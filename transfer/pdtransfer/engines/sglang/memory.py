"""In which memory a pointer of SGLang's pools lies. SGLang tells kinds to its own NIXL backend only.

Asked of the driver, pointer by pointer: a decode rank with HiSparse has its KV in host memory and its index on the
device, and KVArgs says neither. Host memory that the driver has pinned is host memory all the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pdtransfer.contract.base import MemoryKind

_MEMORY_TYPE = 2
"""CU_POINTER_ATTRIBUTE_MEMORY_TYPE of cuda.h."""
_DEVICE = 2
"""CU_MEMORYTYPE_DEVICE. 1 is host, 4 unified: pages that may be anywhere, which NIXL takes as VRAM."""
_UNIFIED = 4

KindOf = Callable[[int], MemoryKind]


def host_only(address: int) -> MemoryKind:
    """Where there is no device, everything is host memory."""
    return MemoryKind.DRAM


def emulated(address: int) -> MemoryKind:
    """Host memory that is called device memory (labelled on cards and in logs)."""
    return MemoryKind.VRAM


def driver_kind(driver: ctypes.CDLL) -> KindOf:
    """Ask this CUDA driver. A pointer it does not know is host memory."""

    def kind(address: int) -> MemoryKind:
        answer = ctypes.c_uint(0)
        code = driver.cuPointerGetAttribute(ctypes.byref(answer), _MEMORY_TYPE, ctypes.c_uint64(address))
        return MemoryKind.VRAM if code == 0 and answer.value in (_DEVICE, _UNIFIED) else MemoryKind.DRAM

    return kind


def pointer_kinds(device: str, emulate: bool) -> KindOf:
    """How to tell kinds for an engine that runs on `device` (SGLang's word for it).

    Raises OSError when it runs on a GPU and the driver can not be asked: a wrong kind ends in NIXL's own refusal
    or, worse, in a crash."""
    if device == "cpu":
        return emulated if emulate else host_only
    return driver_kind(ctypes.CDLL("libcuda.so.1"))
