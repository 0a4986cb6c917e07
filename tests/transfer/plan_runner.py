"""Plans run by copying bytes between `plan_world` ranks: tables, indices, blocks and row maps used as the
session uses them, and prepared lists numbered as NIXL numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plan_world import Memory, Rank

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import StagingArena
from pdtransfer.plan import (
    Block,
    Lane,
    PairPlan,
    RowMap,
    Strategy,
    blocks,
    page_indices,
    pages_table,
    row_map,
    slice_indices,
    slices_table,
    unit_indices,
    units_table,
)


class Slots:
    """Arenas of one rank, one a memory kind."""

    def __init__(self, slot_bytes: int, rng: np.random.Generator) -> None:
        self.memory = Memory(1 << 40, 2 * 3 * slot_bytes, rng)
        self.arenas = {
            kind: StagingArena(
                memory=kind, device=n, address=(1 << 40) + n * 3 * slot_bytes, slot_bytes=slot_bytes, slots=3
            )
            for n, kind in enumerate(MemoryKind)
        }
        for kind, arena in self.arenas.items():
            end = arena.address + arena.slots * slot_bytes
            self.memory.registered.append((arena.address, end, kind, arena.device))


def expand(table: np.ndarray) -> list[tuple[int, int, int]]:
    """(address, bytes, device) of every piece of a strided list, as NIXL numbers them."""
    return [(a + i * stride, n, device) for a, n, device, stride, count in table.tolist() for i in range(count)]


@dataclass
class Run:
    """Writes one prefill rank's part of chunks into one decode rank. `pieces` counts what NIXL would move
    after it merged neighbours that are dense on both sides."""

    pair: PairPlan
    source: Rank
    destination: Rank
    strategy: Strategy
    rng: np.random.Generator
    slot_bytes: int
    pieces: int = 0

    def chunk(self, pool: str, first: int, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Move prompt pages `first ..`, whose pool pages are `mine` at prefill and `theirs` at decode."""
        src, dst = np.array(mine, dtype=np.int64), np.array(theirs, dtype=np.int64)
        for lane in self.pair.lanes:
            if lane.pool != pool:
                continue
            every = range(lane.regions)
            if lane.whole:
                self.post(
                    lane,
                    self.source.memory,
                    expand(pages_table(lane.source)),
                    page_indices(lane.source, every, src),
                    self.destination.memory,
                    expand(pages_table(lane.destination)),
                    page_indices(lane.destination, every, dst),
                )
            elif self.strategy == "sliced":
                self.post(
                    lane,
                    self.source.memory,
                    expand(slices_table(lane.source, lane)),
                    slice_indices(lane.source, lane, every, src),
                    self.destination.memory,
                    expand(slices_table(lane.destination, lane)),
                    slice_indices(lane.destination, lane, every, dst),
                )
            else:
                for block in blocks(lane, first, len(src), self.slot_bytes):
                    low = block.first_page - first
                    self.block(lane, block, src[low : low + block.pages], dst[low : low + block.pages])

    def block(self, lane: Lane, block: Block, src: np.ndarray, dst: np.ndarray) -> None:
        """One slot's worth, through fresh arenas whose slots hold garbage."""
        assert block.nbytes == block.regions * block.pages * lane.unit <= self.slot_bytes
        packing, landing = Slots(self.slot_bytes, self.rng), Slots(self.slot_bytes, self.rng)
        here, there = packing.arenas[lane.source_kind], landing.arenas[lane.destination_kind]
        regions = range(block.first_region, block.first_region + block.regions)
        per_slot, count = self.slot_bytes // lane.unit, block.regions * block.pages
        packed, landed = 1, 2  # slot numbers
        source = (self.source.memory, expand(pages_table(lane.source)), page_indices(lane.source, regions, src))
        target = (
            self.destination.memory,
            expand(pages_table(lane.destination)),
            page_indices(lane.destination, regions, dst),
        )
        if self.strategy in ("staged", "split"):
            copy_rows(
                row_map(lane, lane.source), block, src, self.source.memory, packing.memory, here, packed, pack=True
            )
            source = (packing.memory, expand(units_table(here, lane.unit)), unit_indices(packed, count, per_slot))
        if self.strategy in ("staged", "merge"):
            target = (landing.memory, expand(units_table(there, lane.unit)), unit_indices(landed, count, per_slot))
        self.post(lane, *source, *target)
        if self.strategy in ("staged", "merge"):
            copy_rows(
                row_map(lane, lane.destination),
                block,
                dst,
                self.destination.memory,
                landing.memory,
                there,
                landed,
                pack=False,
            )

    def post(
        self,
        lane: Lane,
        source: Memory,
        local: list[tuple[int, int, int]],
        local_indices: np.ndarray,
        destination: Memory,
        remote: list[tuple[int, int, int]],
        remote_indices: np.ndarray,
    ) -> None:
        """What NIXL does with two prepared lists."""
        assert local_indices.dtype == remote_indices.dtype == np.int32
        end = (-1, -1)
        for i, j in zip(local_indices.tolist(), remote_indices.tolist(), strict=True):
            (a, n, a_device), (b, m, b_device) = local[i], remote[j]
            assert n == m
            destination.write(b, source.read(a, n, a_device, lane.source_kind), b_device, lane.destination_kind)
            self.pieces += (a, b) != end
            end = (a + n, b + n)


def copy_rows(
    rows: RowMap,
    block: Block,
    pages: np.ndarray,
    pool: Memory,
    slots: Memory,
    arena: StagingArena,
    slot: int,
    *,
    pack: bool,
) -> None:
    """Pack pool rows into a slot, or scatter a slot into pool rows."""
    start = arena.address + slot * arena.slot_bytes
    done = 0
    for part in rows.rows(block, pages):
        size = part.group.row_bytes
        assert part.count == len(part.indices) and part.first * size == done
        for i, row in enumerate(part.indices.tolist()):
            assert 0 <= row < part.group.rows
            there, here = part.group.address + row * size, start + (part.first + i) * size
            if pack:
                slots.write(here, pool.read(there, size, part.group.device), arena.device)
            else:
                pool.write(there, slots.read(here, size, arena.device), part.group.device)
        done += part.count * size
    assert done == block.nbytes
