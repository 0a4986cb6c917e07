"""Rates that are measured at start: exact ones from a made-up clock, defaults for what can't be believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from kv_world import Pool, World, template

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import StagingArena
from pdtransfer.contract.layout import Region, RegionKind
from pdtransfer.plan import RowCopy
from pdtransfer.plan.cost import DEVICE_COPY, HOST_COPY, WIRE, CopyRates, Rates
from pdtransfer.session.calibrate import (
    HOST_POOL,
    PASS_BYTES,
    PIECE,
    PIECES,
    copy_rates,
    rates_between,
    short_pieces,
    transport_of,
    wire_rates,
)

MIB = 1 << 20


class Clock:
    """Seconds that only copies spend."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fence:
    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done


class Copies:
    """Copies that take `rates` exactly, but for the first of each kind and row size, which are cold and take
    a hundred times longer. `rows` holds the addresses of all rows."""

    def __init__(self, clock: Clock, rates: CopyRates, *, polls: int = 0) -> None:
        self.clock, self.given, self.polls = clock, rates, polls
        self.slots: set[int] = set()
        self.rows: list[tuple[int, int]] = []
        self.warm: set[tuple[str, int]] = set()

    def _spend(self, name: str, rows: Sequence[RowCopy], rate: float, each: float) -> Fence:
        left = self.polls
        (copy,) = rows
        size = copy.group.row_bytes
        assert len(set(copy.indices.tolist())) == copy.count
        self.rows += [(copy.group.address + i * size, size) for i in copy.indices.tolist()]
        seconds = copy.count * (size / rate + each) * (1 if (name, size) in self.warm else 100)
        self.warm.add((name, size))

        def done() -> bool:
            nonlocal left
            left -= 1
            if left < 0:
                self.clock.now += seconds
            return left < 0

        return Fence(done)

    def pack(self, rows: Sequence[RowCopy], kind: MemoryKind, slot: int) -> Fence:
        self.slots.add(slot)
        return self._spend("pack", rows, self.given.pack, self.given.pack_row)

    def scatter(self, kind: MemoryKind, slot: int, rows: Sequence[RowCopy]) -> Fence:
        self.slots.add(slot)
        return self._spend("scatter", rows, self.given.scatter, self.given.scatter_row)


