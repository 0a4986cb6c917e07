"""Pack rows of the KV pool into a slot, and scatter a slot into rows of the pool: torch on the memory's own device.

Both are one pass over the bytes: each byte is read once and written once. Memory is viewed where it
lies, by address; rows as the widest element that fits (16 bytes: `index_copy_` works element by element,
and is 4 times as fast as on single bytes). On the host a call is done when it returns and starts no threads
of torch's; on a GPU it is queued on a stream of low priority, and its fence tells when it is done.

Host memory, GB/s of one thread on 1 KiB rows of random 16-token pages and 2 MiB slots, without / with huge
pages (thread time on a busy 2-core machine, medians of 7): pack with index_select 4.8 / 5.5, scatter with
index_copy_ 4.9 / 6.1; numpy's take and put are within 15 % of them. The optional compiled `_rows` packs at
6.0 / 7.3 and scatters at 11.1 / 20.4, because it writes past the cache; it is used where it was built.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import TransferError
from pdtransfer.plan.rows import RowCopy, RowGroup
from pdtransfer.staging.arena import Arena

if TYPE_CHECKING:
    from torch import Tensor

_rows: ModuleType | None
try:
    from pdtransfer.staging import _rows
except ImportError:  # setup found no compiler
    _rows = None

PART = 16
"""Bytes that the compiled copies work in; rows of other sizes or addresses are torch's."""
SHORT_ROW = 2048
"""Bytes; longer rows torch packs as fast as the compiled code."""
SERIAL = 1 << 15
"""Elements of one call: torch shares larger ones out to threads (its GRAIN_SIZE), which gains nothing
here and takes cores from the engine; torch's own setting would hold for the whole process."""
VIEWS = 4096
"""Pool views kept; one serves every request of a pair."""

WARM_DEADLINE = 60.0
"""Seconds; a GPU's context and kernels are loaded in it."""


class Fence(Protocol):
    """When the bytes of a copy are in place."""

    def done(self) -> bool:
        """Never blocks; raises TransferError when the device failed."""


class _Done:
    def done(self) -> bool:
        return True


DONE: Fence = _Done()


class _Event:
    """A CUDA event, and what must live until it is reached."""

    def __init__(self, event: Any, keep: object) -> None:
        self._event = event
        self._keep = keep

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise TransferError(f"the device failed while it copied: {error}") from error


