"""Decode's arena slots: lent by ticket, in turn over peers and then over legs, kept from use after a failure. Pure.

A leg (one source's part of one request) says how many slots it wants over its whole life and holds at
most `PER_LEG` of an arena at a time. A slot is lent again once its bytes were scattered (`spend`), or
once nothing of its leg can land any more (`release`). Until then the slots of a failed leg are in
quarantine: a late write can hit them, and nothing else of this rank. A peer that is slow, or stopped,
keeps its slots, so beyond its first one it may hold at most twice as many as stay free (dynamic thresholds,
Choudhury and Hahne 1998): the others find some.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from pdtransfer.contract.base import MemoryKind

PER_LEG = 4
"""Slots of one arena that one leg holds at a time: one is written while others are scattered."""


@dataclass(frozen=True)
class Ticket:
    """One slot lent to one leg. `number` is unique in this rank's life."""

    number: int
    arena: MemoryKind
    slot: int
    leg: Hashable
    peer: Hashable


@dataclass
class _Wish:
    peer: Hashable
    total: int = 0
    granted: int = 0
    out: int = 0
    queued: bool = False


@dataclass
class _Arena:
    slots: int
    slot_bytes: int
    free: list[int]
    """Last in, first out: a slot that was just scattered is still in the cache."""
    turns: dict[Hashable, deque[Hashable]] = field(default_factory=dict)
    """By peer, in turn: legs that may be lent a slot now, in turn."""
    wishes: dict[Hashable, _Wish] = field(default_factory=dict)
    held: Counter[Hashable] = field(default_factory=Counter)
    """Slots by peer, those in quarantine too."""

    def fair(self, peer: Hashable) -> bool:
        """It may be lent one more: its first, or one that leaves at least half as many as it then holds."""
        return not self.held[peer] or self.held[peer] + 1 <= 2 * (len(self.free) - 1)

    def back(self, ticket: Ticket) -> None:
        """Its slot is free."""
        self.free.append(ticket.slot)
        self.held[ticket.peer] -= 1
        if not self.held[ticket.peer]:
            del self.held[ticket.peer]


class SlotBook:
    """Who holds which slot. `arenas`: slots and bytes of a slot by memory kind."""

    def __init__(self, arenas: Mapping[MemoryKind, tuple[int, int]], per_leg: int = PER_LEG) -> None:
        self._arenas = {
            kind: _Arena(slots, slot_bytes, list(reversed(range(slots))))
            for kind, (slots, slot_bytes) in arenas.items()
        }
        self._per_leg = per_leg
        self._numbers = itertools.count(1)
        self._out: dict[Hashable, dict[int, Ticket]] = {}
        """By leg: tickets whose slots are not free, by number."""
        self._quarantined: set[Hashable] = set()

    def slot_bytes(self, arena: MemoryKind) -> int | None:
        """Bytes of a slot; None when there is no such arena."""
        held = self._arenas.get(arena)
        return held.slot_bytes if held else None

    def want(self, peer: Hashable, leg: Hashable, arena: MemoryKind, total: int) -> None:
        """The leg wants `total` slots over its whole life; a smaller number than before changes nothing."""
        held = self._arenas[arena]
        if leg in self._quarantined:
            return
        wish = held.wishes.setdefault(leg, _Wish(peer))
        wish.total = max(wish.total, total)
        self._queue(held, leg, wish)

    def roomy(self, arena: MemoryKind) -> bool:
        """More than half of the arena is free, and nobody waits."""
        held = self._arenas.get(arena)
        return held is not None and not held.turns and 2 * len(held.free) > held.slots

    def lend(self) -> Iterator[Ticket]:
        """Lend free slots to who waits, one by one, in turn."""
        for kind, held in self._arenas.items():
            while held.free:
                peer = next((p for p in held.turns if held.fair(p)), None)
                if peer is None:
                    break
                legs = held.turns.pop(peer)
                leg = legs.popleft()
                if legs:
                    held.turns[peer] = legs  # to the end of the line
                wish = held.wishes[leg]
                ticket = Ticket(next(self._numbers), kind, held.free.pop(), leg, peer)
                wish.queued = False
                wish.granted += 1
                wish.out += 1
                held.held[peer] += 1
                self._out.setdefault(leg, {})[ticket.number] = ticket
                self._queue(held, leg, wish)
                yield ticket

    def out(self, leg: Hashable) -> tuple[Ticket, ...]:
        """Tickets of this leg that are neither spent nor released, oldest first."""
        return tuple(self._out.get(leg, {}).values())

    def find(self, leg: Hashable, number: int) -> Ticket | None:
        """A ticket of this leg that is out."""
        return self._out.get(leg, {}).get(number)

    def spend(self, ticket: Ticket) -> None:
        """The slot's bytes are scattered: it is free."""
        held = self._arenas[ticket.arena]
        if self._out.get(ticket.leg, {}).pop(ticket.number, None) is None:
            return
        if not self._out[ticket.leg]:
            del self._out[ticket.leg]
        held.back(ticket)
        wish = held.wishes.get(ticket.leg)
        if wish is not None:
            wish.out -= 1
            self._queue(held, ticket.leg, wish)

    def quarantine(self, leg: Hashable) -> None:
        """The leg failed and may still write: it gets nothing more, and its slots go to nobody."""
        self._drop(leg)
        if leg in self._out:
            self._quarantined.add(leg)

    def release(self, leg: Hashable) -> None:
        """The leg is over and nothing of it can land: all its slots are free."""
        self._drop(leg)
        self._quarantined.discard(leg)
        for ticket in self._out.pop(leg, {}).values():
            self._arenas[ticket.arena].back(ticket)

    def counts(self) -> dict[str, int]:
        """Slots over all arenas by state: free, granted, quarantined."""
        quarantined = sum(len(self._out.get(leg, ())) for leg in self._quarantined)
        out = sum(len(tickets) for tickets in self._out.values())
        free = sum(len(held.free) for held in self._arenas.values())
        return {"free": free, "granted": out - quarantined, "quarantined": quarantined}

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots that a late write may hit."""
        return sum(
            self._arenas[ticket.arena].slot_bytes
            for leg in self._quarantined
            for ticket in self._out.get(leg, {}).values()
        )

    def _queue(self, held: _Arena, leg: Hashable, wish: _Wish) -> None:
        if not wish.queued and wish.granted < wish.total and wish.out < self._per_leg:
            wish.queued = True
            held.turns.setdefault(wish.peer, deque()).append(leg)

    def _drop(self, leg: Hashable) -> None:
        for held in self._arenas.values():
            wish = held.wishes.pop(leg, None)
            if wish is not None and wish.queued:
                held.turns[wish.peer].remove(leg)
                if not held.turns[wish.peer]:
                    del held.turns[wish.peer]
