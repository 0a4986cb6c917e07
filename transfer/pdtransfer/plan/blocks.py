"""A lane's part of a chunk, cut into blocks that fill at most one slot each. Pure.

A block is a rectangle: consecutive regions of the lane by consecutive prompt pages. In a slot its bytes
lie region-major, then page, then token, `piece` bytes each, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pdtransfer.errors import LayoutMismatch
from pdtransfer.plan.lanes import Lane

KEPT_BLOCKS = 1024
"""Shapes with about that many blocks at most are kept; larger requests are cut anew."""
_STRIPS_TRIED = 6


@dataclass(frozen=True)
class Block:
    """Regions `first_region ..` of lane number `lane`, prompt pages `first_page ..` (counted in the
    lane's page space), `nbytes` in all."""

    lane: int
    first_region: int
    regions: int
    first_page: int
    pages: int
    nbytes: int


def blocks(lane: Lane, first_page: int, pages: int, slot_bytes: int, regions: range | None = None) -> Iterator[Block]:
    """Blocks that cover `pages` prompt pages from `first_page` of every region of the lane (or of these) once.

    The pages are cut into strips; a block holds as many regions of a strip as fit in a slot."""
    per_slot = slot_bytes // lane.unit
    if not per_slot:
        raise LayoutMismatch(f"{lane.names[0]}: a page's slice has {lane.unit} bytes, a slot {slot_bytes}")
    regions = range(lane.regions) if regions is None else regions
    if pages <= 0 or not regions:
        return
    shape = len(regions), pages, per_slot
    small = pages * len(regions) <= KEPT_BLOCKS * per_slot // 2
    for region, count, low, wide in _kept(*shape) if small else _rectangles(*shape):
        yield Block(lane.number, regions.start + region, count, first_page + low, wide, count * wide * lane.unit)


def _rectangles(regions: int, pages: int, per_slot: int) -> Iterator[tuple[int, int, int, int]]:
    """(first region, regions, first page, pages) of each block."""
    width = strip_width(pages, regions, per_slot)
    for low in range(0, pages, width):
        wide = min(width, pages - low)
        together = per_slot // wide
        for first in range(0, regions, together):
            yield first, min(together, regions - first), low, wide


@lru_cache(maxsize=64)
def _kept(regions: int, pages: int, per_slot: int) -> tuple[tuple[int, int, int, int], ...]:
    """Of shapes that repeat."""
    return tuple(_rectangles(regions, pages, per_slot))


def block_count(lane: Lane, pages: int, slot_bytes: int) -> int:
    """How many blocks `blocks` yields."""
    per_slot = slot_bytes // lane.unit
    if pages <= 0 or not per_slot:
        return 0
    return _count(pages, lane.regions, per_slot, strip_width(pages, lane.regions, per_slot))


@lru_cache(maxsize=4096)
def strip_width(pages: int, regions: int, per_slot: int) -> int:
    """Pages of a strip: the width among a few that gives the fewest blocks, the widest of equals."""
    least = -(-pages // per_slot)
    widths = {min(pages, per_slot), *(-(-pages // (least + more)) for more in range(_STRIPS_TRIED))}
    return min(widths, key=lambda width: (_count(pages, regions, per_slot, width), -width))


def _count(pages: int, regions: int, per_slot: int, width: int) -> int:
    full, rest = divmod(pages, width)
    count = full * -(-regions // (per_slot // width))
    return count + (-(-regions // (per_slot // rest)) if rest else 0)