def arena_of(memory: np.ndarray, slots: int = 4, kind: MemoryKind = MemoryKind.DRAM) -> StagingArena:
    return StagingArena(memory=kind, address=int(memory.ctypes.data), slot_bytes=len(memory) // slots, slots=slots)


@pytest.mark.parametrize("polls", [0, 3])
@pytest.mark.parametrize("kind", list(MemoryKind))
def test_rates_are_those_of_the_copies(kind: MemoryKind, polls: int) -> None:
    clock, memory = Clock(), np.zeros(8 * MIB, dtype=np.uint8)
    copies = Copies(clock, CopyRates(4e9, 2e9, 50e-9, 200e-9), polls=polls)
    found = copy_rates(copies, [arena_of(memory, kind=kind)], clock, {})[kind]
    assert (found.pack_row, found.scatter_row) == (pytest.approx(50e-9), pytest.approx(200e-9))
    # 1 MiB in rows of 64 KiB: 16 rows' own seconds count to the bytes.
    assert found.pack == pytest.approx(MIB / (MIB / 4e9 + 16 * 50e-9))
    assert found.scatter == pytest.approx(MIB / (MIB / 2e9 + 16 * 200e-9))
    assert found.on_cores == (kind is MemoryKind.DRAM)
    # Slot 0 is the slot. Rows are of the other slots (device memory) or of a pool made for it (host memory).
    assert copies.slots == {0}
    start, rest = int(memory.ctypes.data) + 2 * MIB, 6 * MIB
    inside = [start <= at and at + size <= start + rest for at, size in copies.rows]
    assert all(inside) if kind is MemoryKind.VRAM else not any(inside)
    low, high = min(at for at, _ in copies.rows), max(at + size for at, size in copies.rows)
    assert high - low <= (rest if kind is MemoryKind.VRAM else HOST_POOL)


def test_a_memory_kind_is_measured_once_a_process() -> None:
    clock, memory, known = Clock(), np.zeros(8 * MIB, dtype=np.uint8), {}
    first = copy_rates(Copies(clock, CopyRates(4e9, 2e9, 0, 0)), [arena_of(memory)], clock, known)
    later = Copies(clock, CopyRates(1e9, 1e9, 0, 0))
    assert copy_rates(later, [arena_of(memory)], clock, known) == first
    assert not later.rows


def test_rates_that_no_machine_has_are_replaced_one_by_one() -> None:
    clock, memory = Clock(), np.zeros(8 * MIB, dtype=np.uint8)
    odd = CopyRates(4e9, 1e6, 1e-3, 0.0)  # a packed row of 1 ms; a scatter of 1 MB/s
    found = copy_rates(Copies(clock, odd), [arena_of(memory)], clock, {})[MemoryKind.DRAM]
    assert found.pack_row == HOST_COPY.pack_row
    assert found.scatter == HOST_COPY.scatter
    assert found.scatter_row == 0.0
    instant = CopyRates(math.inf, math.inf, 0.0, 0.0)
    assert copy_rates(Copies(clock, instant), [arena_of(memory)], clock, {})[MemoryKind.DRAM] == replace(
        HOST_COPY, pack_row=0.0, scatter_row=0.0
    )


def test_copies_that_raise_or_never_end_leave_the_defaults(caplog: pytest.LogCaptureFixture) -> None:
    memory = np.zeros(8 * MIB, dtype=np.uint8)

    class Broken(Copies):
        def pack(self, rows: Sequence[RowCopy], kind: MemoryKind, slot: int) -> Fence:
            raise RuntimeError("no kernel")

    class Endless(Copies):
        def pack(self, rows: Sequence[RowCopy], kind: MemoryKind, slot: int) -> Fence:
            def done() -> bool:
                self.clock.now += 0.01
                return False

            return Fence(done)

    for kind, default in ((MemoryKind.DRAM, HOST_COPY), (MemoryKind.VRAM, DEVICE_COPY)):
        for made, why in ((Broken, "no kernel"), (Endless, "did not end")):
            clock = Clock()
            copies = made(clock, HOST_COPY)
            assert copy_rates(copies, [arena_of(memory, kind=kind)], clock, {}) == {kind: default}
            assert why in caplog.text
            caplog.clear()


def test_device_memory_without_a_second_slot_has_the_default_rates() -> None:
    memory, clock = np.zeros(2 * MIB, dtype=np.uint8), Clock()
    copies = Copies(clock, CopyRates(1e9, 1e9, 0, 0))
    arena = arena_of(memory, slots=1, kind=MemoryKind.VRAM)
    assert copy_rates(copies, [arena], clock, {}) == {MemoryKind.VRAM: DEVICE_COPY}
    assert not copies.slots
    assert PASS_BYTES == MIB


# --- the wire -------------------------------------------------------------------------------------


def test_a_wires_rates_come_from_three_writes() -> None:
    """A write costs 100 us to begin; a piece 2 us, a byte 0.5 ns."""

    def seconds(pieces: int, nbytes: int) -> float:
        return 100e-6 + pieces * 2e-6 + nbytes * 0.5e-9

    one, short, long = seconds(1, PIECE), seconds(PIECES, PIECES * PIECE), seconds(1, MIB)
    start = Rates(chunk=1e-6)
    found = wire_rates(start, "shared", one, short, long, MIB)
    assert found.wire.source_byte == pytest.approx(0.5e-9)
    assert found.wire.source_piece == pytest.approx(2e-6)
    assert found.wire.destination_piece == 0.0 and found.chunk == 1e-6
    both = wire_rates(start, "tcp", one, short, long, MIB).wire
    assert (both.destination_piece, both.destination_byte) == (both.source_piece, both.source_byte)


def test_over_shared_memory_a_byte_costs_no_less_than_in_a_copy_that_fits_no_cache() -> None:
    """The block of a probe is copied within caches: 0.05 ns a byte; a pool's rows are packed at 4 GB/s."""
    start = Rates(source=CopyRates(4e9, 4e9, 0.0, 0.0))
    fast = 100e-6, 100e-6 + (PIECES - 1) * (1e-6 + PIECE * 0.05e-9), 100e-6 + (MIB - PIECE) * 0.05e-9, MIB
    for transport in ("shared", "tcp"):
        wire = wire_rates(start, transport, *fast).wire
        assert (wire.source_piece, wire.source_byte) == (pytest.approx(1e-6), pytest.approx(0.25e-9))
    assert wire_rates(start, "rdma", *fast).wire.source_byte == pytest.approx(0.05e-9)
    device = Rates(source=DEVICE_COPY)
    assert wire_rates(device, "shared", *fast).wire.source_byte == pytest.approx(0.05e-9)


@pytest.mark.parametrize("transport", ["shared", "tcp", "rdma"])
def test_odd_writes_leave_the_transports_defaults(transport: str) -> None:
    default = WIRE[transport]
    same = wire_rates(Rates(), transport, 1e-3, 1e-3, 1e-3, MIB).wire
    assert (same.source_piece, same.source_byte) == (default.source_piece, default.source_byte)
    none = wire_rates(Rates(), transport, 1e-3, math.nan, 2e-3, MIB).wire
    assert none.source_piece == default.source_piece and none.source_byte == pytest.approx(1e-3 / (MIB - PIECE))
    assert wire_rates(Rates(), transport, 2e-3, 1e-3, 1e-3, 0).wire.source_byte == default.source_byte


def test_short_pieces_lie_in_one_block_with_gaps_that_nothing_merges_over() -> None:
    pieces = short_pieces(10_000)
    assert pieces.shape == (PIECES, 3) and pieces[0].tolist() == [10_000, PIECE, 0]
    places = np.unique(pieces[:, 0].astype(np.int64))
    assert (np.diff(places) == 2 * PIECE).all() and (np.diff(pieces[:, 0].astype(np.int64)) != PIECE).all()
    assert int(places[-1]) + PIECE <= 10_000 + MIB


@pytest.mark.parametrize(
    ("lane", "mine", "theirs", "host", "found"),
    [
        ("RDMA", (), (), "10.0.0.1", "rdma"),
        ("TCP or shared memory", (), (), "10.0.0.1", "shared"),
        ("TCP or shared memory", (), (), "10.0.0.2", "tcp"),
        ("TCP", ("tcp", "self"), ("tcp",), "10.0.0.1", "tcp"),
        ("TCP", ("tcp", "sm"), ("all",), "10.0.0.1", "shared"),
        ("TCP", ("cma", "tcp"), ("tcp",), "10.0.0.1", "tcp"),
        ("TCP", ("^sm", "cuda"), (), "10.0.0.1", "tcp"),
        ("TCP", ("^cuda_copy",), (), "10.0.0.1", "shared"),
    ],
)
def test_the_transport_is_the_lane_and_what_both_ranks_let_ucx_use(
    lane: str, mine: tuple[str, ...], theirs: tuple[str, ...], host: str, found: str
) -> None:
    card = template(Role.DECODE, Pool(0, 1), "a").model_copy(update={"control": "10.0.0.1:1", "transports": mine})
    other = card.model_copy(update={"control": f"{host}:2", "transports": theirs})
    assert transport_of(lane, card, other) == found


def test_both_ends_copy_at_the_rate_of_the_memory_their_pool_is_really_in() -> None:
    measured = {MemoryKind.DRAM: CopyRates(3e9, 2e9, 0.0, 0.0)}

    def card(*kinds: MemoryKind, emulated: bool = False):
        made = template(Role.PREFILL, Pool(0, 1), "a", emulated=emulated)
        regions = tuple(
            Region(layer=n, kind=RegionKind.KEY, item_bytes=8, items=1, memory=k) for n, k in enumerate(kinds)
        )
        return made.model_copy(update={"layout": made.layout.model_copy(update={"regions": regions})})

    device, host = card(MemoryKind.VRAM), card(MemoryKind.DRAM)
    found = rates_between(measured, device, host)
    assert (found.source, found.destination) == (DEVICE_COPY, measured[MemoryKind.DRAM])
    assert rates_between(measured, card(MemoryKind.VRAM, emulated=True), host).source == measured[MemoryKind.DRAM]
    # Both kinds in one pool: the slower one decides.
    assert rates_between(measured, card(*MemoryKind), device).source == measured[MemoryKind.DRAM]
    assert rates_between({}, host, host) == Rates(HOST_COPY, HOST_COPY)


def test_a_probe_leaves_rates_with_the_peer_and_counts_its_block_once(world: World) -> None:
    (prefill,), (decode,) = world.pair()
    for rank, other in ((prefill, decode), (decode, prefill)):
        (peer,) = rank.endpoint._wiring.peers.values()
        assert peer.card.incarnation == other.endpoint.card.incarnation
        assert peer.rates is not None
        held = rank.endpoint._wiring.prober.copies[MemoryKind.DRAM]
        assert (peer.rates.source, peer.rates.destination) == (held, held)
        assert held != HOST_COPY and 1e8 < held.pack < 1e12 and 1e8 < held.scatter < 1e12
        # Samples of 8 pages; one short piece, one long piece and PIECES short ones, three times at least.
        assert 8 + 3 * 3 <= len(rank.agent.handles) <= 8 + 3 * 6 and not rank.agent.posts
