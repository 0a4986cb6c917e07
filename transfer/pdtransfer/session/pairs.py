"""Plans of rank pairs: made once for a pair of cards and a choice of memory kinds, then kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.layout import RankLayout
from pdtransfer.peers import PeerKey, key_of, required_askers
from pdtransfer.plan import PairPlan, RowMap, Strategy, pair_plan, row_map
from pdtransfer.plan.match import choices

Memories = tuple[MemoryKind | None, MemoryKind | None]
"""Of the source and of the destination."""


@dataclass(eq=False)
class Pair:
    """One plan, and the row maps that were asked for. Any thread may use it."""

    plan: PairPlan
    memories: Memories
    choices: dict[Hashable, Strategy] = field(default_factory=dict)
    """Strategies chosen so far, by all that the choice depends on."""
    _rows: dict[tuple[int, bool], RowMap] = field(default_factory=dict)

    def same_destination(self, other: Pair) -> bool:
        """The lanes of both end in the same regions (they may begin in memory of another kind)."""
        mine, theirs = self.plan.lanes, other.plan.lanes
        return len(mine) == len(theirs) and all(
            a.unit == b.unit and a.whole == b.whole and np.array_equal(a.destination.addresses, b.destination.addresses)
            for a, b in zip(mine, theirs, strict=True)
        )

    def rows(self, lane: int, *, source: bool) -> RowMap:
        """Where the slices of a lane lie on one side."""
        found = self._rows.get((lane, source))
        if found is None:
            held = self.plan.lanes[lane]
            found = self._rows[lane, source] = row_map(held, held.source if source else held.destination)
        return found


@dataclass(eq=False)
class _Known:
    """A peer's layout beside this rank's. `dual`: the source, the destination registered a layer in both
    memory kinds. Cards come and go (generations, rosters); the same layout is the same pair."""

    layouts: tuple[RankLayout, RankLayout]
    dual: tuple[bool, bool]
    equals: list[tuple[RankLayout, RankLayout]] = field(default_factory=list)
    """Other objects that were found to be equal."""
    pairs: dict[Memories, Pair] = field(default_factory=dict)
    askers: int = 0

    def fits(self, mine: RankLayout, other: RankLayout) -> bool:
        for held in (self.layouts, *self.equals):
            if held[0] is mine and held[1] is other:
                return True
        if self.layouts != (mine, other):
            return False
        self.equals = [*self.equals[-3:], (mine, other)]
        return True


class Pairs:
    """Plans between this rank and its peers. `mine` is this rank's card, read anew each time."""

    def __init__(self, mine: Callable[[], RankCard]) -> None:
        self._mine = mine
        self._known: dict[PeerKey, _Known] = {}

    def get(self, card: RankCard, source: MemoryKind | None = None, destination: MemoryKind | None = None) -> Pair:
        """The plan between this rank and the peer of that card. The kinds only count where a rank
        registered a layer in both; there, VRAM stands for the source's if it is not given. Raises
        LayoutMismatch or StaleRegistration."""
        known = self._of(card)
        memories = (
            (source or MemoryKind.VRAM) if known.dual[0] else None,
            destination if known.dual[1] else None,
        )
        pair = known.pairs.get(memories)
        if pair is None:
            prefill, decode = self._roles(card)
            made = pair_plan(prefill.layout, decode.layout, source_memory=memories[0], destination_memory=memories[1])
            pair = known.pairs[memories] = Pair(made, memories)
        return pair

    def askers(self, card: RankCard) -> int:
        """How many ranks of this decode engine ask that prefill rank for one room."""
        known = self._of(card)
        if not known.askers:
            known.askers = required_askers(card, self._mine())
        return known.askers

    def _of(self, card: RankCard) -> _Known:
        mine, key = self._mine(), key_of(card)
        known = self._known.get(key)
        if known is None or not known.fits(mine.layout, card.layout):
            dual = tuple(len(choices(c.layout)) > 1 for c in self._roles(card))
            known = self._known[key] = _Known((mine.layout, card.layout), (dual[0], dual[1]))
        return known

    def _roles(self, card: RankCard) -> tuple[RankCard, RankCard]:
        mine = self._mine()
        return (mine, card) if mine.role is Role.PREFILL else (card, mine)

    def forget(self, key: PeerKey) -> None:
        """The peer was let go."""
        self._known.pop(key, None)
