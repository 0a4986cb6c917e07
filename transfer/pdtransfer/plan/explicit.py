"""A plan as a flat list of addresses: for probes, tests and small things. Pure.

Requests use prepared lists and indices instead (`tables`); this module says the same with explicit
addresses, whole pages merged into runs that are contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout
from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.lanes import Lane, Side, Strategy, pair_plan
from pdtransfer.plan.pages import PageArray, PageList, as_pages, distinct

Descriptors = npt.NDArray[np.uint64]

MAX_PIECE = 4 << 20
"""Bytes; longer runs are cut so that the mover's window stays a bound."""


@dataclass(frozen=True)
class Segment:
    """Pieces with one source and one destination memory kind (a NIXL transfer has one of each).

    `source` and `destination` are (N, 3) uint64 arrays of address, bytes, device; row i of one
    goes to row i of the other, and the lengths are equal."""

    source_kind: MemoryKind
    destination_kind: MemoryKind
    strategy: Strategy
    source: Descriptors
    destination: Descriptors

    @property
    def nbytes(self) -> int:
        """Bytes this segment moves."""
        return int(self.source[:, 1].sum())


@dataclass(frozen=True)
class TransferPlan:
    """Everything one prefill rank writes to one decode rank for one list of pages."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all segments."""
        return sum(s.nbytes for s in self.segments)

    @property
    def pieces(self) -> int:
        """Descriptors over all segments."""
        return sum(len(s.source) for s in self.segments)


def plan(
    source: RankLayout,
    destination: RankLayout,
    source_pages: PageList,
    destination_pages: PageList,
    *,
    pools: Mapping[str, tuple[PageList, PageList]] | None = None,
    source_memory: MemoryKind | None = None,
    destination_memory: MemoryKind | None = None,
) -> TransferPlan:
    """Plan writing `source_pages[i]` of the prefill rank to `destination_pages[i]` of the decode rank.

    Page lists are pool page numbers of equal length; `pools` holds those of other page spaces.
    `*_memory` chooses between regions where a rank registered one layer in both memory kinds.
    Raises LayoutMismatch or StaleRegistration."""
    pair = pair_plan(source, destination, source_memory=source_memory, destination_memory=destination_memory)
    lists = {**(pools or {}), "": (source_pages, destination_pages)}
    segments = []
    for lane in pair.lanes:
        src, dst = lists.get(lane.pool, ((), ()))
        src = as_pages(src, int(lane.source.items.min()), "prefill")
        dst = as_pages(dst, int(lane.destination.items.min()), "decode")
        if len(src) != len(dst):
            raise LayoutMismatch(f"{len(src)} prefill pages can not fill {len(dst)} decode pages")
        distinct(dst, "decode")
        if len(src):
            segments.append(_segment(lane, src, dst))
    return TransferPlan(tuple(segments))


def _segment(lane: Lane, src: PageArray, dst: PageArray) -> Segment:
    """Addresses of all pieces of a lane, region by region, page by page, token by token."""
    if lane.whole:
        starts, lengths = _runs(src, dst, max(1, MAX_PIECE // lane.piece))
        src, dst = src[starts], dst[starts]
    else:
        lengths = np.ones(len(src), dtype=np.int64)
    size = (lengths * lane.piece).astype(np.uint64).reshape(1, -1, 1)
    strategy: Strategy = "direct" if lane.whole else "sliced"
    return Segment(
        lane.source_kind,
        lane.destination_kind,
        strategy,
        _rows(lane, lane.source, src, size),
        _rows(lane, lane.destination, dst, size),
    )


def _rows(lane: Lane, side: Side, pages: PageArray, size: Descriptors) -> Descriptors:
    token = np.arange(lane.tokens, dtype=np.uint64).reshape(1, 1, -1)
    item = side.item_bytes.astype(np.uint64).reshape(-1, 1, 1)
    address = (
        side.addresses.reshape(-1, 1, 1)
        + side.offsets.astype(np.uint64).reshape(-1, 1, 1)
        + item * pages.astype(np.uint64).reshape(1, -1, 1)
        + item // np.uint64(lane.tokens) * token
    )
    out = np.empty((address.size, 3), dtype=np.uint64)
    out[:, 0] = address.ravel()
    out[:, 1] = np.broadcast_to(size, address.shape).ravel()
    out[:, 2] = np.broadcast_to(side.devices.reshape(-1, 1, 1), address.shape).ravel()
    out.flags.writeable = False
    return out


def _runs(src: PageArray, dst: PageArray, limit: int) -> tuple[PageArray, PageArray]:
    """Starts and lengths (pages) of runs that are contiguous on both sides, at most `limit` long."""
    position = np.arange(len(src))
    new = np.ones(len(src), dtype=bool)
    new[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
    run_start = np.maximum.accumulate(np.where(new, position, 0))
    new |= (position - run_start) % limit == 0
    starts = np.flatnonzero(new)
    return starts, np.diff(np.append(starts, len(src)))
