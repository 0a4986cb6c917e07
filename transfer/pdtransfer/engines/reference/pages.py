"""Which KV pages are whose: a free list over the pool's page numbers. Pure; used by the leader."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class OutOfPages(Exception):
    """Not enough free pages now."""


class PageAllocator:
    """Hands out page numbers 0 .. pages-1; every page is free or held, never both.

    Freed pages go to the end of the list, so that a page rests as long as possible before its reuse."""

    def __init__(self, pages: int) -> None:
        if pages <= 0:
            raise ValueError(f"a pool needs at least one page, not {pages}")
        self._total = pages
        self._free: deque[int] = deque(range(pages))
        self._held: set[int] = set()

    @property
    def total(self) -> int:
        """Pages in the pool."""
        return self._total

    @property
    def available(self) -> int:
        """Pages free now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` distinct pages, or OutOfPages and no change."""
        if count < 0:
            raise ValueError(f"can not allocate {count} pages")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = tuple(self._free.popleft() for _ in range(count))
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Return pages. One that is not held is a bug of the caller and changes nothing."""
        wrong = [p for p in pages if p not in self._held]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages freed twice or never held: {wrong or list(pages)}")
        self._held.difference_update(pages)
        self._free.extend(pages)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that `tokens` tokens fill, the last one maybe in part."""
    return -(-tokens // page_tokens)
