"""Which bytes go where: a flat, frozen plan from two rank layouts and two page lists. Pure.

The executor (`pdtransfer.mover`) takes no decisions; everything that can be refused is refused
here, by name. Strategies:

- `direct`: both ranks hold the same heads of a region: whole pages, and runs of pages that are
  contiguous on both sides as one piece.
- `sliced`: unequal tensor parallelism: one piece per token, the run of heads both ranks hold
  (pages are token, head, dim, so that run is contiguous within a token).

A third strategy, `staged` (pack, bulk write, scatter), fits in as further segments.

Head math: a region's row of one token holds `heads.count` heads of
`item_bytes / (page_tokens * heads.count)` bytes. With the common heads [lo, hi), a piece starts
`(lo - heads.first)` heads into the row on each side. K and V may differ in bytes per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout, Region, RegionKind
from pdtransfer.errors import LayoutMismatch, StaleRegistration

Strategy = Literal["direct", "sliced", "staged"]
Descriptors = npt.NDArray[np.uint64]
PageList = Sequence[int] | npt.NDArray[np.int64]

MAX_PIECE = 4 << 20
"""Bytes; longer runs are cut so that the mover's window stays a bound."""

_PER_HEAD = (RegionKind.KEY, RegionKind.VALUE)


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


@dataclass(frozen=True)
class _Copy:
    """One region pair: byte offsets within a token's row, and the piece's length (bytes).
    `rows` is 0 for whole pages (which may be merged into runs), else the tokens of a page."""

    source: Region
    destination: Region
    rows: int
    source_offset: int
    destination_offset: int
    length: int


def plan(
    source: RankLayout,
    destination: RankLayout,
    source_pages: PageList,
    destination_pages: PageList,
    *,
    source_memory: MemoryKind | None = None,
    destination_memory: MemoryKind | None = None,
) -> TransferPlan:
    """Plan writing `source_pages[i]` of the prefill rank to `destination_pages[i]` of the decode rank.

    Page lists are pool page numbers of equal length. `*_memory` chooses between regions where a
    rank registered one layer in both memory kinds. Raises LayoutMismatch or StaleRegistration."""
    copies = _copies(source, destination, source_memory, destination_memory)
    src = _pages(source_pages, min((c.source.items for c in copies), default=0), "prefill")
    dst = _pages(destination_pages, min((c.destination.items for c in copies), default=0), "decode")
    if len(src) != len(dst):
        raise LayoutMismatch(f"{len(src)} prefill pages can not fill {len(dst)} decode pages")
    if len(np.unique(dst)) != len(dst):
        raise LayoutMismatch("the decode page list names a page twice")
    if not len(src):
        return TransferPlan(())
    groups: dict[tuple[MemoryKind, MemoryKind, bool], list[_Copy]] = {}
    for copy in copies:
        kinds = _kind(copy.source), _kind(copy.destination)
        groups.setdefault((*kinds, copy.rows == 0), []).append(copy)
    return TransferPlan(
        tuple(
            _segment(k, d, whole, group, src, dst)
            for (k, d, whole), group in sorted(groups.items(), key=lambda g: str(g[0]))
        )
    )


def check_pair(source: RankLayout, destination: RankLayout) -> None:
    """Raise what `plan` would raise for this pair, whatever the pages."""
    plan(source, destination, (), ())


def check_pages(layout: RankLayout, pages: PageList, side: str) -> None:
    """Raise LayoutMismatch when a page list lies outside the rank's pool or names a page twice."""
    array = _pages(pages, min((r.items for r in layout.regions), default=0), side)
    if len(np.unique(array)) != len(array):
        raise LayoutMismatch(f"the {side} page list names a page twice")


def _kind(region: Region) -> MemoryKind:
    if region.memory is None:
        raise StaleRegistration(
            f"the registration of layer {region.layer} {region.kind} names no memory kind (VRAM or DRAM)"
        )
    return region.memory


def _pages(pages: PageList, items: int, side: str) -> npt.NDArray[np.int64]:
    array = np.asarray(pages, dtype=np.int64)
    if array.ndim != 1:
        raise LayoutMismatch(f"the {side} page list is not flat")
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= items):
        raise LayoutMismatch(
            f"{side} pages {int(array.min())}..{int(array.max())} lie outside its pool of {items} pages"
        )
    return array


def _regions(layout: RankLayout, side: str, memory: MemoryKind | None) -> dict[object, Region]:
    if not layout.regions:
        raise StaleRegistration(f"the {side} rank registered no KV memory segments")
    found: dict[object, Region] = {}
    for region in layout.regions:
        kind = _kind(region)
        if region.key not in found:
            found[region.key] = region
            continue
        held = _kind(found[region.key])
        if memory is None or held is kind:
            raise LayoutMismatch(
                f"the {side} rank registered layer {region.layer} {region.kind} twice ({held} and {kind}); "
                "the request must say which"
            )
        if kind is memory:
            found[region.key] = region
    return found


