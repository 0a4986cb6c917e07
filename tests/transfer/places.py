"""Where a rank's pool lies in a test: one test body runs on each of these, through the fixture `place`.

host       host memory
emulated   VRAM that is host memory and says so (`emulated_vram` on the card): one arena, of kind DRAM
stand-in   host memory that passes for a GPU's, with the fake agent: arenas of both kinds, device memory is read
           through the agent, and copies run later, in order, as a stream's
gpu        torch's CUDA memory over real NIXL; only where there is a GPU
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pdtransfer.contract.base import MemoryKind
from pdtransfer.plan.cost import DEVICE_COPY
from pdtransfer.plan.rows import RowCopy
from pdtransfer.session import calibrate, endpoint
from pdtransfer.staging import arena, copier


class DeviceArray:
    """An array of pages in a GPU's memory, seen as numpy through copies."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        import torch

        self.torch, self.dtype, self.page = torch, np.dtype(dtype), shape[1:]
        size = int(np.prod(self.page)) * self.dtype.itemsize
        self.rows = torch.zeros((shape[0], size), dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> np.ndarray:
        found = self.rows[at].cpu().numpy()
        return found.view(self.dtype).reshape(*found.shape[:-1], *self.page)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:]

    def __setitem__(self, at: int, value: Any) -> None:
        page = np.array(np.broadcast_to(value, self.page), dtype=self.dtype)
        self.rows[at] = self.torch.from_numpy(page.reshape(-1).view(np.uint8)).to(self.rows.device)
        self.torch.cuda.synchronize()


def address_of(array: np.ndarray | DeviceArray) -> int:
    return array.rows.data_ptr() if isinstance(array, DeviceArray) else int(array.ctypes.data)


@dataclass(frozen=True)
class Place:
    """`memory`: the kind of regions that a test says nothing of. `emulated`: VRAM is labelled so."""

    name: str
    memory: str = "VRAM"
    emulated: bool = False
    gpu: bool = False

    def array(self, shape: tuple[int, ...], dtype: Any, memory: str) -> Any:
        return DeviceArray(shape, dtype) if self.gpu and memory == "VRAM" else np.zeros(shape, dtype=dtype)


HOST = Place("host", "DRAM")
EMULATED = Place("emulated", emulated=True)
STAND_IN = Place("stand-in")
GPU = Place("gpu", gpu=True)
ON_GPU = pytest.param(GPU, id="gpu", marks=[pytest.mark.gpu, pytest.mark.nixl])
DEVICES = [pytest.param(EMULATED, id="emulated"), pytest.param(STAND_IN, id="stand-in"), ON_GPU]
"""Places with device memory, for tests that mix the two kinds."""
PLACES = [pytest.param(HOST, id="host"), pytest.param(STAND_IN, id="stand-in"), ON_GPU]


def place_of(memory: str) -> tuple[Place, str]:
    """Of a rank process' argument: `gpu:VRAM`, `gpu:mixed`, or a kind that is emulated where it is VRAM."""
    where, _, kind = memory.rpartition(":")
    return (GPU if where == "gpu" else HOST if kind == "DRAM" else EMULATED), kind


class Stream:
    """A device's queue of copies: each runs, in order, at a later look at any fence, and is done two looks after."""

    def __init__(self) -> None:
        self._queued: deque[Callable[[], None]] = deque()

    def add(self, copy: Callable[[], None]) -> LateFence:
        fence = LateFence(self)
        self._queued.append(lambda: (copy(), fence.ran.set()))
        return fence

    def look(self) -> None:
        if self._queued:
            self._queued.popleft()()


class LateFence:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.ran, self._left = stream, threading.Event(), 3

    def done(self) -> bool:
        self.stream.look()
        self._left -= self.ran.is_set()
        return self._left <= 0


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let host memory pass for a device's."""
    run = copier.Copier._run
    streams: dict[int, Stream] = {}

    def late(self: copier.Copier, copies: Sequence[RowCopy], slot: int, scatter: bool) -> copier.Fence:
        if self._arena.kind is MemoryKind.DRAM:
            return run(self, copies, slot, scatter)

        def copy() -> None:
            for one in copies:
                self._on_host(one, slot, scatter)

        return streams.setdefault(id(self), Stream()).add(copy)

    def bytes_at(self: copier.Copier, address: int, nbytes: int) -> Any:
        return self._torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=self._torch.uint8)

    def read(self: copier.Copier, slot: int, nbytes: int) -> np.ndarray:
        start = slot * self._arena.slot_bytes
        return np.asarray(self._slots[start : start + nbytes].numpy(), dtype=np.uint8)

    monkeypatch.setattr(arena, "_device_memory", lambda nbytes, device: arena._host_memory(nbytes))
    monkeypatch.setattr(copier.Copier, "_run", late)
    monkeypatch.setattr(copier.Copier, "_bytes_at", bytes_at)
    monkeypatch.setattr(copier.Copier, "read", read)
    monkeypatch.setattr(endpoint, "use_device", lambda device: None)
    monkeypatch.setitem(calibrate._known, (MemoryKind.VRAM, 0), DEVICE_COPY)
