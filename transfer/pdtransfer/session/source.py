"""Prefill side: who asked for which room, what is written to them, and what they are told.

A leg is one decode rank's request for one room. Identities that ended stay as tombstones for as
long as a request for them may still arrive (an abort may overtake its request; a retried request
must not be served twice). A leg's end is told to decode at once, whether it is settled or not;
the engine's `Sender` ends only when its handles have settled or the settle deadline passed.
"""

from __future__ import annotations

import base64
import logging
import time

from pdtransfer.agent.port import AgentFailure
from pdtransfer.errors import (
    Aborted,
    DeadlineExceeded,
    Draining,
    LayoutMismatch,
    PeerNotRostered,
    PeerReplaced,
    TransferError,
)
from pdtransfer.mover.executor import Job
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.plan import check_pages
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.feeder import Leg, Room, feed_chunks
from pdtransfer.session.frames import Abort, AbortAck, Done, Failed, Request, Started
from pdtransfer.session.tombstones import Tombstones
from pdtransfer.session.transfers import Chunk, SendTransfer
from pdtransfer.session.wiring import Wiring

logger = logging.getLogger(__name__)


class SourceSide:
    """Serves requests. Everything runs in the core's thread."""

    def __init__(self, core: Core, wiring: Wiring) -> None:
        self._core = core
        self._wiring = wiring
        self._rooms: dict[int, Room] = {}
        self._pending: dict[int, dict[PeerKey, Leg]] = {}
        self._dead_rooms: dict[int, tuple[float, TransferError]] = {}
        self._tombs = Tombstones(2 * (core.timeouts.waiting + core.timeouts.transfer))
        self._draining_legs: set[Leg] = set()
        self._lost_agents: set[str] = set()
        """Agents a handle to which errored: parts of it may land at any time."""
        self.draining = False
        core.ticks.append(self._tick)
        core.on_crash.append(self._crashed)

    @property
    def inflight(self) -> int:
        """Rooms and legs that are not over."""
        return len(self._rooms) + len(self._pending) + len(self._draining_legs)

    # --- the engine -------------------------------------------------------------------------

    def command(self, what: str, sender: SendTransfer, value: object = None) -> None:
        """A call of the engine, in its order."""
        if what == "open":
            self._open(sender)
            return
        room = self._rooms.get(sender.room)
        if room is None or room.sender is not sender or room.error is not None:
            return
        if what == "abort":
            self._fail_room(room, Aborted(f"prefill gave up: {value}", room=sender.room))
        elif room.metadata is not None:
            self._fail_room(room, LayoutMismatch(f"{what} after finish", room=sender.room))
        elif what == "chunk" and isinstance(value, Chunk):
            room.chunks.append(value)
            room.deadline = time.monotonic() + self._core.timeouts.waiting
        elif isinstance(value, bytes):
            room.metadata = value
        room.tell()

    def _open(self, sender: SendTransfer) -> None:
        if sender.room in self._rooms:
            error = TransferError("the room is being sent already", room=sender.room)
            sender.cell.move(TransferState.FAILED, error)
            return
        self._dead_rooms.pop(sender.room, None)
        room = Room(sender, time.monotonic() + self._core.timeouts.waiting)
        self._rooms[sender.room] = room
        for leg in self._pending.pop(sender.room, {}).values():
            self._attach(room, leg)
        self._core.changed()

    # --- decode -----------------------------------------------------------------------------

    def on_request(self, peer: Peer, request: Request) -> None:
        """Serve, repeat the answer, or refuse."""
        identity, key = request.identity, (peer.key, request.identity)
        if peer.retired:
            self._refuse(peer, request, PeerNotRostered("prefill's roster does not name this rank"))
            return
        mine = self._wiring.card.incarnation
        if identity.source_incarnation != mine or identity.destination_incarnation != peer.card.incarnation:
            self._refuse(peer, request, PeerReplaced(f"the request is for incarnation {identity.source_incarnation}"))
            return
        tomb = self._tombs.get(*key)
        if tomb is not None:
            if tomb.request is not None and tomb.request != request:
                self._refuse(peer, request, Aborted("this identity was used for another request"), bury=False)
            else:
                self._wiring.send(peer, tomb.answer)
            return
        held = self._leg(request.room, peer.key)
        if held is not None and held.request.attempt == request.attempt:
            if held.request != request:
                self._refuse(peer, request, Aborted("this identity is in use for another request"), bury=False)
            elif held.job is not None and held.job.bytes_queued:
                self._wiring.send(peer, Started(**request.ids))
            return
        if held is not None and held.request.attempt > request.attempt:
            self._refuse(peer, request, Aborted(f"attempt {held.request.attempt} took its place"))
            return
        if held is not None:
            self._abandon(held, Aborted(f"attempt {request.attempt} takes its place"))
        try:
            self._check(peer, request)
        except TransferError as error:
            self._refuse(peer, request, error)
            return
        leg = Leg(peer, request, time.monotonic() + self._core.timeouts.waiting)
        room = self._rooms.get(request.room)
        if room is not None and room.error is None:
            self._attach(room, leg)
        else:
            self._pending.setdefault(request.room, {})[peer.key] = leg

    def _check(self, peer: Peer, request: Request) -> None:
        if request.room in self._dead_rooms:
            raise self._dead_rooms[request.room][1]
        if self.draining and request.room not in self._rooms:
            raise Draining("prefill takes no new transfers")
        check_pages(peer.card.layout, request.pages, "decode")
        size = self._wiring.card.layout.page_tokens
        if request.first_page + len(request.pages) != -(-request.tokens // size):
            raise LayoutMismatch(
                f"{len(request.pages)} pages from page {request.first_page} do not hold {request.tokens} tokens"
            )

    def on_abort(self, peer: Peer, abort: Abort) -> None:
        """Stop, and acknowledge once nothing can land any more."""
        identity, key = abort.identity, (peer.key, abort.identity)
        leg = self._leg(abort.room, peer.key)
        if leg is not None and leg.request.identity == identity:
            room = self._rooms.get(abort.room)
            error = Aborted(f"decode gave up: {abort.reason}", room=abort.room, peer=peer.label)
            if room is not None and room.legs.get(peer.key) is leg:
                # A retracted request may come back with its next attempt, in either order with
                # the engine's next send: keep what was handed over for a moment.
                room.given_up = (time.monotonic() + self._core.timeouts.settle, error)
            self._abandon(leg, error)
            return
        for old in self._draining_legs:
            if old.peer is peer and old.request.identity == identity:
                return  # acknowledged by _job_drained
        tomb = self._tombs.get(*key)
        if tomb is None or isinstance(tomb.answer, Done | AbortAck) or tomb.answer.settled:
            ack = AbortAck(**abort.ids)
            if tomb is None:
                self._tombs.add(peer.key, None, identity, ack)
            self._wiring.send(peer, ack)

    def on_peer_gone(self, peer: Peer, error: TransferError) -> None:
        """The roster names it no more, or it stays away: its requests end."""
        for room in list(self._rooms.values()):
            leg = room.legs.get(peer.key)
            if leg is not None and leg.peer is peer and not leg.done:
                self._abandon(leg, error)
                self._fail_room(room, error)
        for legs in list(self._pending.values()):
            leg = legs.get(peer.key)
            if leg is not None and leg.peer is peer:
                self._abandon(leg, error)

    def drained(self, agent_name: str) -> bool:
        """Nothing can land at that agent any more."""
        return agent_name not in self._lost_agents and not self._core.mover.flies_to(agent_name)

    # --- legs -------------------------------------------------------------------------------

    def _leg(self, number: int, key: PeerKey) -> Leg | None:
        room = self._rooms.get(number)
        if room is not None and key in room.legs and not room.legs[key].done:
            return room.legs[key]
        return self._pending.get(number, {}).get(key)

    def _attach(self, room: Room, leg: Leg) -> None:
        room.legs[leg.peer.key] = leg
        room.given_up = None
        if leg.request.tokens != room.sender.tokens:
            error = LayoutMismatch(
                f"decode asks for {leg.request.tokens} tokens, prefill has {room.sender.tokens}",
                room=room.sender.room,
            )
            self._fail_room(room, error)
            return
        leg.job = Job(
            f"room {room.sender.room} to {leg.peer.label}",
            leg.peer.card.agent_name,
            float("inf"),
            on_finish=lambda job: self._job_finished(room, leg),
            on_drained=lambda job: self._job_drained(leg),
        )
        self._core.mover.start(leg.job)
        leg.task = self._core.spawn(self._feed(room, leg), f"feed-{room.sender.room}")

    async def _feed(self, room: Room, leg: Leg) -> None:
        """Plan and queue chunk by chunk, each only after its ready event."""
        try:
            await feed_chunks(self._core, self._wiring, room, leg)
        except TransferError as error:
            error.room, error.peer = room.sender.room, leg.peer.label
            self._fail_room(room, error)

    def _job_finished(self, room: Room, leg: Leg) -> None:
        job = leg.job
        assert job is not None
        identity = leg.request.identity
        self._core.count("bytes_sent", job.bytes_done)
        if job.error is None:
            leg.done = True
            done = Done(
                **leg.request.ids,
                nbytes=job.bytes_done,
                metadata=base64.b64encode(room.metadata or b"").decode(),
            )
            self._tombs.add(leg.peer.key, leg.request, identity, done)
            self._wiring.send(leg.peer, done)
            self._conclude(room)
            return
        error = job.error
        if job.lost:
            self._lost_agents.add(leg.peer.card.agent_name)
        if isinstance(error, AgentFailure):
            self._wiring.reload(leg.peer)
        error.room, error.peer = room.sender.room, leg.peer.label
        first = leg.error is None
        leg.error = leg.error or error
        if first:
            self._tell_failed(leg)
            self._fail_room(room, error)
        elif job.settled:
            self._job_drained(leg)
        if not job.settled:
            self._draining_legs.add(leg)
        self._conclude(room)

    def _job_drained(self, leg: Leg) -> None:
        self._draining_legs.discard(leg)
        ack = AbortAck(**leg.request.ids)
        self._tombs.add(leg.peer.key, leg.request, leg.request.identity, ack)
        self._wiring.send(leg.peer, ack)

    def _abandon(self, leg: Leg, error: TransferError) -> None:
        """End a leg: decode is told at once, the acknowledgement follows when it is drained."""
        if leg.error is not None or leg.done:
            return
        leg.error = error
        self._pending_pop(leg)
        self._tell_failed(leg)
        if leg.job is not None:
            self._core.mover.fail(leg.job, error)

    def _pending_pop(self, leg: Leg) -> None:
        legs = self._pending.get(leg.request.room, {})
        if legs.get(leg.peer.key) is leg:
            del legs[leg.peer.key]
            if not legs:
                del self._pending[leg.request.room]

    def _tell_failed(self, leg: Leg) -> None:
        error = leg.error
        assert error is not None
        settled = leg.job is None or leg.job.settled
        failed = Failed(
            **leg.request.ids,
            reason=error.reason,
            message=error.message,
            nbytes=leg.job.bytes_done if leg.job else 0,
            settled=settled,
        )
        self._tombs.add(leg.peer.key, leg.request, leg.request.identity, failed)
        self._wiring.send(leg.peer, failed)

    def _refuse(self, peer: Peer, request: Request, error: TransferError, bury: bool = True) -> None:
        self._core.count("requests_refused")
        failed = Failed(**request.ids, reason=error.reason, message=error.message, settled=bury)
        if bury:
            self._tombs.add(peer.key, request, request.identity, failed)
        self._wiring.send(peer, failed)

    def _fail_room(self, room: Room, error: TransferError) -> None:
        if room.error is None:
            room.error = error
            if not room.legs:
                until = time.monotonic() + self._core.timeouts.waiting
                self._dead_rooms[room.sender.room] = (until, error)
        for leg in list(room.legs.values()):
            self._abandon(leg, room.error)
        room.tell()
        self._conclude(room)

    def _conclude(self, room: Room) -> None:
        """End the engine's sender when all of its legs are over."""
        if self._rooms.get(room.sender.room) is not room:
            return
        legs = room.legs.values()
        if room.error is None:
            if sum(leg.done for leg in legs) < room.required:
                return
            del self._rooms[room.sender.room]
            room.sender.cell.move(TransferState.SUCCESS)
            self._core.count("sends_succeeded")
        elif all(leg.over for leg in legs):
            del self._rooms[room.sender.room]
            room.sender.cell.move(TransferState.FAILED, room.error)
            self._core.count("sends_failed")
        else:
            return
        self._core.changed()

    # --- time -------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for room in list(self._rooms.values()):
            if room.error is None and now > room.deadline and len(room.legs) < room.required:
                self._fail_room(
                    room,
                    DeadlineExceeded(
                        f"{len(room.legs)} of {room.required if room.legs else 'the'} decode ranks asked in time",
                        room=room.sender.room,
                    ),
                )
            if room.error is None and room.given_up is not None and now > room.given_up[0]:
                self._fail_room(room, room.given_up[1])
            limit = room.deadline + self._core.timeouts.transfer
            if room.error is None and room.metadata is None and now > limit:
                late = DeadlineExceeded("prefill handed over nothing more", room=room.sender.room)
                self._fail_room(room, late)
        for legs in list(self._pending.values()):
            for leg in list(legs.values()):
                if now > leg.deadline:
                    self._abandon(leg, DeadlineExceeded("prefill did not start in time", room=leg.request.room))
        self._tombs.expire(now)
        for number, (until, _) in list(self._dead_rooms.items()):
            if until < now:
                del self._dead_rooms[number]

    def _crashed(self, error: Exception) -> None:
        for room in self._rooms.values():
            room.sender.cell.move(TransferState.FAILED, error)
