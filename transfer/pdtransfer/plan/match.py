"""Which region of a prefill rank goes to which region of a decode rank, and which bytes of a row. Pure.

Everything about a pair that can be refused is refused here, by name. Head math: a region's row of one
token holds `heads.count` heads of `item_bytes / (page_tokens * heads.count)` bytes. With the common
heads [lo, hi), a piece starts `(lo - heads.first)` heads into the row on each side. K and V may differ
in bytes per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.layout import RankLayout, Region, RegionKind
from pdtransfer.errors import LayoutMismatch, StaleRegistration

Key = tuple[int, RegionKind, bool]
_PER_HEAD = (RegionKind.KEY, RegionKind.VALUE)


@dataclass(frozen=True)
class RegionPair:
    """One region on each side: byte offsets within a token's row, and the piece's length (bytes).
    `rows` is 0 when whole pages go to whole pages, else the tokens of a page."""

    source: Region
    destination: Region
    rows: int
    source_offset: int
    destination_offset: int
    length: int


def kind_of(region: Region) -> MemoryKind:
    """The region's memory kind; raises StaleRegistration when the card names none."""
    if region.memory is None:
        raise StaleRegistration(
            f"the registration of layer {region.layer} {region.kind} names no memory kind (VRAM or DRAM)"
        )
    return region.memory


def choices(layout: RankLayout) -> tuple[MemoryKind | None, ...]:
    """Memory kinds a request has to choose between, because a layer lies in both; else only None."""
    keys = [region.key for region in layout.regions]
    return tuple(MemoryKind) if len(set(keys)) < len(keys) else (None,)


def chosen_regions(layout: RankLayout, side: str, memory: MemoryKind | None) -> dict[Key, Region]:
    """Regions by key, one each; `memory` chooses where a layer is registered in both kinds."""
    if not layout.regions:
        raise StaleRegistration(f"the {side} rank registered no KV memory segments")
    found: dict[Key, Region] = {}
    for region in layout.regions:
        kind = kind_of(region)
        if region.key not in found:
            found[region.key] = region
            continue
        held = kind_of(found[region.key])
        if held is kind:
            raise LayoutMismatch(f"the {side} rank registered layer {region.layer} {region.kind} twice in {kind}")
        if memory is None:
            raise LayoutMismatch(
                f"the {side} rank registered layer {region.layer} {region.kind} twice ({held} and {kind}); "
                "the request must say which"
            )
        if kind is memory:
            found[region.key] = region
    return found


def region_pairs(
    source: RankLayout,
    destination: RankLayout,
    source_memory: MemoryKind | None,
    destination_memory: MemoryKind | None,
) -> list[RegionPair]:
    """Pairs by (layer, kind, draft), in that order. A layer only one side holds belongs to another
    pipeline stage; a layer both hold must have the same region kinds."""
    if source.page_tokens != destination.page_tokens:
        raise LayoutMismatch(f"prefill pages hold {source.page_tokens} tokens, decode pages {destination.page_tokens}")
    if source.kv_dtype != destination.kv_dtype:
        raise LayoutMismatch(f"prefill stores KV as {source.kv_dtype}, decode as {destination.kv_dtype}")
    ours = chosen_regions(source, "prefill", source_memory)
    theirs = chosen_regions(destination, "decode", destination_memory)
    common = {(r.layer, r.draft) for r in ours.values()} & {(r.layer, r.draft) for r in theirs.values()}
    if not common:
        raise LayoutMismatch("the two ranks hold no common layer")
    pairs: list[RegionPair] = []
    for key in sorted(ours.keys() | theirs.keys()):  # sorted: the first refusal is always the same one
        region = ours.get(key) or theirs[key]
        if (region.layer, region.draft) not in common:
            continue
        if key not in ours or key not in theirs:
            side = "prefill" if key in ours else "decode"
            raise LayoutMismatch(f"only the {side} rank registered layer {region.layer} {region.kind}")
        pair = _pair(source, destination, ours[key], theirs[key])
        if pair is not None:
            pairs.append(pair)
    if not pairs:
        raise LayoutMismatch("the two ranks hold no common KV head")
    return sorted(pairs, key=lambda p: (p.source.draft, p.source.layer, p.source.kind))


def _pair(source: RankLayout, destination: RankLayout, ours: Region, theirs: Region) -> RegionPair | None:
    name = f"layer {ours.layer} {ours.kind}"
    if ours.pool != theirs.pool:
        raise LayoutMismatch(f"{name}: its pages are of pool {ours.pool!r} at prefill and {theirs.pool!r} at decode")
    if ours.kind not in _PER_HEAD or source.heads is None or destination.heads is None:
        if (source.heads is None) != (destination.heads is None):
            raise LayoutMismatch(f"{name}: one rank splits its rows by head and the other does not")
        if ours.item_bytes != theirs.item_bytes:
            raise LayoutMismatch(f"{name}: prefill pages have {ours.item_bytes} bytes, decode {theirs.item_bytes}")
        s, d = source.coordinates, destination.coordinates
        if source.heads is not None and s.tp != d.tp * s.tp_size // d.tp_size:
            return None  # a row every rank holds: one copy is enough, this rank is not its sender
        return RegionPair(ours, theirs, 0, 0, 0, ours.item_bytes)
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
        return RegionPair(ours, theirs, 0, 0, 0, ours.item_bytes)
    return RegionPair(ours, theirs, tokens, (low - mine.first) * head, (low - other.first) * head, count * head)
