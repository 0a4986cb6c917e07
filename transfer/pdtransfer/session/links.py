"""Prefill side: descriptor lists of both ends of a pair, prepared once for a loaded peer and reused by
every request; a request only adds index arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdtransfer.agent.port import AgentPort, Prepared
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import LayoutMismatch
from pdtransfer.mover.jobs import HANDLE_BYTES, Prepped, prepped
from pdtransfer.peers import Peer, real_kind
from pdtransfer.plan import (
    Block,
    Lane,
    Strategy,
    page_indices,
    pages_table,
    slice_indices,
    slices_table,
    unit_indices,
    units_table,
)
from pdtransfer.plan.match import choices
from pdtransfer.plan.tables import Table
from pdtransfer.session.coverage import Area
from pdtransfer.session.pairs import Pair, Pairs
from pdtransfer.session.strategy import arena_of, refused

Pages = npt.NDArray[np.int64]
OnDone = Callable[[bool], None]

ROWS = 8192
"""Indices computed at once: by the handle they took 3 of 54 ms of a 256 MiB request, on caches that its copies had
emptied. A job in turn holds 130 kB of them."""


@dataclass(eq=False)
class Link:
    """Prepared lists between this rank and one loaded peer, for one choice of memory kinds. A list is
    prepared when it is first asked for; `warm` asks for all that requests may need."""

    agent: AgentPort
    mine: RankCard
    peer: RankCard
    pair: Pair
    _lists: dict[Hashable, Prepared] = field(default_factory=dict)

    def warm(self) -> None:
        """Prepare what any strategy needs, so that no request pays for it. Raises AgentFailure."""
        for lane in self.pair.plan.lanes:
            if lane.whole:
                self.local_pages(lane), self.remote_pages(lane)
            if not lane.chooses:
                continue
            allowed = [s for s in ("sliced", "staged", "merge", "split") if self._allowed(s)]
            if "sliced" in allowed and not lane.whole:
                self._local_slices(lane), self._remote_slices(lane)
            if "staged" in allowed or "split" in allowed:
                self.local_units(lane)
            if "staged" in allowed or "merge" in allowed:
                self.remote_units(lane)
            if "merge" in allowed:
                self.local_pages(lane)
            if "split" in allowed:
                self.remote_pages(lane)

    def _allowed(self, strategy: Strategy) -> bool:
        return refused(strategy, self.pair.plan, self.mine, self.peer) is None

    # --- lists ------------------------------------------------------------------------------

    def local_pages(self, lane: Lane) -> Prepared:
        """Whole pages of this rank's pool."""
        return self._list(("local", "pages", lane.number), None, lane.source_kind, lambda: pages_table(lane.source))

    def remote_pages(self, lane: Lane) -> Prepared:
        """Whole pages of the peer's pool."""
        key = ("remote", "pages", lane.number)
        return self._list(key, self.peer.agent_name, lane.destination_kind, lambda: pages_table(lane.destination))

    def _local_slices(self, lane: Lane) -> Prepared:
        key = ("local", "slices", lane.number)
        return self._list(key, None, lane.source_kind, lambda: slices_table(lane.source, lane))

    def _remote_slices(self, lane: Lane) -> Prepared:
        key = ("remote", "slices", lane.number)
        name = self.peer.agent_name
        return self._list(key, name, lane.destination_kind, lambda: slices_table(lane.destination, lane))

    def local_units(self, lane: Lane) -> Prepared:
        """Pages' slices in this rank's arena."""
        return self._units("local", self.mine, lane.source_kind, lane.unit)

    def remote_units(self, lane: Lane) -> Prepared:
        """Pages' slices in the peer's arena."""
        return self._units("remote", self.peer, lane.destination_kind, lane.unit)

    def _units(self, end: str, card: RankCard, kind: MemoryKind, unit: int) -> Prepared:
        arena = arena_of(card, kind)
        if arena is None:
            raise LayoutMismatch(f"the {card.role.value} rank has no staging arena for {kind}")
        peer = None if end == "local" else card.agent_name
        return self._list((end, "units", arena.memory, unit), peer, kind, lambda: units_table(arena, unit))

    def _list(self, key: Hashable, peer: str | None, kind: MemoryKind, table: Callable[[], Table]) -> Prepared:
        found = self._lists.get(key)
        if found is None:
            card = self.mine if peer is None else self.peer
            found = self._lists[key] = self.agent.prepare(peer, table(), real_kind(card, kind))
        return found

    # --- what is posted ---------------------------------------------------------------------

    def in_place(
        self, lane: Lane, area: Area, source: Pages, destination: Pages, limit: Callable[[], int] = lambda: HANDLE_BYTES
    ) -> Iterator[Prepped]:
        """Pages (or, in a lane of unequal slices, each token's slice) from pool to pool. `source` and
        `destination` are the pool pages of the area's pages; `limit`: most bytes of the next handle. Lazy:
        ROWS indices at a time."""
        local = self.local_pages(lane) if lane.whole else self._local_slices(lane)
        remote = self.remote_pages(lane) if lane.whole else self._remote_slices(lane)
        per_page = 1 if lane.whole else lane.tokens
        width = min(max(1, ROWS // per_page), area.pages)
        together = max(1, ROWS // per_page // width)
        for low in range(0, area.pages, width):
            src, dst = source[low : low + width], destination[low : low + width]
            for first in range(area.first_region, area.first_region + area.regions, together):
                regions = range(first, min(first + together, area.first_region + area.regions))
                if lane.whole:
                    mine = page_indices(lane.source, regions, src)
                    theirs = page_indices(lane.destination, regions, dst)
                else:
                    mine = slice_indices(lane.source, lane, regions, src)
                    theirs = slice_indices(lane.destination, lane, regions, dst)
                yield from prepped(local, mine, remote, theirs, lane.piece, dense=lane.whole, limit=limit)

    def through_slots(
        self,
        lane: Lane,
        block: Block,
        source: Pages,
        destination: Pages,
        mine: int | None,
        theirs: int | None,
        on_done: OnDone,
    ) -> Prepped:
        """One block: from this rank's slot `mine` (or its pages) to the peer's slot `theirs` (or its
        pages). `source` and `destination` are the pool pages of the block's pages."""
        count = block.regions * block.pages
        regions = range(block.first_region, block.first_region + block.regions)
        if mine is None:
            local, local_indices = self.local_pages(lane), page_indices(lane.source, regions, source)
        else:
            local, local_indices = self.local_units(lane), self._slot(self.mine, lane.source_kind, lane, mine, count)
        if theirs is None:
            remote, remote_indices = self.remote_pages(lane), page_indices(lane.destination, regions, destination)
        else:
            remote = self.remote_units(lane)
            remote_indices = self._slot(self.peer, lane.destination_kind, lane, theirs, count)
        pieces = 1 if mine is not None and theirs is not None else count
        return Prepped(local, local_indices, remote, remote_indices, block.nbytes, pieces, on_done)

    @staticmethod
    def _slot(card: RankCard, kind: MemoryKind, lane: Lane, slot: int, count: int) -> npt.NDArray[np.int32]:
        arena = arena_of(card, kind)
        assert arena is not None
        return unit_indices(slot, count, arena.slot_bytes // lane.unit)


class Links:
    """Links by the peer's agent and memory choice. What was prepared holds until the agent loads that
    peer anew; a request that was queued before keeps its lists until it ends."""

    def __init__(self, agent: Callable[[], AgentPort], mine: Callable[[], RankCard], pairs: Pairs) -> None:
        self._agent = agent
        self._mine = mine
        self._pairs = pairs
        self._held: dict[str, tuple[Hashable, dict[Hashable, Link]]] = {}

    def get(
        self, peer: Peer, card: RankCard, source: MemoryKind | None = None, destination: MemoryKind | None = None
    ) -> Link:
        """The link to a loaded peer (to the generation of that card). Raises LayoutMismatch, StaleRegistration."""
        mine, pair = self._mine(), self._pairs.get(card, source, destination)
        epoch = (peer.loads, mine.agent_name)
        held = self._held.get(card.agent_name)
        if held is None or held[0] != epoch:
            held = self._held[card.agent_name] = (epoch, {})
        link = held[1].get(pair.memories)
        if link is None or link.pair is not pair:
            link = held[1][pair.memories] = Link(self._agent(), mine, card, pair)
        return link

    def warm(self, peer: Peer, card: RankCard) -> None:
        """Prepare all that requests may need."""
        for destination in choices(card.layout):
            for source in choices(self._mine().layout):
                self.get(peer, card, source, destination).warm()

    def forget(self, agent_name: str) -> None:
        """The agent knows that peer no more."""
        self._held.pop(agent_name, None)
