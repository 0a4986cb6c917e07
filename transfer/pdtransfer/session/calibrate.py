"""Rates for the cost rule, measured at start: this rank's copies, and the wire to a peer.

A rate that can't be measured, or that no machine has, is replaced by the documented default: a bad
calibration costs speed, never a request.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from pdtransfer.agent.port import Descriptors
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard, StagingArena
from pdtransfer.errors import TransferError
from pdtransfer.peers import real_kind
from pdtransfer.plan import RowCopy, RowGroup
from pdtransfer.plan.cost import DEVICE_COPY, HOST_COPY, WIRE, CopyRates, Rates, Transport, with_wire

logger = logging.getLogger(__name__)

DEFAULT_COPY: Mapping[MemoryKind, CopyRates] = {MemoryKind.DRAM: HOST_COPY, MemoryKind.VRAM: DEVICE_COPY}
CLOCKS: Mapping[MemoryKind, Callable[[], float]] = {
    # A host copy runs in this thread: what other threads take of its core must not count.
    MemoryKind.DRAM: time.thread_time,
    MemoryKind.VRAM: time.perf_counter,
}
SHORT_ROW = 1 << 10
LONG_ROW = 64 << 10
PASS_BYTES = 1 << 20
"""Copied in each timed pass."""
PASSES = 12
HOST_POOL = 64 << 20
DEADLINE = 2.0
"""Seconds for all passes of one memory kind."""
PIECES = 1024
PIECE = 1 << 10
"""Short pieces of one timed write to a peer, and bytes of each."""
PLACES = 256
"""Places in a block that they lie in, again and again."""
BLOCKS = 4
"""Times that a long timed write moves its block."""

_COPY_RATE = (1e8, 1e14)
_ROW_SECONDS = (0.0, 1e-5)
_PIECE_SECONDS = (1e-9, 3e-5)
_BYTE_SECONDS = (1e-13, 1e-6)
"""What is believed; anything else is odd."""
_known: dict[tuple[MemoryKind, int], CopyRates] = {}
"""By memory kind and device: engines' processes have one rank each, tests have many."""


def believed(value: float, bounds: tuple[float, float], default: float) -> float:
    """The value within its bounds (not a NaN), else the default."""
    return value if bounds[0] <= value <= bounds[1] else default


# --- this rank's copies -------------------------------------------------------------------------


class Fence(Protocol):
    """A copy that goes on."""

    def done(self) -> bool: ...


class Copies(Protocol):
    """Who packs and scatters."""

    def pack(self, rows: Sequence[RowCopy], kind: MemoryKind, slot: int) -> Fence: ...
    def scatter(self, kind: MemoryKind, slot: int, rows: Sequence[RowCopy]) -> Fence: ...


def copy_rates(
    copies: Copies,
    arenas: Iterable[StagingArena],
    clock: Callable[[], float] | None = None,
    known: dict[tuple[MemoryKind, int], CopyRates] = _known,
) -> dict[MemoryKind, CopyRates]:
    """Pack and scatter rates of each memory kind that has an arena, measured once a process and device:
    some 50 ms for host memory (a pool that fits no cache is made for it and given back), less for a GPU's.

    Slot 0 is copied to and from; of device memory the other slots stand for the pool. So the arenas must
    be idle. `known` holds what was measured before."""
    found = {}
    for arena in arenas:
        key = (arena.memory, arena.device)
        try:
            if key not in known:
                known[key] = _CopyBench(copies, arena, clock or CLOCKS[arena.memory]).rates()
            found[arena.memory] = known[key]
        except Exception as error:  # whatever a copy raises, requests can do without its rate
            logger.warning("copies in %s can not be calibrated, the defaults hold: %r", arena.memory, error)
            found[arena.memory] = DEFAULT_COPY[arena.memory]
    return found


