"""Prefill side: what a decode rank's request or abort is answered with.

Identities that ended stay as tombstones for as long as a request for them may still arrive: an abort
may overtake its request, and a request that is repeated after a reconnect must not be served twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pdtransfer.contract.card import RankCard
from pdtransfer.errors import Aborted, Draining, LayoutMismatch, PeerNotRostered, PeerReplaced, RoomTaken, TransferError
from pdtransfer.peers import Peer
from pdtransfer.plan import check_pages
from pdtransfer.session.core import Core
from pdtransfer.session.frames import Abort, AbortAck, Done, Failed, Request, SlotFilled, SlotGrant, Started
from pdtransfer.session.rooms import Leg, Room, Rooms
from pdtransfer.session.stager import Stage
from pdtransfer.session.tombstones import Tombstones
from pdtransfer.session.wiring import Wiring


class Askers:
    """Serves, repeats the answer, or refuses. Runs in the core's thread.

    `attach(room, leg)` begins to serve, `abandon(leg, error)` ends a leg; `prepare(leg)` makes ready for a room
    that is to come, `again(stage)` repeats what a source asked for."""

    def __init__(
        self,
        core: Core,
        wiring: Wiring,
        rooms: Rooms,
        attach: Callable[[Room, Leg], None],
        abandon: Callable[[Leg, TransferError], None],
        prepare: Callable[[Leg], None],
        again: Callable[[Stage], None],
    ) -> None:
        self._core = core
        self._wiring = wiring
        self._rooms = rooms
        self._attach = attach
        self._abandon = abandon
        self._prepare = prepare
        self._again = again
        self._tombs = Tombstones(2 * (core.timeouts.waiting + core.timeouts.transfer))
        self.draining = False
        self.lost_agents: set[str] = set()
        """Agents a handle to which errored: parts of it may land at any time."""
        core.ticks.append(self._tombs.expire)

    # --- frames -----------------------------------------------------------------------------

    def on_request(self, peer: Peer, request: Request) -> None:
        """Serve, repeat the answer, or refuse."""
        identity = request.identity
        mine = self._wiring.card.incarnation
        if identity.source_incarnation != mine or identity.destination_incarnation != peer.card.incarnation:
            self._refuse(peer, request, PeerReplaced(f"the request is for incarnation {identity.source_incarnation}"))
            return
        if self._drains(peer, request):
            return  # its end was told, its acknowledgement follows
        tomb = self._tombs.get(peer.key, identity)
        if tomb is not None:
            if tomb.request and tomb.request != hash(request):
                self._refuse(peer, request, Aborted("this identity was used for another request"), bury=False)
            else:
                self._wiring.send(peer, tomb.answer)
            return
        if peer.retired:
            self._refuse(peer, request, PeerNotRostered("prefill's roster does not name this rank"))
            return
        held = self._rooms.leg(request.room, peer.key)
        if held is not None and held.request.attempt == request.attempt:
            if held.request != request:
                self._refuse(peer, request, Aborted("this identity is in use for another request"), bury=False)
            else:
                if held.stage is not None:
                    self._again(held.stage)
                if held.started:
                    self._wiring.send(peer, Started(**request.ids))
            return
        if held is not None and held.request.attempt > request.attempt:
            self._refuse(peer, request, Aborted(f"attempt {held.request.attempt} took its place"))
            return
        if held is not None:
            self._abandon(held, Aborted(f"attempt {request.attempt} takes its place"))
        try:
            card = self._check(peer, request)
        except TransferError as error:
            self._refuse(peer, request, error)
            return
        leg = Leg(peer, card, request, time.monotonic() + self._core.timeouts.waiting)
        room = self._rooms.open.get(request.room)
        if room is not None and room.error is None:
            self._attach(room, leg)
        else:
            self._rooms.wait(leg)
            self._prepare(leg)

    def _check(self, peer: Peer, request: Request) -> RankCard:
        """The card with the agent that is to be written to; raises why it is not served."""
        card = peer.generation(request.generation)
        if request.generation < peer.oldest or card is None or not peer.loaded:
            raise PeerReplaced(f"agent generation {request.generation} of the decode rank is not wired here")
        death = self._rooms.death(request.room, request.attempt)
        if death is not None:
            raise death
        if self.draining and request.room not in self._rooms.open:
            raise Draining("prefill takes no new transfers")
        taker = self._rooms.taker(request.room)
        if taker is not None and taker.card.pod_uid != peer.card.pod_uid:
            # Its pages are the engine's again once the first one has all: a second one would read
            # what comes after.
            raise RoomTaken("another decode engine gets this room")
        check_pages(peer.card.layout, request.pages, "decode", memory=request.memory)
        for held in request.pools:
            if not held.pool or [p.pool for p in request.pools].count(held.pool) > 1:
                raise LayoutMismatch(f"pools: {held.pool!r} has a page list already")
            check_pages(peer.card.layout, held.pages, "decode", pool=held.pool, memory=request.memory)
        size = self._wiring.card.layout.page_tokens
        if request.first_page + len(request.pages) != -(-request.tokens // size):
            raise LayoutMismatch(
                f"{len(request.pages)} pages from page {request.first_page} do not hold {request.tokens} tokens"
            )
        return card

    def on_abort(self, peer: Peer, abort: Abort) -> None:
        """Stop, and acknowledge once nothing can land any more."""
        identity = abort.identity
        leg = self._rooms.leg(abort.room, peer.key)
        if leg is not None and leg.request.identity == identity and leg.error is None:
            # A retracted request may come back with its next attempt, in either order with the
            # engine's next send: keep what was handed over for a moment.
            leg.retry_until = time.monotonic() + self._core.timeouts.settle
            self._abandon(leg, Aborted(f"decode gave up: {abort.reason}", room=abort.room, peer=peer.label))
            return
        if self._drains(peer, abort):
            return  # acknowledged when it has drained
        tomb = self._tombs.get(peer.key, identity)
        if tomb is None:
            if self.lost_agents.intersection(peer.agents):
                return  # the handle that errored may be this one's
            self.bury(peer, None, AbortAck(**abort.ids))
        elif isinstance(tomb.answer, Done | AbortAck) or tomb.answer.settled:
            self._wiring.send(peer, AbortAck(**abort.ids))

    def _drains(self, peer: Peer, frame: Request | Abort) -> bool:
        """Handles of this identity are in flight, or one of them errored."""
        return any(leg.peer is peer and leg.request.identity == frame.identity for leg in self._rooms.draining)

    # --- answers ----------------------------------------------------------------------------

    def bury(
        self,
        peer: Peer,
        request: Request | None,
        answer: Done | Failed | AbortAck,
        filled: Mapping[int, SlotFilled] | None = None,
    ) -> None:
        """The identity ended: answer, and keep the answer."""
        self._tombs.add(peer.key, request, answer, filled)
        self._wiring.send(peer, answer)

    def filled_again(self, peer: Peer, grant: SlotGrant) -> bool:
        """Say again that a slot of an identity that ended was filled; False when it has not ended."""
        tomb = self._tombs.get(peer.key, grant.identity)
        if tomb is not None and grant.ticket in tomb.filled:
            self._wiring.send(peer, tomb.filled[grant.ticket])
        return tomb is not None

    def failed(self, leg: Leg) -> None:
        """Tell decode that the leg ended by its error."""
        error, job = leg.error, leg.job
        assert error is not None
        answer = Failed(
            **leg.request.ids,
            reason=error.reason,
            message=error.message,
            nbytes=job.bytes_done if job else 0,
            settled=job is None or job.settled,
        )
        self.bury(leg.peer, leg.request, answer)

    def _refuse(self, peer: Peer, request: Request, error: TransferError, bury: bool = True) -> None:
        self._core.count("requests_refused_total")
        failed = Failed(**request.ids, reason=error.reason, message=error.message, settled=bury)
        if bury:
            self.bury(peer, request, failed)
        else:
            self._wiring.send(peer, failed)