class Copier:
    """Copies between one arena and pool memory of the same kind and device. One thread uses it."""

    def __init__(self, arena: Arena, compiled: ModuleType | None = _rows) -> None:
        self._arena = arena
        self._compiled = compiled if arena.kind is MemoryKind.DRAM else None
        self._views: dict[tuple[RowGroup, int], Tensor] = {}

    def warm(self) -> None:
        """Pay now for what the first copy would: the import, kernels, the stream. Raises TransferError
        when torch or the device can not be used. The arena must not be in use yet."""
        try:
            first = self._arena.slot_bytes // 2 // 16  # the second half of slot 0 into the first half
            if not first:
                return
            group = RowGroup(self._arena.address, self._arena.device, 16, 2 * first)
            copy = RowCopy(group, np.arange(first, 2 * first, dtype=np.int64), 0, first)
            until = time.monotonic() + WARM_DEADLINE
            _ = self._torch  # also where compiled copies do most: what they leave must not import it in a request
            for fence in (self.pack([copy], 0), self.scatter(0, [copy])):
                while not fence.done():
                    if time.monotonic() > until:
                        raise TransferError(f"a first copy took over {WARM_DEADLINE:.0f} s")
                    time.sleep(0.001)
        except (AssertionError, ImportError, RuntimeError) as error:  # torch without CUDA asserts
            raise TransferError(f"{self._arena.kind} can not be staged: {error}") from error

    def pack(self, copies: Sequence[RowCopy], slot: int) -> Fence:
        """Copy rows of the pool into a slot. The rows' bytes must be there (their ready event is set), and
        the slot must not be read or written by anyone else before the fence is done."""
        return self._run(copies, slot, False)

    def scatter(self, slot: int, copies: Sequence[RowCopy]) -> Fence:
        """Copy a slot into rows of the pool. No row may be named twice."""
        return self._run(copies, slot, True)

    def read(self, slot: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of a slot: on the host a view, of a device a copy that is waited for."""
        start = slot * self._arena.slot_bytes
        found = self._slots[start : start + nbytes]
        if self._arena.kind is MemoryKind.VRAM:
            with self._torch.cuda.stream(self._stream):  # after what was packed
                found = found.cpu()
        return np.asarray(found.numpy(), dtype=np.uint8)

    def _run(self, copies: Sequence[RowCopy], slot: int, scatter: bool) -> Fence:
        if self._arena.kind is MemoryKind.DRAM:
            for copy in copies:
                self._on_host(copy, slot, scatter)
            return DONE
        cuda = self._torch.cuda
        try:
            with cuda.stream(self._stream):
                ready = [self._queued(copy, slot) for copy in copies]  # nothing is queued when one is refused
                for rows, indices, mine in ready:
                    self._copy(rows, indices, mine, scatter)
                event = cuda.Event()
                event.record()
        except RuntimeError as error:
            raise TransferError(f"the device refused a copy: {error}") from error
        return _Event(event, ready)

    def _queued(self, copy: RowCopy, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a device's copy takes: the pool's rows, which of them, the slot's."""
        if copy.count and not 0 <= int(copy.indices.min()) <= int(copy.indices.max()) < copy.group.rows:
            raise IndexError(f"a row that is none of {copy.group.rows}")  # would end the GPU's context
        rows, mine = self._matrices(copy, slot)
        # From pinned memory: to send pageable memory this thread would wait for the copies queued before.
        pinned = self._torch.from_numpy(copy.indices).pin_memory()
        return rows, pinned.to(rows.device, non_blocking=True), mine

    def _on_host(self, copy: RowCopy, slot: int, scatter: bool) -> None:
        group = copy.group
        parts = group.address % PART == 0 and group.row_bytes % PART == 0
        if self._compiled is not None and parts and (scatter or group.row_bytes <= SHORT_ROW):
            call = self._compiled.scatter if scatter else self._compiled.pack
            start, _ = self._within(copy, slot)
            call(group.address, group.rows, group.row_bytes, copy.indices, self._arena.address + start)
            return
        rows, mine = self._matrices(copy, slot)
        indices = self._torch.from_numpy(copy.indices)
        step = max(1, SERIAL // max(1, rows.shape[1]))
        for first in range(0, copy.count, step):
            self._copy(rows, indices[first : first + step], mine[first : first + step], scatter)

    def _copy(self, rows: Tensor, indices: Tensor, slot: Tensor, scatter: bool) -> None:
        if scatter:
            rows.index_copy_(0, indices, slot)
        else:
            self._torch.index_select(rows, 0, indices, out=slot)

    def _within(self, copy: RowCopy, slot: int) -> tuple[int, int]:
        """Where in the arena the copy's rows lie: first byte, bytes."""
        row, arena = copy.group.row_bytes, self._arena
        if copy.indices.dtype != np.int64 or copy.indices.shape != (copy.count,):
            raise ValueError(f"{copy.indices.shape} indices of type {copy.indices.dtype} for {copy.count} rows")
        if not 0 <= slot < arena.slots or copy.first < 0 or (copy.first + copy.count) * row > arena.slot_bytes:
            raise ValueError(f"rows {copy.first}+{copy.count} of {row} bytes are not within slot {slot}")
        return slot * arena.slot_bytes + copy.first * row, copy.count * row

    def _matrices(self, copy: RowCopy, slot: int) -> tuple[Tensor, Tensor]:
        """The pool's rows and the slot's, both as (rows, elements) of the same element type."""
        row = copy.group.row_bytes
        start, nbytes = self._within(copy, slot)
        width = math.gcd(16, copy.group.address, row, start)
        rows = self._views.get((copy.group, width))
        if rows is None:
            if len(self._views) >= VIEWS:
                self._views.clear()
            flat = self._bytes_at(copy.group.address, copy.group.rows * row)
            rows = flat.view(self._elements[width]).view(copy.group.rows, -1)
            self._views[copy.group, width] = rows
        mine = self._slots[start : start + nbytes].view(self._elements[width]).view(copy.count, -1)
        return rows, mine

    def _bytes_at(self, address: int, nbytes: int) -> Tensor:
        if self._arena.kind is MemoryKind.DRAM:
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            found: Tensor = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        else:
            found = self._torch.as_tensor(_DeviceMemory(address, nbytes), device=f"cuda:{self._arena.device}")
            if found.data_ptr() != address:  # torch brings memory of another GPU here, as a copy
                raise TransferError(f"the memory at {address} is not on device {self._arena.device}")
        return found

    @cached_property
    def _torch(self) -> Any:
        import torch  # takes seconds, and only a rank that stages needs it

        return torch

    @cached_property
    def _elements(self) -> dict[int, Any]:
        """By bytes: types whose values torch copies bit by bit."""
        torch = self._torch
        return {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

    @cached_property
    def _slots(self) -> Tensor:
        return self._bytes_at(self._arena.address, self._arena.nbytes)

    @cached_property
    def _stream(self) -> Any:
        return self._torch.cuda.Stream(self._arena.device, priority=0)  # 0 is CUDA's lowest


class _DeviceMemory:
    """Device memory by address, as torch takes it without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
