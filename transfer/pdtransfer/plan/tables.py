"""A lane's memory as NIXL's strided descriptor lists, and requests as indices into them. Pure.

A table is (rows, 5) uint64: address, bytes, device, stride, count. NIXL expands it to `count` pieces a
row, numbered row after row; preparing it is cheap (262,144 pieces in 5 us), so it is made once a pair.
Indices are int32. Neighbouring pieces that are contiguous on both sides are merged by NIXL itself where
stride == bytes, so nothing is merged here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.card import StagingArena
from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.lanes import MAX_INDEX, Lane, Side
from pdtransfer.plan.pages import PageArray

Table = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]


def pages_table(side: Side) -> Table:
    """(R, 5): every page of every region of the lane. Index with `page_indices`."""
    return _table(side.addresses, side.item_bytes, side.devices, side.item_bytes, side.items)


def slices_table(side: Side, lane: Lane) -> Table:
    """(R, 5): the slice of every token of every region, for `sliced`. Index with `slice_indices`."""
    return _table(
        side.addresses + side.offsets.astype(np.uint64),
        np.full(lane.regions, lane.piece),
        side.devices,
        side.item_bytes // lane.tokens,
        side.items * lane.tokens,
    )


def units_table(arena: StagingArena, unit: int) -> Table:
    """(slots, 5): an arena's slots as units of `unit` bytes from each slot's start (what does not fill
    one is left out). Index with `unit_indices(slot, count, arena.slot_bytes // unit)`."""
    per_slot = arena.slot_bytes // unit
    if not per_slot:
        raise LayoutMismatch(f"a page's slice has {unit} bytes, a slot {arena.slot_bytes}")
    slots = np.arange(arena.slots, dtype=np.uint64)
    full = np.ones(arena.slots, dtype=np.uint64)
    return _table(
        np.uint64(arena.address) + slots * np.uint64(arena.slot_bytes),
        full * np.uint64(unit),
        full * np.uint64(arena.device),
        full * np.uint64(unit),
        full * np.uint64(per_slot),
    )


def page_indices(side: Side, regions: range, pages: PageArray) -> Indices:
    """Indices into `pages_table`: for each region of the lane in `regions`, each of `pages` (pool page
    numbers); region-major, len(regions) * len(pages)."""
    return (side.firsts[regions.start : regions.stop, None] + pages.astype(np.int32)).ravel()


def slice_indices(side: Side, lane: Lane, regions: range, pages: PageArray) -> Indices:
    """Indices into `slices_table`: region-major, then page, then token."""
    first = side.firsts[regions.start : regions.stop, None] + pages.astype(np.int32)
    token = np.arange(lane.tokens, dtype=np.int32)
    return (np.multiply(first, lane.tokens, dtype=np.int32)[:, :, None] + token).ravel()


def unit_indices(slot: int, count: int, per_slot: int, first: int = 0) -> Indices:
    """Indices into `units_table`: `count` units of one slot from its `first` on."""
    start = slot * per_slot + first
    return np.arange(start, start + count, dtype=np.int32)


def _table(
    address: npt.NDArray[np.generic],
    size: npt.NDArray[np.generic],
    device: npt.NDArray[np.generic],
    stride: npt.NDArray[np.generic],
    count: npt.NDArray[np.generic],
) -> Table:
    if int(count.sum()) > MAX_INDEX:
        raise LayoutMismatch(f"{int(count.sum())} pieces are more than a NIXL list can hold")
    table = np.stack([column.astype(np.uint64) for column in (address, size, device, stride, count)], axis=1)
    table.flags.writeable = False
    return table