def _copies(
    source: RankLayout,
    destination: RankLayout,
    source_memory: MemoryKind | None,
    destination_memory: MemoryKind | None,
) -> list[_Copy]:
    """Region pairs by (layer, kind, draft). A layer only one side holds belongs to another
    pipeline stage; a layer both hold must have the same region kinds."""
    if source.page_tokens != destination.page_tokens:
        raise LayoutMismatch(f"prefill pages hold {source.page_tokens} tokens, decode pages {destination.page_tokens}")
    if source.kv_dtype != destination.kv_dtype:
        raise LayoutMismatch(f"prefill stores KV as {source.kv_dtype}, decode as {destination.kv_dtype}")
    ours = _regions(source, "prefill", source_memory)
    theirs = _regions(destination, "decode", destination_memory)
    common = {(r.layer, r.draft) for r in ours.values()} & {(r.layer, r.draft) for r in theirs.values()}
    if not common:
        raise LayoutMismatch("the two ranks hold no common layer")
    copies: list[_Copy] = []
    for key in ours.keys() | theirs.keys():
        region = ours.get(key) or theirs[key]
        if (region.layer, region.draft) not in common:
            continue
        if key not in ours or key not in theirs:
            side = "prefill" if key in ours else "decode"
            raise LayoutMismatch(f"only the {side} rank registered layer {region.layer} {region.kind}")
        copy = _copy(source, destination, ours[key], theirs[key])
        if copy is not None:
            copies.append(copy)
    if not copies:
        raise LayoutMismatch("the two ranks hold no common KV head")
    return sorted(copies, key=lambda c: (c.source.draft, c.source.layer, c.source.kind))


def _copy(source: RankLayout, destination: RankLayout, ours: Region, theirs: Region) -> _Copy | None:
    name = f"layer {ours.layer} {ours.kind}"
    if ours.kind not in _PER_HEAD or source.heads is None or destination.heads is None:
        if (source.heads is None) != (destination.heads is None):
            raise LayoutMismatch(f"{name}: one rank splits its rows by head and the other does not")
        if ours.item_bytes != theirs.item_bytes:
            raise LayoutMismatch(f"{name}: prefill pages have {ours.item_bytes} bytes, decode {theirs.item_bytes}")
        s, d = source.coordinates, destination.coordinates
        if source.heads is not None and s.tp != d.tp * s.tp_size // d.tp_size:
            return None  # a row every rank holds: one copy is enough, this rank is not its sender
        return _Copy(ours, theirs, 0, 0, 0, ours.item_bytes)
    mine, other = source.heads, destination.heads
    if mine.total != other.total:
        raise LayoutMismatch(f"prefill has {mine.total} KV heads, decode {other.total}")
    tokens = source.page_tokens
    if ours.item_bytes % (tokens * mine.count) or theirs.item_bytes % (tokens * other.count):
        raise LayoutMismatch(f"{name}: a page is not a whole number of heads")
    head = ours.item_bytes // (tokens * mine.count)
    if head != theirs.item_bytes // (tokens * other.count):
        raise LayoutMismatch(
            f"{name}: a head has {head} bytes per token at prefill and "
            f"{theirs.item_bytes // (tokens * other.count)} at decode"
        )
    low = max(mine.first, other.first)
    count = min(mine.first + mine.count, other.first + other.count) - low
    if count <= 0:
        return None
    if count == mine.count == other.count:
        return _Copy(ours, theirs, 0, 0, 0, ours.item_bytes)
    return _Copy(ours, theirs, tokens, (low - mine.first) * head, (low - other.first) * head, count * head)


def _column(values: Sequence[int]) -> Descriptors:
    return np.asarray(values, dtype=np.uint64).reshape(-1, 1, 1)


def _segment(
    source_kind: MemoryKind,
    destination_kind: MemoryKind,
    whole: bool,
    group: Sequence[_Copy],
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
) -> Segment:
    """Addresses of all pieces of a group, region by region, page by page, token by token."""
    if whole:
        limit = max(1, MAX_PIECE // max(c.length for c in group))
        starts, lengths = _runs(src, dst, limit)
        src, dst = src[starts], dst[starts]
        rows = 1
    else:
        lengths = np.ones(len(src), dtype=np.int64)
        rows = group[0].rows
    token = np.arange(rows, dtype=np.uint64).reshape(1, 1, -1)
    size = _column([c.length for c in group]) * lengths.astype(np.uint64).reshape(1, -1, 1)

    def side(regions: Sequence[Region], offsets: Sequence[int], pages: npt.NDArray[np.int64]) -> Descriptors:
        item = _column([r.item_bytes for r in regions])
        address = (
            _column([r.address for r in regions])
            + _column(offsets)
            + item * pages.astype(np.uint64).reshape(1, -1, 1)
            + item // np.uint64(rows) * token
        )
        out = np.empty((address.size, 3), dtype=np.uint64)
        out[:, 0] = address.ravel()
        out[:, 1] = np.broadcast_to(size, address.shape).ravel()
        out[:, 2] = np.broadcast_to(_column([r.device for r in regions]), address.shape).ravel()
        out.flags.writeable = False
        return out

    return Segment(
        source_kind,
        destination_kind,
        "direct" if whole else "sliced",
        side([c.source for c in group], [c.source_offset for c in group], src),
        side([c.destination for c in group], [c.destination_offset for c in group], dst),
    )


def _runs(
    src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64], limit: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and lengths (pages) of runs that are contiguous on both sides, at most `limit` long."""
    position = np.arange(len(src))
    new = np.ones(len(src), dtype=bool)
    new[1:] = (np.diff(src) != 1) | (np.diff(dst) != 1)
    run_start = np.maximum.accumulate(np.where(new, position, 0))
    new |= (position - run_start) % limit == 0
    starts = np.flatnonzero(new)
    return starts, np.diff(np.append(starts, len(src)))
