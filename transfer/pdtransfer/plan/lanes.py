"""What never changes between two ranks: their region pairs, grouped into lanes that move alike. Pure.

A `PairPlan` is made once for a pair of layouts and kept; a request only adds page numbers. Both ranks
make it from the same two cards and get the same lanes in the same order, so a lane's number means the
same on both sides. Strategies (for lanes with unequal slices or small pages; the others always go `direct`):

- `direct`: whole pages to whole pages.
- `sliced`: each token's slice (`piece` bytes) is written in place.
- `staged`: the source packs slices into a slot, the slot is written in bulk, the destination scatters.
- `merge`: the source's slice is its whole page: it writes pages into a slot, the destination scatters.
- `split`: the slice is the destination's whole page: the source packs and writes whole pages in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout, Region
from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.match import RegionPair, choices, kind_of, region_pairs

Strategy = Literal["direct", "sliced", "staged", "merge", "split"]
STRATEGIES: tuple[Strategy, ...] = ("direct", "sliced", "staged", "merge", "split")
Column = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
T = TypeVar("T", bound=np.generic)

SMALL_PAGE = 16 << 10
"""Bytes. A page of a region that is smaller may go through slots though both slices are whole pages (SGLang's
default page is one token): below about that much a piece costs more than copying it twice (transfer study)."""
MAX_INDEX = 2**31 - 1
"""NIXL indexes a prepared list with int32."""


@dataclass(frozen=True, eq=False)
class Side:
    """A lane's regions on one rank; arrays of length R, in the lane's order. Bytes, but for `items` (pages).

    `offsets` is where the slice begins in a token's row. `whole`: the slice is the whole page here."""

    addresses: Addresses
    devices: Addresses
    item_bytes: Column
    items: Column
    offsets: Column
    whole: bool

    @cached_property
    def firsts(self) -> npt.NDArray[np.int32]:
        """Index of each region's first page, pages being counted through all regions."""
        return (np.cumsum(self.items) - self.items).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Lane:
    """Region pairs of one page space, one pair of memory kinds and devices, and one piece size.

    `whole`: both slices are whole pages; then `tokens` is 1 and `piece` a page's bytes. Otherwise a page
    has `tokens` pieces of `piece` bytes."""

    number: int
    pool: str
    source_kind: MemoryKind
    destination_kind: MemoryKind
    whole: bool
    tokens: int
    piece: int
    source: Side
    destination: Side
    names: tuple[str, ...]
    """Of the regions, for messages."""
    layers: tuple[int | None, ...] = ()
    """Layer ids of the regions, ascending; None (at the end) for draft layers."""

    @property
    def unit(self) -> int:
        """Bytes of one page of one region."""
        return self.piece * self.tokens

    @property
    def chooses(self) -> bool:
        """There is more than one way to go."""
        return not self.whole or self.unit < SMALL_PAGE

    def direct(self, strategy: Strategy) -> bool:
        """Under that strategy of the request, the lane's pages are written from pool to pool as they are."""
        return self.whole and (strategy in ("direct", "sliced") or not self.chooses)

    @property
    def regions(self) -> int:
        """R, the number of region pairs."""
        return len(self.names)

    def regions_of(self, layers: range | None) -> range:
        """The regions of these layers (ids, step 1; no draft layers), or all of them: neighbours in the
        lane, since its regions are in order of their layers."""
        if layers is None:
            return range(self.regions)
        inside = [i for i, layer in enumerate(self.layers) if layer is not None and layer in layers]
        return range(inside[0], inside[-1] + 1) if inside else range(0)


@dataclass(frozen=True, eq=False)
class PairPlan:
    """Everything one prefill rank ever writes to one decode rank."""

    lanes: tuple[Lane, ...]

    @property
    def unequal(self) -> bool:
        """Some slices are not whole pages on both sides, so that not all can go `direct`."""
        return any(not lane.whole for lane in self.lanes)

    @cached_property
    def choosing(self) -> tuple[Lane, ...]:
        """The lanes that a strategy has to be chosen for."""
        return tuple(lane for lane in self.lanes if lane.chooses)

    @property
    def pools(self) -> frozenset[str]:
        """Page spaces that the lanes use."""
        return frozenset(lane.pool for lane in self.lanes)

    def nbytes(self, pages: int, pools: Mapping[str, int] | None = None) -> int:
        """Bytes of a request of `pages` KV pages and `pools[name]` pages of other page spaces."""
        counts = {**(pools or {}), "": pages}
        return sum(lane.unit * lane.regions * counts.get(lane.pool, 0) for lane in self.lanes)

    def allowed(self, strategy: Strategy, slot_bytes: int) -> str | None:
        """Why this pair can't use the strategy with slots of `slot_bytes` (0: no slots), or None."""
        unequal = [lane for lane in self.lanes if not lane.whole]
        if strategy == "direct":
            return f"{unequal[0].names[0]}: the slices are unequal" if unequal else None
        if not self.choosing or (strategy == "sliced" and not unequal):
            return "every slice is a whole page on both sides"
        for lane in self.choosing:
            why = _lane_allowed(lane, strategy, slot_bytes)
            if why is not None:
                return f"{lane.names[0]}: {why}"
        return None

    def in_place(self, strategy: Strategy) -> bool:
        """A remote write of such a request hits pages of the pool (not only slots)."""
        return strategy not in ("staged", "merge") or any(lane.direct(strategy) for lane in self.lanes)


