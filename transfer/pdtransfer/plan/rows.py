"""Pool memory as matrices of rows, so that one index call packs or scatters many regions. Pure.

A slice lies on a grid of `piece` bytes from its region's start (both TP sizes divide one another). Regions
whose addresses are equal modulo that row size share one matrix that spans them all; what lies between
them is never indexed. Where the slice is the whole page, a page's bytes are contiguous and rows may be
longer: up to a page, as far as the regions' addresses allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.blocks import Block
from pdtransfer.plan.lanes import Lane, Side, aligned
from pdtransfer.plan.pages import PageArray

RowIndices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowGroup:
    """A matrix over memory from `address`: `rows` rows of `row_bytes` bytes, back to back. It may span
    memory between regions that is not the pool's (or not mapped): touch indexed rows only."""

    address: int
    device: int
    row_bytes: int
    rows: int


@dataclass(frozen=True)
class RowCopy:
    """Rows `indices` of `group` are rows `first` .. `first + count - 1` of a slot (`group.row_bytes` each,
    from the slot's start), in that order."""

    group: RowGroup
    indices: RowIndices
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class RowMap:
    """Where a lane's slices lie on one side. Arrays of length R: the group of each region, the group row
    of its first slice, rows from page to page. `steps`: rows of one page, relative to its first."""

    groups: tuple[RowGroup, ...]
    group_of: npt.NDArray[np.int64]
    first_row: RowIndices
    page_rows: RowIndices
    steps: RowIndices

    def rows(self, block: Block, page_numbers: PageArray) -> list[RowCopy]:
        """The copies of a block. `page_numbers` are this side's pool pages of the block's prompt pages,
        `block.pages` of them. One copy for each run of regions with the same group."""
        if len(page_numbers) != block.pages:
            raise ValueError(f"{len(page_numbers)} page numbers for a block of {block.pages} pages")
        stop = block.first_region + block.regions
        pages = np.asarray(page_numbers, dtype=np.int64)
        copies: list[RowCopy] = []
        first, region = 0, block.first_region
        ends = [stop]
        if len(self.groups) > 1:
            ends = [*(np.flatnonzero(np.diff(self.group_of[region:stop])) + region + 1).tolist(), stop]
        for end in ends:
            base = self.first_row[region:end, None] + self.page_rows[region:end, None] * pages
            indices = (base[:, :, None] + self.steps).ravel()
            copies.append(RowCopy(self.groups[int(self.group_of[region])], indices, first, len(indices)))
            first, region = first + len(indices), end
        return copies


def row_map(lane: Lane, side: Side) -> RowMap:
    """The row map of one side of a lane; raises LayoutMismatch where `PairPlan.allowed` says why not."""
    if not aligned(lane, side):
        raise LayoutMismatch(f"{lane.names[0]}: the rows are not a whole number of slices of {lane.piece} bytes")
    starts = [int(a) for a in side.addresses]
    row = lane.piece
    if side.whole:
        row = max(row, math.gcd(lane.unit, *(start - starts[0] for start in starts)))
    place: dict[int, int] = {}
    group_of = np.array([place.setdefault(start % row, len(place)) for start in starts], dtype=np.int64)
    low = [min(s for s, g in zip(starts, group_of, strict=True) if g == n) for n in range(len(place))]
    high = [0] * len(place)
    for start, g, size in zip(starts, group_of, (side.item_bytes * side.items).tolist(), strict=True):
        high[g] = max(high[g], start + size)
    device = int(side.devices[0])
    groups = tuple(RowGroup(a, device, row, (b - a) // row) for a, b in zip(low, high, strict=True))
    first = [(s - low[g] + o) // row for s, g, o in zip(starts, group_of, side.offsets.tolist(), strict=True)]
    step = row if side.whole else int(side.item_bytes[0]) // lane.tokens
    count = lane.unit // row if side.whole else lane.tokens
    return RowMap(
        groups,
        group_of,
        np.array(first, dtype=np.int64),
        side.item_bytes // row,
        np.arange(count, dtype=np.int64) * (step // row),
    )
