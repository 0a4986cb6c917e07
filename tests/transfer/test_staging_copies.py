"""Pack and scatter against plain loops over bytes, on host memory and, where there is one, on a GPU."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import TransferError
from pdtransfer.plan.rows import RowCopy, RowGroup
from pdtransfer.staging import copier as copier_module
from pdtransfer.staging.arena import HUGE_PAGE, Arena
from pdtransfer.staging.copier import SERIAL, Copier, Fence

KINDS = [
    pytest.param(MemoryKind.DRAM, id="host"),
    pytest.param(MemoryKind.VRAM, id="gpu", marks=pytest.mark.gpu),
]
WAYS = [
    pytest.param((MemoryKind.DRAM, None), id="host"),
    pytest.param((MemoryKind.VRAM, None), id="gpu", marks=pytest.mark.gpu),
]
if copier_module._rows is not None:
    WAYS.append(pytest.param((MemoryKind.DRAM, copier_module._rows), id="compiled"))
POOL = 1 << 15
SLOT = 4096
SLOTS = 3
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Of a machine that stands still for a second nothing is said here."""


class Memory:
    """POOL bytes of a kind of memory, seen as numpy only by whole copies."""

    def __init__(self, kind: MemoryKind) -> None:
        self.tensor = torch.zeros(POOL, dtype=torch.uint8, device="cpu" if kind is MemoryKind.DRAM else "cuda:0")
        self.address = self.tensor.data_ptr()

    def set(self, values: np.ndarray) -> None:
        self.tensor.copy_(torch.from_numpy(values))
        if self.tensor.is_cuda:
            torch.cuda.synchronize()

    def get(self) -> np.ndarray:
        return self.tensor.cpu().numpy().copy()


class Staging:
    """A pool, an arena beside it, and the copier between them."""

    def __init__(self, kind: MemoryKind, compiled: ModuleType | None = None) -> None:
        self.pool = Memory(kind)
        self.arena = Arena(kind, SLOTS * SLOT, SLOT)
        self.copier = Copier(self.arena, compiled)
        self.copier.warm()

    def _slots(self) -> torch.Tensor:
        return self.copier._bytes_at(self.arena.address, self.arena.nbytes)

    def fill(self, values: np.ndarray) -> None:
        self._slots().copy_(torch.from_numpy(values))
        self._settle()

    def slots(self) -> np.ndarray:
        return self._slots().cpu().numpy().copy()

    def _settle(self) -> None:
        if self.arena.kind is MemoryKind.VRAM:
            torch.cuda.synchronize()


@pytest.fixture(scope="module", params=WAYS)
def staging(request) -> Iterator[Staging]:
    made = Staging(*request.param)
    yield made
    made.arena.close()


def finish(fence: Fence) -> None:
    until = time.monotonic() + 60
    while not fence.done():
        assert time.monotonic() < until


@st.composite
def copies(draw: Any) -> list[tuple[int, int, list[int], int]]:
    """Up to three copies of one slot: (offset of the matrix in the pool, bytes of a row, rows by number,
    first row in the slot). No byte of the pool or of the slot is in two of them."""
    parts = draw(st.integers(1, 3))
    share, place, made = POOL // parts // 64 * 64, 0, []
    for part in range(parts):
        row = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 128, 192, 512, 1024]))
        offset = part * share + draw(st.sampled_from([0, 1, 2, 4, 8, 16, 64]))
        rows = min((part + 1) * share - offset, 64 * row) // row
        first = math.ceil(place / row)
        room = SLOT // row - first
        if room <= 0:
            break
        chosen = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=min(room, rows, 20), unique=True))
        made.append((offset, row, chosen, first))
        place = (first + len(chosen)) * row
    return made