def _lane_allowed(lane: Lane, strategy: Strategy, slot_bytes: int) -> str | None:
    if strategy == "sliced":
        for side in (lane.source, lane.destination):
            if int(side.items.sum()) * lane.tokens > MAX_INDEX:
                return "the pool has more slices than a NIXL list can hold"
        return None
    if lane.unit > slot_bytes:
        return f"a page's slice has {lane.unit} bytes, a slot {slot_bytes}"
    if strategy == "merge" and not lane.source.whole:
        return "prefill's slice is not its whole page"
    if strategy == "split" and not lane.destination.whole:
        return "the slice is not decode's whole page"
    packs = [] if strategy == "merge" else [("prefill", lane.source)]
    scatters = [] if strategy == "split" else [("decode", lane.destination)]
    for name, side in (*packs, *scatters):
        if not aligned(lane, side):
            return f"{name}'s rows are not a whole number of slices of {lane.piece} bytes"
    return None


def aligned(lane: Lane, side: Side) -> bool:
    """Every slice lies on a grid of `piece` bytes from its region's start: rows can be indexed."""
    return not ((side.item_bytes % lane.unit).any() or (side.offsets % lane.piece).any())


def pair_plan(
    source: RankLayout,
    destination: RankLayout,
    *,
    source_memory: MemoryKind | None = None,
    destination_memory: MemoryKind | None = None,
) -> PairPlan:
    """The lanes from a prefill rank to a decode rank.

    `*_memory` chooses where a rank registered a layer in both memory kinds (ignored elsewhere).
    Raises LayoutMismatch or StaleRegistration. Takes milliseconds: keep the result with the peer."""
    groups: dict[tuple[str, str, str, int, int, int, int], list[RegionPair]] = {}
    for pair in region_pairs(source, destination, source_memory, destination_memory):
        s, d = pair.source, pair.destination
        key = (s.pool, kind_of(s).value, kind_of(d).value, s.device, d.device, pair.rows, pair.length)
        groups.setdefault(key, []).append(pair)
    return PairPlan(tuple(_lane(number, key, groups[key]) for number, key in enumerate(sorted(groups))))


def check_pair(source: RankLayout, destination: RankLayout) -> None:
    """Raise what `pair_plan` would raise for this pair, for any choice of memory kinds a request has."""
    for mine, other in product(choices(source), choices(destination)):
        pair_plan(source, destination, source_memory=mine, destination_memory=other)


def _lane(number: int, key: tuple[str, str, str, int, int, int, int], pairs: Sequence[RegionPair]) -> Lane:
    pool, source_kind, destination_kind, _, _, rows, length = key
    unit = length * max(1, rows)
    return Lane(
        number,
        pool,
        MemoryKind(source_kind),
        MemoryKind(destination_kind),
        rows == 0,
        max(1, rows),
        length,
        _side([p.source for p in pairs], [p.source_offset for p in pairs], unit, "prefill"),
        _side([p.destination for p in pairs], [p.destination_offset for p in pairs], unit, "decode"),
        tuple(f"{'draft ' * p.source.draft}layer {p.source.layer} {p.source.kind}" for p in pairs),
        tuple(None if p.source.draft else p.source.layer for p in pairs),
    )


def _side(regions: Sequence[Region], offsets: Sequence[int], unit: int, side: str) -> Side:
    if sum(r.items for r in regions) > MAX_INDEX:
        raise LayoutMismatch(f"the {side} pool has more pages than a NIXL list can hold")
    if any(r.address + r.item_bytes * r.items > 2**64 for r in regions):
        raise LayoutMismatch(f"a {side} region ends beyond the address space")
    return Side(
        _frozen(np.array([r.address for r in regions], dtype=np.uint64)),
        _frozen(np.array([r.device for r in regions], dtype=np.uint64)),
        _frozen(np.array([r.item_bytes for r in regions], dtype=np.int64)),
        _frozen(np.array([r.items for r in regions], dtype=np.int64)),
        _frozen(np.array(offsets, dtype=np.int64)),
        all(r.item_bytes == unit for r in regions),
    )


def _frozen(array: npt.NDArray[T]) -> npt.NDArray[T]:
    array.flags.writeable = False
    return array
