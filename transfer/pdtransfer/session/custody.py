"""What a decode rank holds for its receives, how a receive ends, and when what it held is free again.

Pages of legs that are written in place, and slots of the others, are not free while a late write may still
hit them: until the leg is settled (done, acknowledged, its source dead, or the written agent destroyed).
A deadline frees nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import LayoutMismatch, TransferError
from pdtransfer.mover.ledger import PageLedger
from pdtransfer.peers import Peer, PeerKey, key_of
from pdtransfer.plan.pages import spaces_apart
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.frames import Abort, AbortAck, Done, Failed, SlotFilled, SlotsWanted, Started
from pdtransfer.session.intake import Intake
from pdtransfer.session.pairs import Pairs
from pdtransfer.session.receives import Leg, Receive
from pdtransfer.session.wiring import Wiring

FromSource = Started | Done | Failed | AbortAck | SlotsWanted | SlotFilled


class Custody:
    """Receives by their key. Everything but `acquire` and `releasable` runs in the core's thread."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot) -> None:
        self._core = core
        self._wiring = wiring
        self._lock = threading.Lock()
        self.ledger = PageLedger()
        self._live: dict[tuple[int, int], Receive] = {}
        self._settling: dict[tuple[int, int], Receive] = {}
        self._taken: set[tuple[int, int]] = set()
        """Keys of both, and of those that begin: an identity whose pages are free may still have slots that are not."""
        self.pairs = Pairs(lambda: wiring.card)
        self.intake = Intake(
            core,
            wiring,
            depot,
            self.pairs,
            fail=lambda receive, error: self._fail(receive, error),
            arrived=lambda receive, leg: self._arrived(receive, leg),
            lives=self._lives,
            writing=self._scatters,
        )

    @property
    def inflight(self) -> int:
        """Receives that go on or whose sources have not settled."""
        return len(self._live) + len(self._settling)

    @property
    def queued(self) -> int:
        """Receives of which nothing has come yet."""
        return sum(not receive.progressing for receive in self._live.values())

    @property
    def quarantined_pages_bytes(self) -> int:
        """Bytes of pages that a late write may still hit."""
        with self._lock:
            return self.ledger.quarantined_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of pages and slots that a late write may still hit."""
        return self.quarantined_pages_bytes + self.intake.book.quarantined_bytes

    def acquire(
        self,
        key: tuple[int, int],
        legs: Mapping[PeerKey, Leg],
        pages: Sequence[int],
        pools: Mapping[str, Sequence[int]],
        memory: MemoryKind | None = None,
    ) -> None:
        """Take a receive's pages. Raises LayoutMismatch when one of them is not free."""
        layout = self._wiring.card.layout
        apart = spaces_apart(layout, memory)
        page_bytes = sum(r.item_bytes for r in layout.regions if not r.pool and ("" not in apart or r.memory is memory))
        writers = [place for place, leg in legs.items() if leg.in_place]
        owned: list[Hashable] = []
        for pool, held in {"": pages, **pools}.items():
            where = (pool, memory.value) if memory is not None and pool in apart else (pool,) if pool else ()
            owned += [(*where, int(p)) for p in held] if where else (int(p) for p in held)
        with self._lock:
            if key in self._taken:
                raise LayoutMismatch(f"{key} is already receiving, or its source has not let go of it")
            self.ledger.acquire(key, owned, writers, page_bytes)
            self._taken.add(key)

    def releasable(self, key: tuple[int, int]) -> bool:
        """Its pages can not be hit by a late write."""
        with self._lock:
            return self.ledger.releasable(key)

    # --- who is who -------------------------------------------------------------------------

    def _lives(self, receive: Receive) -> bool:
        return self._live.get(receive.key) is receive

    def _legs_of(self, peer: Peer) -> list[tuple[Receive, Leg]]:
        return [
            (receive, leg)
            for receive in (*self._live.values(), *self._settling.values())
            for leg in receive.legs.values()
            if leg.peer is peer
        ]

    def _find(self, peer: Peer, frame: FromSource) -> tuple[Receive | None, Leg | None]:
        key = (frame.room, frame.attempt)
        receive = self._live.get(key) or self._settling.get(key)
        leg = receive.legs.get(peer.key) if receive else None
        if leg is None or leg.peer is not peer or leg.request.identity != frame.identity:
            self._core.count("stray_frames_total")
            return None, None
        return receive, leg

    def owes(self, peer: Peer) -> bool:
        """A fence from this peer is still wanted."""
        return any(leg.sent and not leg.settled for _, leg in self._legs_of(peer))

    # --- ends -------------------------------------------------------------------------------

    def _arrived(self, receive: Receive, leg: Leg) -> None:
        """Something of the leg is in its pages: the leg may be over, and the receive with it."""
        raise NotImplementedError

    def _settle(self, receive: Receive, leg: Leg, fence: str = "acknowledged") -> None:
        """Nothing of the leg can land any more."""
        if leg.settled:
            return
        leg.settled = True
        with self._lock:
            self.ledger.writer_settled(receive.key, key_of(leg.card))
        lives = self._lives(receive)
        if leg.done or not lives:
            self.intake.release(leg)
        if not lives and leg.sent:
            self._core.count("quarantine_released_total", fence=fence)
        settled = all(other.settled for other in receive.legs.values())
        if settled and self._settling.pop(receive.key, None) is not None:
            self._give_up(receive)
            self._core.changed()

    def _succeed(self, receive: Receive) -> None:
        del self._live[receive.key]
        self._progress(receive, False)
        with self._lock:
            self.ledger.complete(receive.key)
            self._taken.discard(receive.key)
        first = min(receive.legs.values(), key=lambda leg: leg.card.rank)
        receive.transfer.received_metadata = first.metadata
        self._measure(receive)
        receive.transfer.cell.move(TransferState.SUCCESS)
        self._core.changed()

    def _fail(self, receive: Receive, error: TransferError) -> None:
        if self._live.pop(receive.key, None) is None:
            return
        self._progress(receive, False)
        error = error.about(room=receive.key[0], bytes_done=error.bytes_done or receive.bytes_done)
        with self._lock:
            self.ledger.quarantine(receive.key)
        self._settling[receive.key] = receive
        receive.failed_at = time.monotonic()
        for leg in receive.legs.values():
            self.intake.quarantine(leg)
            if leg.settled:
                self.intake.release(leg)
            elif not leg.sent:
                self._settle(receive, leg)
            elif leg.peer is not None:
                self._wiring.send(leg.peer, Abort(**leg.request.ids, reason=f"{error.reason}: {error.message}"))
        if all(leg.settled for leg in receive.legs.values()) and self._settling.pop(receive.key, None) is not None:
            self._give_up(receive)
        self._core.ended(receive.began, receive.strategy, error)
        receive.transfer.cell.move(TransferState.FAILED, error)
        self._core.changed()

    def _give_up(self, receive: Receive) -> None:
        with self._lock:
            self._taken.discard(receive.key)

    def _measure(self, receive: Receive) -> None:
        self._core.ended(receive.began, receive.strategy, None)
        self._core.metrics.observe("transfer_bytes", receive.bytes_done)
        for leg in receive.legs.values():
            lane = leg.peer.verdict.transport if leg.peer is not None else ""
            how = {"strategy": leg.request.strategy, "transport": lane or "Unknown"}
            self._core.count("bytes_total", leg.nbytes, direction="received", **how)

    # --- what goes on -----------------------------------------------------------------------

    def _scatters(self, receive: Receive, leg: Leg, begins: bool) -> None:
        """A scatter that goes on writes into the pages, whoever gave the request up meanwhile."""
        writer = ("scatter", key_of(leg.card))
        with self._lock:
            if begins:
                self.ledger.writer_joined(receive.key, writer)
            elif not leg.scattering:
                self.ledger.writer_settled(receive.key, writer)

    def _progress(self, receive: Receive, wanted: bool) -> None:
        """A target of TCP writes must progress while its bytes come, and only then."""
        if wanted != receive.progressing:
            receive.progressing = wanted
            self._core.hot(1 if wanted else -1)
