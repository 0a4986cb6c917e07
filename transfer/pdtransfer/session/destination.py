"""Decode side: ask every prefill rank that holds a part, and hear how it goes.

A leg is one prefill rank's part of one room. Requests are repeated after a reconnect (the source
knows identities it served); aborts too, until every leg is settled: done, drain acknowledged, or
its source confirmed dead. What a receive holds, and when it is free, is in custody.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping, Sequence

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
from pdtransfer.peers import Peer
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.custody import Custody
from pdtransfer.session.depot import Depot
from pdtransfer.session.digests import Digests
from pdtransfer.session.frames import Abort, AbortAck, Done, Failed, SlotFilled, SlotsWanted, Started
from pdtransfer.session.opening import Opener
from pdtransfer.session.quarantine import Quarantine, measure, owed
from pdtransfer.session.receives import BY_REASON, Leg, Receive
from pdtransfer.session.transfers import ReceiveTransfer
from pdtransfer.session.wiring import Wiring


class DestinationSide(Custody):
    """Receives. `open` runs in the engine's thread, everything else in the core's."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot) -> None:
        super().__init__(core, wiring, depot)
        self._opener = Opener(core.config, wiring, self.pairs)
        self._digests = Digests(core, lambda: wiring.card)
        core.ticks.append(self._tick)

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
        self.acquire(key, legs, pages, pools or {}, memory)
        transfer = ReceiveTransfer(
            room,
            attempt,
            abort=lambda reason: self._core.call(self._abort, key, reason),
            releasable=lambda: self.releasable(key),
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

    # --- the core's thread ------------------------------------------------------------------

    def _begin(self, receive: Receive) -> None:
        self._live[receive.key] = receive
        for key, leg in receive.legs.items():
            try:
                leg.peer = self._wiring.current(key, leg.card)
            except errors.TransferError as error:
                self._fail(receive, error)
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
            self.intake.early(leg)
            return
        self._wiring.send(peer, leg.request)

    def on_connected(self, peer: Peer) -> None:
        """Repeat what the source may have missed."""
        for receive, leg in self._legs_of(peer):
            if receive.key in self._live:
                if not leg.done:
                    self._core.count("request_repeats_total", leg.sent)
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
                found = await self._digests.of(leg.pair, pages, source=False, lives=lambda: self._lives(receive))
                receive.deadline = time.monotonic() + self._core.timeouts.transfer
                if found != leg.digest:
                    label = leg.peer.label if leg.peer else ""
                    wrong = ChecksumMismatch(f"digest {found} of the pages, the source sent {leg.digest}", peer=label)
                    self._fail(receive, wrong)
        except Exception as error:
            self._fail(receive, TransferError(f"the digest could not be computed: {error!r}"))
        finally:
            self._core.hot(-1)
        if self._lives(receive):
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

    def forget(self, peer: Peer) -> None:
        """The peer was let go."""
        if peer.key not in self._wiring.peers:  # else another incarnation is there
            self.pairs.forget(peer.key)

    def on_drained(self, peer: Peer) -> None:
        """Nothing of this source can land any more: it is dead and its last bytes were progressed,
        or it answered that it does not know us and has nothing in flight."""
        for receive, leg in self._legs_of(peer):
            if leg.sent and not leg.settled:
                self._fail(receive, errors.PeerUnreachable("the source ended", peer=peer.label))
                self._settle(receive, leg, "source_end")

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
                    self._settle(receive, leg, "rotation")

    def _abort(self, key: tuple[int, int], reason: str) -> None:
        receive = self._live.get(key)
        if receive is not None:
            self._fail(receive, Aborted(f"decode gave up: {reason}"))

    def _tick(self, now: float) -> None:
        for receive in list(self._live.values()):
            lost = [g for g in receive.legs.values() if not g.done and g.peer is not None and g.peer.channel is None]
            if now > receive.deadline:
                state = receive.transfer.cell.state
                waits = state is TransferState.WAITING
                self._core.count("deadlines_total", state="waiting" if waits else "transfer")
                self._fail(receive, DeadlineExceeded(f"{state} for too long", peer=_late(receive)))
            elif not lost:
                receive.connect_by = now + self._core.timeouts.connect
            elif (late := now > receive.connect_by) or any(leg.peer and leg.peer.refused_since for leg in lost):
                self._core.count("deadlines_total", late, state="connect")
                told = max((leg.peer.gone for leg in lost if leg.peer), key=len)
                self._fail(receive, PeerUnreachable(told, peer=_late(receive)))


def _late(receive: Receive) -> str:
    """Who has not sent its part."""
    return ", ".join(leg.peer.label if leg.peer else "?" for leg in receive.legs.values() if not leg.done)
