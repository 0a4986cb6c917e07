"""Decode side: ask every prefill rank that holds a part, wait, and never give pages back early.

A leg is one prefill rank's part of one room. Requests are repeated after a reconnect (the source
knows identities it served); aborts too, until every leg is settled: done, drain acknowledged, or
its source confirmed dead. What a late write could hit waits for that: the pages of legs that are written
in place, the slots of the others (intake).
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from pdtransfer import errors
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import (
    Aborted,
    ChecksumMismatch,
    DeadlineExceeded,
    LayoutMismatch,
    PeerUnreachable,
    TransferError,
)
from pdtransfer.mover.ledger import PageLedger
from pdtransfer.peers import Peer, key_of
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.digests import Digests
from pdtransfer.session.frames import Abort, AbortAck, Done, Failed, SlotFilled, SlotsWanted, Started
from pdtransfer.session.intake import Intake
from pdtransfer.session.opening import Opener
from pdtransfer.session.pairs import Pairs
from pdtransfer.session.quarantine import Quarantine, measure, owed
from pdtransfer.session.receives import BY_REASON, Leg, Receive
from pdtransfer.session.transfers import ReceiveTransfer
from pdtransfer.session.wiring import Wiring

_OfLeg = Started | Done | Failed | AbortAck | SlotsWanted | SlotFilled


class DestinationSide:
    """Receives. `open` runs in the engine's thread, everything else in the core's."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot) -> None:
        self._core = core
        self._wiring = wiring
        self._lock = threading.Lock()
        self.ledger = PageLedger()
        self._live: dict[tuple[int, int], Receive] = {}
        self._settling: dict[tuple[int, int], Receive] = {}
        self.pairs = Pairs(lambda: wiring.card)
        self._opener = Opener(core.config, wiring, self.pairs)
        self._digests = Digests(core, lambda: wiring.card)
        self.intake = Intake(
            core,
            wiring,
            depot,
            self.pairs,
            fail=self._fail,
            arrived=self._arrived,
            lives=lambda receive: self._live.get(receive.key) is receive,
            writing=self._scatters,
        )
        core.ticks.append(self._tick)

    @property
    def inflight(self) -> int:
        """Receives that go on or whose sources have not settled."""
        return len(self._live) + len(self._settling)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of pages and slots that a late write may still hit."""
        with self._lock:
            return self.ledger.quarantined_bytes + self.intake.book.quarantined_bytes

    # --- the engine's thread ----------------------------------------------------------------

    def open(
        self,
        room: int,
        attempt: int,
        sources: Sequence[RankCard],
        pages: Sequence[int],
        first_page: int,
        tokens: int,
        memory: MemoryKind | None = None,
        pools: Mapping[str, Sequence[int]] | None = None,
    ) -> ReceiveTransfer:
        """Check, take the pages and start asking."""
        key = (room, attempt)
        legs = self._opener.legs(room, attempt, sources, pages, first_page, tokens, memory, pools or {})
        mine = self._wiring.card
        page_bytes = sum(r.item_bytes for r in mine.layout.regions if not r.pool)
        writers = [place for place, leg in legs.items() if leg.in_place]
        with self._lock:
            self.ledger.acquire(key, _owned(pages, pools or {}), writers, page_bytes)
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
                self._ask(leg.peer, leg)
        self._core.changed()

    def _ask(self, peer: Peer, leg: Leg) -> None:
        """Send the request. The agent it is for is fixed from when it may first arrive: the destruction
        of that one fences it."""
        if not leg.sent:
            leg.request = leg.request.model_copy(update={"generation": self._core.generations.present.number})
            leg.sent = True
        self._wiring.send(peer, leg.request)

    def on_connected(self, peer: Peer) -> None:
        """Repeat what the source may have missed."""
        for receive, leg in self._legs_of(peer):
            if receive.key in self._live:
                if not leg.done:
                    self._ask(peer, leg)
                    self.intake.again(leg)
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
        leg.told, leg.digest = True, frame.digest
        if not leg.complete and not self.intake.book.out(leg):
            gap = f"{leg.missing.left} region pages never came, and the source says that it is done"
            self._fail(receive, LayoutMismatch(gap, peer=peer.label))
            return
        if not leg.complete and not leg.queued:
            self.intake.again(leg)  # what was filled may have been said on a connection that ended
        self._arrived(receive, leg)

    def on_slots(self, peer: Peer, frame: SlotsWanted | SlotFilled) -> None:
        """A source wants slots, or filled one."""
        receive, leg = self._find(peer, frame)
        if receive is None or leg is None:
            return
        if isinstance(frame, SlotsWanted):
            self.intake.on_wanted(receive, leg, frame)
        else:
            self.intake.on_filled(receive, leg, frame)

    def _arrived(self, receive: Receive, leg: Leg) -> None:
        """Something of the leg is in its pages: the leg may be over, and the receive with it."""
        if leg.done or not leg.complete:
            return
        leg.done = True
        receive.bytes_done += leg.nbytes
        self.intake.release(leg)
        if not all(other.done for other in receive.legs.values()):
            return
        if self._core.config.digest:
            self._core.spawn_contained(self._check(receive), f"digest-{receive.key[0]}")
        else:
            self._succeed(receive)

    async def _check(self, receive: Receive) -> None:
        """Success only if the pages hold what every source says that it sent."""
        self._core.hot(1)
        try:
            for leg in receive.legs.values():
                pages = {lane.number: np.array(leg.page_list(lane), dtype=np.int64) for lane in leg.pair.plan.lanes}
                lives = lambda: self._live.get(receive.key) is receive  # noqa: E731
                found = await self._digests.of(leg.pair, pages, source=False, lives=lives)
                receive.deadline = time.monotonic() + self._core.timeouts.transfer
                if found != leg.digest:
                    label = leg.peer.label if leg.peer else ""
                    wrong = ChecksumMismatch(f"digest {found} of the pages, the source sent {leg.digest}", peer=label)
                    self._fail(receive, wrong)
        except Exception as error:
            self._fail(receive, TransferError(f"the digest could not be computed: {error!r}"))
        finally:
            self._core.hot(-1)
        if self._live.get(receive.key) is receive:
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

    def quarantine(self) -> Quarantine:
        """What waits for a fence."""
        return measure(self._settling.values(), self.quarantined_bytes, self._wiring.revocable)

    def uses(self, generation: int) -> bool:
        """A receive that goes on was asked for before that generation."""
        return any(leg.request.generation < generation for r in self._live.values() for leg in owed(r))

    def on_agents_destroyed(self, oldest: int) -> None:
        """This rank's agents before that generation are gone: nothing that was asked for them can land
        any more, but from peers that write without an agent."""
        for receive in (*self._live.values(), *self._settling.values()):
            for leg in [leg for leg in owed(receive) if leg.request.generation < oldest]:
                self._fail(receive, DeadlineExceeded("it did not end before its agent had to be replaced"))
                if self._wiring.revocable(leg.card):
                    self._core.count("quarantine_released_total", fence="rotation")
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

    def _find(self, peer: Peer, frame: _OfLeg) -> tuple[Receive | None, Leg | None]:
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
        if leg.done or self._live.get(receive.key) is not receive:
            self.intake.release(leg)
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
        receive.failed_at = time.monotonic()
        for leg in receive.legs.values():
            self.intake.quarantine(leg)
            if leg.settled:
                self.intake.release(leg)
            elif not leg.sent:
                self._settle(receive, leg)
            elif leg.peer is not None:
                self._wiring.send(leg.peer, Abort(**leg.request.ids, reason=f"{error.reason}: {error.message}"))
        if all(leg.settled for leg in receive.legs.values()):
            self._settling.pop(receive.key, None)
        self._core.count("transfers_total", outcome="failed")
        receive.transfer.cell.move(TransferState.FAILED, error)
        self._core.changed()

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


def _owned(pages: Sequence[int], pools: Mapping[str, Sequence[int]]) -> list[Hashable]:
    """Pages as the ledger tells them apart: numbers of the KV pages, others with their page space."""
    return [*(int(p) for p in pages), *((pool, int(p)) for pool, held in pools.items() for p in held)]
