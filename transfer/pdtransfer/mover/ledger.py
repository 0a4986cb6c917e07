"""Who owns a destination page: free, owned by one transfer, or quarantined.

A page leaves quarantine only when no write for it can still land: the source
incarnation acknowledged the drain, its death is confirmed, or the receiving agent was destroyed.
A deadline frees nothing. Not thread-safe; the endpoint holds a lock around it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pdtransfer.errors import LayoutMismatch


@dataclass
class _Holding:
    pages: frozenset[Hashable]
    page_bytes: int
    writers: set[Hashable]
    quarantined: bool = False


class PageLedger:
    """Pages by transfer. A transfer's writers are the source ranks that may still write."""

    def __init__(self) -> None:
        self._holdings: dict[Hashable, _Holding] = {}
        self._owner: dict[Hashable, Hashable] = {}

    def acquire(
        self, transfer: Hashable, pages: Iterable[Hashable], writers: Iterable[Hashable], page_bytes: int = 0
    ) -> None:
        """Give pages to a transfer whose `writers` may write. Refuses pages that another transfer
        owns or that are in quarantine."""
        wanted = frozenset(pages)
        if transfer in self._holdings:
            raise LayoutMismatch(f"{transfer} is already receiving")
        for page in wanted:
            if page in self._owner:
                held = self._holdings[self._owner[page]]
                state = "quarantined after" if held.quarantined else "owned by"
                raise LayoutMismatch(f"page {page} is {state} {self._owner[page]}")
        self._holdings[transfer] = _Holding(wanted, page_bytes, set(writers))
        self._owner.update(dict.fromkeys(wanted, transfer))

    def writer_joined(self, transfer: Hashable, writer: Hashable) -> None:
        """One more may write: this rank's own scatter."""
        self._holdings[transfer].writers.add(writer)

    def writer_settled(self, transfer: Hashable, writer: Hashable) -> None:
        """`writer` can write no more for this transfer (done, drain acknowledged, or dead)."""
        held = self._holdings.get(transfer)
        if held is None:
            return
        held.writers.discard(writer)
        if held.quarantined and not held.writers:
            self._drop(transfer)

    def quarantine(self, transfer: Hashable) -> None:
        """The transfer failed: its pages wait for the writers that are left."""
        held = self._holdings.get(transfer)
        if held is None:
            return
        held.quarantined = True
        if not held.writers:
            self._drop(transfer)

    def complete(self, transfer: Hashable) -> None:
        """The transfer succeeded: every writer settled, the engine keeps using the pages."""
        held = self._holdings.get(transfer)
        if held is not None:
            if held.writers:
                raise RuntimeError(f"{transfer} completed with writers left: {held.writers}")
            self._drop(transfer)

    def releasable(self, transfer: Hashable) -> bool:
        """True when no late write can land in the transfer's pages."""
        return transfer not in self._holdings

    def writers(self, transfer: Hashable) -> frozenset[Hashable]:
        """Sources that may still write for this transfer."""
        held = self._holdings.get(transfer)
        return frozenset(held.writers) if held else frozenset()

    @property
    def owned_pages(self) -> int:
        """Pages of transfers that go on."""
        return sum(len(h.pages) for h in self._holdings.values() if not h.quarantined)

    @property
    def quarantined_pages(self) -> int:
        """Pages of failed transfers with a writer left."""
        return sum(len(h.pages) for h in self._holdings.values() if h.quarantined)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the same."""
        return sum(len(h.pages) * h.page_bytes for h in self._holdings.values() if h.quarantined)

    def _drop(self, transfer: Hashable) -> None:
        for page in self._holdings.pop(transfer).pages:
            del self._owner[page]