class _CopyBench:
    def __init__(self, copies: Copies, arena: StagingArena, clock: Callable[[], float]) -> None:
        self.copies, self.arena, self.clock = copies, arena, clock
        self.until = clock() + DEADLINE
        if arena.memory is MemoryKind.DRAM:
            # On small pages and larger than most caches, as an engine's host pool is.
            self._held = mmap.mmap(-1, HOST_POOL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.start, self.pool = ctypes.addressof(ctypes.c_char.from_buffer(self._held)), HOST_POOL
            ctypes.memset(self.start, 0, self.pool)
        else:
            self.start = arena.address + arena.slot_bytes
            self.pool = (arena.slots - 1) * arena.slot_bytes // LONG_ROW * LONG_ROW
        self.size = min(PASS_BYTES, arena.slot_bytes, self.pool) // LONG_ROW * LONG_ROW

    def rates(self) -> CopyRates:
        default = DEFAULT_COPY[self.arena.memory]
        if not self.size:
            return default
        rng = np.random.default_rng(0)
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(PASSES):
            for row in (SHORT_ROW, LONG_ROW):
                for name, copy in (("pack", self.pack), ("scatter", self.scatter)):
                    at = rng.permutation(self.pool // row)[: self.size // row]
                    times.setdefault((name, row), []).append(copy(row, at))
        # The fastest: other work on the machine only makes a pass slower, the first one is cold.
        least = {key: min(found) for key, found in times.items()}
        pack, pack_row = self.split(least["pack", SHORT_ROW], least["pack", LONG_ROW])
        scatter, scatter_row = self.split(least["scatter", SHORT_ROW], least["scatter", LONG_ROW])
        return CopyRates(
            believed(pack, _COPY_RATE, default.pack),
            believed(scatter, _COPY_RATE, default.scatter),
            believed(pack_row, _ROW_SECONDS, default.pack_row),
            believed(scatter_row, _ROW_SECONDS, default.scatter_row),
            default.on_cores,
        )

    def split(self, short: float, long: float) -> tuple[float, float]:
        """Bytes/s of long rows and seconds a row, from the seconds of `size` bytes in short and in long rows."""
        rows = self.size // SHORT_ROW - self.size // LONG_ROW
        return self.size / max(long, 1e-9), max(0.0, short - long) / rows

    def pack(self, row: int, at: np.ndarray) -> float:
        return self.seconds(lambda: self.copies.pack(self.rows(row, at), self.arena.memory, 0))

    def scatter(self, row: int, at: np.ndarray) -> float:
        return self.seconds(lambda: self.copies.scatter(self.arena.memory, 0, self.rows(row, at)))

    def rows(self, row: int, at: np.ndarray) -> list[RowCopy]:
        group = RowGroup(self.start, self.arena.device, row, self.pool // row)
        return [RowCopy(group, at.astype(np.int64), 0, len(at))]

    def seconds(self, start: Callable[[], Fence]) -> float:
        began = self.clock()
        fence = start()
        while not fence.done():
            if self.clock() > self.until:
                raise TransferError(f"a copy of {self.size} bytes did not end")
        return self.clock() - began


# --- the wire to a peer -------------------------------------------------------------------------


def short_pieces(address: int) -> Descriptors:
    """(PIECES, 3): pieces with gaps between them, in host memory from `address` on; nothing is merged."""
    found = np.zeros((PIECES, 3), dtype=np.uint64)
    found[:, 0] = address + 2 * PIECE * (np.arange(PIECES) % PLACES)
    found[:, 1] = PIECE
    return found


def long_pieces(address: int, size: int) -> Descriptors:
    """(BLOCKS, 3): the same block several times."""
    return np.array([[address, size, 0]] * BLOCKS, dtype=np.uint64)


def transport_of(lane: str, mine: RankCard, theirs: RankCard) -> Transport:
    """What the bytes take, for the cost rule: a probe's lane, and whether both ranks may share memory
    (same address, and neither's UCX_TLS rules it out)."""
    if lane == "RDMA":
        return "rdma"
    same_host = mine.control.rpartition(":")[0] == theirs.control.rpartition(":")[0]
    return "shared" if same_host and all(_shares(c.transports) for c in (mine, theirs)) else "tcp"


_SHARED = frozenset({"all", "sm", "shm", "posix", "sysv", "cma", "xpmem", "knem", "mm"})


def _shares(transports: tuple[str, ...]) -> bool:
    """UCX_TLS lets processes of one machine share memory: unset, one of the names, or none ruled out by ^."""
    names = {t.strip().lstrip("^\\") for t in transports}
    excluded = bool(transports) and transports[0].startswith("^")
    return not names & _SHARED if excluded else not names or bool(names & _SHARED)


def wire_rates(rates: Rates, transport: Transport, one: float, short: float, long: float, nbytes: int) -> Rates:
    """`rates` with the wire of a peer, from the seconds of three writes: one piece of PIECE bytes, PIECES of
    them, and `nbytes` in BLOCKS pieces. What is odd keeps the transport's default.

    The probe's block lies in caches and a pool does not: where the CPU moves the bytes, a byte costs no
    less than in a long row that is packed."""
    default = WIRE[transport]
    byte = believed((long - one) / max(1, nbytes - PIECE), _BYTE_SECONDS, default.source_byte)
    piece = believed((short - one) / (PIECES - 1) - PIECE * byte, _PIECE_SECONDS, default.source_piece)
    if default.on_cores and rates.source.on_cores:
        byte = max(byte, 1 / rates.source.pack)
    return with_wire(rates, transport, piece, byte)


def rates_between(copies: Mapping[MemoryKind, CopyRates], prefill: RankCard, decode: RankCard) -> Rates:
    """Copy rates of both ends: this rank's own where it measured that memory kind (engines of a PDCluster run
    on like machines), else the default; of a pool in both kinds, the slower one's."""

    def of(card: RankCard, rate: Callable[[CopyRates], float]) -> CopyRates:
        kinds = {real_kind(card, kind) for kind in card.layout.memory_kinds} or {MemoryKind.DRAM}
        return min((copies.get(kind, DEFAULT_COPY[kind]) for kind in kinds), key=rate)

    return Rates(of(prefill, lambda c: c.pack), of(decode, lambda c: c.scatter))
