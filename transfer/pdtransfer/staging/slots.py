"""Which of this rank's own slots is packed for whom: bounded, shared, never a failure. Pure.

A holder is a peer. One that is slow keeps its slots until its writes are done, so nobody may take them
all: a holder may have at most `most`, and at most twice as many as would then be left (dynamic
thresholds, Choudhury and Hahne 1998): the fewer are free, the fewer each may have. Who gets none asks
again when one came back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

MOST = 4
"""Slots of one holder: one is written while the next ones are packed."""


class PackSlots:
    """Slots 0 .. `count` - 1 of one arena."""

    def __init__(self, count: int, most: int = MOST) -> None:
        self._most = most
        self._free = list(reversed(range(count)))
        """Last in, first out: a slot that was used last is still in the cache."""
        self._holder: dict[int, Hashable] = {}
        self._held: Counter[Hashable] = Counter()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def held(self, holder: Hashable) -> int:
        """Slots of this holder."""
        return self._held[holder]

    def take(self, holder: Hashable) -> int | None:
        """A slot, or None: not now."""
        has = self._held[holder]
        if has >= self._most or has >= 2 * len(self._free):
            return None
        slot = self._free.pop()
        self._holder[slot] = holder
        self._held[holder] += 1
        return slot

    def give(self, slot: int) -> None:
        """Nothing reads the slot any more, or what it sends goes where nothing is taken from. Raises
        ValueError for a slot that nobody holds."""
        if slot not in self._holder:
            raise ValueError(f"slot {slot} is held by nobody")
        holder = self._holder.pop(slot)
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
        self._free.append(slot)
