"""How a request's unequal slices travel: what a pair of ranks can do, and what decode picks. Pure."""

from __future__ import annotations

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard, StagingArena
from pdtransfer.peers import real_kind
from pdtransfer.plan import Lane, PairPlan, Strategy

THROUGH_SLOTS = ("staged", "merge")
"""Decode lends slots and scatters."""
PACKS = ("staged", "split")
"""The source packs."""


def arena_of(card: RankCard, kind: MemoryKind) -> StagingArena | None:
    """The arena of a rank for regions of a memory kind as its layout names it."""
    real = real_kind(card, kind)
    return next((a for a in card.staging if a.memory is real), None)


def slot_bytes(strategy: Strategy, lane: Lane, prefill: RankCard, decode: RankCard) -> int:
    """Bytes of a block of the lane at most: what fits in a slot of each side that needs one; 0 when a
    side has none."""
    needed = []
    if strategy in PACKS:
        needed.append(arena_of(prefill, lane.source_kind))
    if strategy in THROUGH_SLOTS:
        needed.append(arena_of(decode, lane.destination_kind))
    return min((a.slot_bytes if a is not None else 0 for a in needed), default=0)


def refused(strategy: Strategy, pair: PairPlan, prefill: RankCard, decode: RankCard) -> str | None:
    """Why these two ranks can't use the strategy, or None. Where every slice is a whole page on both
    sides, and none of them small, there is nothing to choose, and any strategy means direct."""
    if not pair.choosing or (strategy == "sliced" and not pair.unequal):
        return None
    sizes = [slot_bytes(strategy, lane, prefill, decode) for lane in pair.choosing]
    if strategy not in ("direct", "sliced") and not min(sizes):
        return "one of the two ranks has no staging arena for it"
    return pair.allowed(strategy, min(sizes))


def usable(pair: PairPlan, prefill: RankCard, decode: RankCard) -> tuple[Strategy, ...]:
    """Every strategy that is not refused, the one that needs nothing last."""
    if not pair.choosing:
        return ("direct",)
    tried: tuple[Strategy, ...] = ("merge", "staged", "split", "sliced" if pair.unequal else "direct")
    return tuple(s for s in tried if refused(s, pair, prefill, decode) is None)
