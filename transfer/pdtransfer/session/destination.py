"""Decode side: ask every prefill rank that holds a part, wait, and never give pages back early.

A leg is one prefill rank's part of one room. Requests are repeated after a reconnect (the source
knows identities it served); aborts too, until every leg is settled: done, drain acknowledged, or
its source confirmed dead.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import threading
import time
from collections.abc import Sequence

from pdtransfer import errors
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import Aborted, DeadlineExceeded, LayoutMismatch, PeerUnreachable, TransferError
from pdtransfer.mover.ledger import PageLedger
from pdtransfer.peers import Peer, PeerKey, key_of, required_askers
from pdtransfer.plan import check_pages, plan
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.frames import MAX_PAGES, Abort, AbortAck, Done, Failed, Request, Started
from pdtransfer.session.receives import BY_REASON, Leg, Receive
from pdtransfer.session.transfers import ReceiveTransfer
from pdtransfer.session.wiring import Wiring


class DestinationSide:
    """Receives. `open` runs in the engine's thread, everything else in the core's."""

    def __init__(self, core: Core, wiring: Wiring) -> None:
        self._core = core
        self._wiring = wiring
        self._lock = threading.Lock()
        self.ledger = PageLedger()
        self._live: dict[tuple[int, int], Receive] = {}
        self._settling: dict[tuple[int, int], Receive] = {}
        self._serials = itertools.count(1)
        core.ticks.append(self._tick)

    @property
    def inflight(self) -> int:
        """Receives that go on or whose sources have not settled."""
        return len(self._live) + len(self._settling)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of pages that a late write may still hit."""
        with self._lock:
            return self.ledger.quarantined_bytes

    # --- the engine's thread ----------------------------------------------------------------

    def open(
        self,
        room: int,
        attempt: int,
        sources: Sequence[RankCard],
        pages: Sequence[int],
        first_page: int,
        tokens: int,
    ) -> ReceiveTransfer:
        """Check, take the pages and start asking."""
        mine = self._wiring.card
        size = mine.layout.page_tokens
        if len(pages) > MAX_PAGES:
            raise LayoutMismatch(f"{len(pages)} pages in one request, {MAX_PAGES} may be", room=room)
        pages = tuple(int(p) for p in pages)
        check_pages(mine.layout, pages, "decode")
        if first_page < 0 or first_page + len(pages) != -(-tokens // size):
            raise LayoutMismatch(f"{len(pages)} pages from page {first_page} do not hold {tokens} tokens", room=room)
        key = (room, attempt)
        serial = next(self._serials)
        legs: dict[PeerKey, Leg] = {}
        for card in sources:
            request = Request(
                room=room,
                attempt=attempt,
                source=card.incarnation,
                destination=mine.incarnation,
                serial=serial,
                pages=pages,
                first_page=first_page,
                tokens=tokens,
                required=required_askers(card, mine),
            )
            page_bytes = plan(card.layout, mine.layout, (0,), (0,)).nbytes
            legs[key_of(card)] = Leg(card, request, page_bytes * len(pages))
        page_bytes = sum(r.item_bytes for r in mine.layout.regions)
        with self._lock:
            self.ledger.acquire(key, pages, legs, page_bytes)
        transfer = ReceiveTransfer(
            room,
            attempt,
            abort=lambda reason: self._core.call(self._abort, key, reason),
            releasable=lambda: self._releasable(key),
        )
        self._core.track(transfer.cell)
        now = time.monotonic()
        receive = Receive(
            transfer,
            key,
            legs,
            now + self._core.timeouts.waiting,
            now + self._core.timeouts.connect,
        )
        self._core.call(self._begin, receive)
        return transfer

    def _releasable(self, key: tuple[int, int]) -> bool:
        with self._lock:
            return self.ledger.releasable(key)

    # --- the core's thread ------------------------------------------------------------------

    def _begin(self, receive: Receive) -> None:
        self._live[receive.key] = receive
        for key, leg in receive.legs.items():
            leg.peer = self._wiring.current(key, leg.card)
            if leg.peer is None:
                self._fail(receive, errors.PeerReplaced("the roster changed", peer=str(key)))
                return
            if leg.peer.channel is not None:
                leg.sent = True
                self._wiring.send(leg.peer, leg.request)
        self._core.changed()

    def on_connected(self, peer: Peer) -> None:
        """Repeat what the source may have missed."""
        for receive, leg in self._legs_of(peer):
            if receive.key in self._live:
                if not leg.done:
                    leg.sent = True
                    self._wiring.send(peer, leg.request)
            elif leg.sent and not leg.settled:
                self._wiring.send(peer, Abort(**leg.request.ids, reason="settle"))

    def on_started(self, peer: Peer, frame: Started) -> None:
        """Bytes are coming."""
        receive, leg = self._find(peer, frame)
        if receive is None or leg is None or receive.key not in self._live:
            return
        receive.deadline = time.monotonic() + self._core.timeouts.transfer
        receive.transfer.cell.move(TransferState.TRANSFERRING)
        self._progress(receive, True)

    def on_done(self, peer: Peer, frame: Done) -> None:
        """One source has written everything."""
        receive, leg = self._find(peer, frame)
        if receive is None or leg is None or leg.settled:
            return
        self._settle(receive, leg)
        if receive.key not in self._live:
            return
        if frame.nbytes != leg.nbytes:
            self._fail(
                receive, LayoutMismatch(f"{frame.nbytes} bytes came, {leg.nbytes} were asked for", peer=peer.label)
            )
            return
        try:
            leg.metadata = base64.b64decode(frame.metadata, validate=True)
        except (binascii.Error, ValueError):
            self._fail(receive, TransferError("the metadata is not base64", peer=peer.label))
            return
        leg.done = True
        receive.bytes_done += frame.nbytes
        if all(other.done for other in receive.legs.values()):
            self._succeed(receive)

    def on_failed(self, peer: Peer, frame: Failed) -> None:
        """A source gave up."""
        receive, leg = self._find(peer, frame)
        if receive is None or leg is None:
            return
        if frame.settled:
            self._settle(receive, leg)
        kind = BY_REASON.get(frame.reason, TransferError)
        self._fail(
            receive,
            kind(frame.message, peer=peer.label, rank=peer.card.rank, bytes_done=receive.bytes_done + frame.nbytes),
        )

    def on_abort_ack(self, peer: Peer, frame: AbortAck) -> None:
        """A source's handles have all settled."""
        receive, leg = self._find(peer, frame)
        if receive is None or leg is None:
            return
        self._settle(receive, leg)
        self._fail(receive, Aborted("the source ended this attempt", peer=peer.label))

    def on_peer_gone(self, peer: Peer, error: TransferError) -> None:
        """Live receives from it fail; their pages wait for a fence."""
        for receive, leg in self._legs_of(peer):
            if not leg.done:
                self._fail(receive, error)

    def on_drained(self, peer: Peer) -> None:
        """Nothing of this source can land any more: it is dead and its last bytes were progressed,
        or it answered that it does not know us and has nothing in flight."""
        for receive, leg in self._legs_of(peer):
            if leg.sent and not leg.settled:
                self._fail(receive, errors.PeerUnreachable("the source ended", peer=peer.label))
                self._core.count("quarantine_released_total", fence="source_end")
                self._settle(receive, leg)

    def owes(self, peer: Peer) -> bool:
        """A fence from this peer is still wanted."""
        return any(leg.sent and not leg.settled for _, leg in self._legs_of(peer))

    def _legs_of(self, peer: Peer) -> list[tuple[Receive, Leg]]:
        return [
            (receive, leg)
            for receive in (*self._live.values(), *self._settling.values())
            for leg in receive.legs.values()
            if leg.peer is peer
        ]

    def _find(self, peer: Peer, frame: Started | Done | Failed | AbortAck) -> tuple[Receive | None, Leg | None]:
        key = (frame.room, frame.attempt)
        receive = self._live.get(key) or self._settling.get(key)
        leg = receive.legs.get(peer.key) if receive else None
        if leg is None or leg.peer is not peer or leg.request.identity != frame.identity:
            self._core.count("stray_frames")
            return None, None
        return receive, leg

    def _abort(self, key: tuple[int, int], reason: str) -> None:
        receive = self._live.get(key)
        if receive is not None:
            self._fail(receive, Aborted(f"decode gave up: {reason}"))

    def _settle(self, receive: Receive, leg: Leg) -> None:
        leg.settled = True
        with self._lock:
            self.ledger.writer_settled(receive.key, key_of(leg.card))
        settled = all(other.settled for other in receive.legs.values())
        if settled and self._settling.pop(receive.key, None) is not None:
            self._core.changed()

    def _succeed(self, receive: Receive) -> None:
        del self._live[receive.key]
        self._progress(receive, False)
        with self._lock:
            self.ledger.complete(receive.key)
        first = min(receive.legs.values(), key=lambda leg: leg.card.rank)
        receive.transfer.received_metadata = first.metadata
        self._core.count("transfers_total", outcome="succeeded")
        self._core.count("bytes_total", receive.bytes_done, direction="received")
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
        for leg in receive.legs.values():
            if leg.settled:
                continue
            if not leg.sent:
                self._settle(receive, leg)
            elif leg.peer is not None:
                self._wiring.send(leg.peer, Abort(**leg.request.ids, reason=f"{error.reason}: {error.message}"))
        if all(leg.settled for leg in receive.legs.values()):
            self._settling.pop(receive.key, None)
        self._core.count("transfers_total", outcome="failed")
        receive.transfer.cell.move(TransferState.FAILED, error)
        self._core.changed()

    def _progress(self, receive: Receive, wanted: bool) -> None:
        """A target of TCP writes must progress while its bytes come, and only then."""
        if wanted != receive.progressing:
            receive.progressing = wanted
            self._core.hot(1 if wanted else -1)

    def _tick(self, now: float) -> None:
        for receive in list(self._live.values()):
            late = [leg for leg in receive.legs.values() if not leg.done]
            names = ", ".join(leg.peer.label if leg.peer else "?" for leg in late)
            lost = [leg for leg in late if leg.peer is not None and leg.peer.channel is None]
            if now > receive.deadline:
                state = receive.transfer.cell.state
                self._fail(receive, DeadlineExceeded(f"{state} for too long", peer=names))
            elif not lost:
                receive.connect_by = now + self._core.timeouts.connect
            elif now > receive.connect_by or any(leg.peer and leg.peer.refused_since for leg in lost):
                self._fail(receive, PeerUnreachable("the control connection is gone", peer=names))