def row_copies(staging: Staging, made: list[tuple[int, int, list[int], int]]) -> list[RowCopy]:
    return [
        RowCopy(
            RowGroup(staging.pool.address + offset, 0, row, (POOL - offset) // row),
            np.array(numbers, dtype=np.int64),
            first,
            len(numbers),
        )
        for offset, row, numbers, first in made
    ]


def noise(seed: int, size: int) -> np.ndarray:
    """Random bytes, many of them parts of floating-point NaNs and negative zeros."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FF0000000000001, 0xFFF8000000000000, 0x8000000000000000, 0x7F8000017F800001], dtype=np.uint64)
    values = rng.integers(0, 1 << 63, size // 8, dtype=np.uint64)
    return np.where(rng.random(size // 8) < 0.5, values, rng.choice(odd, size // 8)).view(np.uint8)


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(made=copies(), slot=st.integers(0, SLOTS - 1), seed=st.integers(0, 99))
def test_pack_gathers_rows_and_touches_nothing_else(staging, made, slot, seed):
    pool, before = noise(seed, POOL), noise(seed + 1, SLOTS * SLOT)
    staging.pool.set(pool)
    staging.fill(before)
    finish(staging.copier.pack(row_copies(staging, made), slot))
    expected = before.copy()
    for offset, row, numbers, first in made:
        for i, number in enumerate(numbers):
            for byte in range(row):
                expected[slot * SLOT + (first + i) * row + byte] = pool[offset + number * row + byte]
    assert np.array_equal(staging.slots(), expected)
    assert np.array_equal(staging.pool.get(), pool)


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(made=copies(), slot=st.integers(0, SLOTS - 1), seed=st.integers(0, 99))
def test_scatter_places_rows_and_touches_nothing_else(staging, made, slot, seed):
    before, slots = noise(seed, POOL), noise(seed + 1, SLOTS * SLOT)
    staging.pool.set(before)
    staging.fill(slots)
    finish(staging.copier.scatter(slot, row_copies(staging, made)))
    expected = before.copy()
    for offset, row, numbers, first in made:
        for i, number in enumerate(numbers):
            for byte in range(row):
                expected[offset + number * row + byte] = slots[slot * SLOT + (first + i) * row + byte]
    assert np.array_equal(staging.pool.get(), expected)
    assert np.array_equal(staging.slots(), slots)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_larger_than_one_call_are_whole(kind):
    """More elements than torch would keep in one thread."""
    rows, row = 4 * SERIAL // 64 + 3, 1024
    arena = Arena(kind, rows * row, rows * row)
    copier = Copier(arena)
    pool = torch.arange(2 * rows * row // 4, dtype=torch.int32, device="cpu" if kind is MemoryKind.DRAM else "cuda")
    group = RowGroup(pool.data_ptr(), 0, row, 2 * rows)
    order = np.random.default_rng(3).permutation(2 * rows)[:rows].astype(np.int64)
    original = pool.cpu().numpy().copy().reshape(2 * rows, -1)
    finish(copier.pack([RowCopy(group, order, 0, rows)], 0))
    pool.zero_()
    if pool.is_cuda:
        torch.cuda.synchronize()
    finish(copier.scatter(0, [RowCopy(group, order, 0, rows)]))
    expected = np.zeros_like(original)
    expected[order] = original[order]
    assert np.array_equal(pool.cpu().numpy().reshape(2 * rows, -1), expected)
    arena.close()


THREADS = """
import os, numpy as np, torch
from pdtransfer.contract.base import MemoryKind
from pdtransfer.plan.rows import RowCopy, RowGroup
from pdtransfer.staging import copier as copier_module
from pdtransfer.staging.arena import Arena
from pdtransfer.staging.copier import Copier
torch.set_num_threads(4)
arena, pool = Arena(MemoryKind.DRAM, 4 << 20, 4 << 20), np.zeros(4 << 20, dtype=np.uint8)
copier, count = Copier(arena), lambda: len(os.listdir("/proc/self/task"))
copies = [RowCopy(RowGroup(pool.ctypes.data, 0, 1024, 4096), np.arange(4096), 0, 4096)]
before = count()
copier.pack(copies, 0), copier.scatter(0, copies)
after = count()
torch.index_select(torch.from_numpy(pool).view(4096, 1024), 0, torch.arange(4096))  # whole: shared out to threads
print(after - before, count() - after)
"""


def test_host_copies_start_no_threads():
    """The engine's cores are the engine's, whatever number of threads its torch may use."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, timeout=120)
    ours, theirs = map(int, done.stdout.split())
    assert ours == 0 and theirs > 0, done.stderr


def test_memory_between_the_regions_of_a_group_is_not_touched():
    """A group may span memory that is not mapped: here two pages with a hole of address space between."""
    page = mmap.PAGESIZE
    whole = mmap.mmap(-1, 3 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0  # any access ends the process
    ctypes.memset(start, 7, page)
    ctypes.memset(start + 2 * page, 9, page)
    arena = Arena(MemoryKind.DRAM, SLOT, SLOT)
    group = RowGroup(start, 0, 256, 3 * page // 256)
    rows = np.array([0, 2 * page // 256], dtype=np.int64)
    copier = Copier(arena)
    assert copier.pack([RowCopy(group, rows, 0, 2)], 0).done()
    assert ctypes.string_at(arena.address, 512) == b"\x07" * 256 + b"\x09" * 256
    assert copier.scatter(0, [RowCopy(group, rows + 1, 0, 2)]).done()
    assert libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 3) == 0
    arena.close()


@pytest.mark.parametrize(
    ("slot", "first", "count"), [(-1, 0, 1), (SLOTS, 0, 1), (0, 0, SLOT // 64 + 1), (1, SLOT // 64, 1), (1, -1, 1)]
)
def test_rows_beyond_the_slot_are_refused(staging, slot, first, count):
    group = RowGroup(staging.pool.address, 0, 64, POOL // 64)
    copy = RowCopy(group, np.arange(count, dtype=np.int64), first, count)
    before = staging.slots()
    with pytest.raises(ValueError, match="not within slot"):
        staging.copier.pack([copy], slot)
    assert np.array_equal(staging.slots(), before)


@pytest.mark.parametrize("indices", [np.arange(3), np.arange(2, dtype=np.int32), np.zeros((2, 1), dtype=np.int64)])
def test_indices_of_another_number_or_type_are_refused(staging, indices):
    copy = RowCopy(RowGroup(staging.pool.address, 0, 64, POOL // 64), indices, 0, 2)
    for call in (lambda: staging.copier.pack([copy], 0), lambda: staging.copier.scatter(0, [copy])):
        with pytest.raises(ValueError, match="indices of type"):
            call()


def test_the_first_bytes_of_a_slot_can_be_read(staging):
    values = noise(5, SLOTS * SLOT)
    staging.fill(values)
    assert np.array_equal(staging.copier.read(1, 100), values[SLOT : SLOT + 100])
    assert len(staging.copier.read(2, 0)) == 0


@pytest.mark.parametrize("number", [POOL // 64, -1, -(1 << 62), 1 << 62])
def test_a_row_that_the_pool_does_not_have_is_refused(staging, number):
    group = RowGroup(staging.pool.address, 0, 64, POOL // 64)
    with pytest.raises(IndexError):
        staging.copier.pack([RowCopy(group, np.array([number], dtype=np.int64), 0, 1)], 0)
    with pytest.raises(IndexError):
        staging.copier.scatter(0, [RowCopy(group, np.array([number], dtype=np.int64), 0, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_is_aligned_whole_and_told_on_the_card(kind):
    arena = Arena(kind, 3 * SLOT + 17, SLOT)
    assert arena.address % HUGE_PAGE == 0
    assert (arena.slots, arena.nbytes) == (3, 3 * SLOT)
    assert arena.descriptors.tolist() == [[arena.address, 3 * SLOT, arena.device]]
    told = arena.told
    assert (told.memory, told.address, told.slot_bytes, told.slots) == (kind, arena.address, SLOT, 3)
    arena.close()


def test_host_arenas_are_resident_before_they_are_used():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    arena = Arena(MemoryKind.DRAM, 32 << 20, 2 << 20)
    assert resident() - before > 30 << 20
    arena.close()
    assert resident() - before < 8 << 20


def test_an_arena_without_a_whole_slot_is_refused():
    for nbytes, slot in ((SLOT - 1, SLOT), (SLOT, 0), (0, SLOT)):
        with pytest.raises(ValueError, match="no slot"):
            Arena(MemoryKind.DRAM, nbytes, slot)


def test_memory_that_is_not_there_is_reported_by_name():
    with pytest.raises(TransferError, match="for staging"):
        Arena(MemoryKind.DRAM, 1 << 60, 2 << 20)
