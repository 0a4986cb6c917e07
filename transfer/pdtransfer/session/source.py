"""Prefill side: rooms that the engine sends, what is written to the decode ranks that asked, and its end.

A leg is one decode rank's request for one room. Its end is told to decode at once, whether it is
settled or not; the engine's `Sender` ends only when its handles have settled or the settle deadline
passed.
"""

from __future__ import annotations

import base64
import time

from pdtransfer.agent.port import DISCONNECT, AgentFailure
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import Aborted, DeadlineExceeded, LayoutMismatch, PeerReplaced, PeerUnreachable, TransferError
from pdtransfer.mover.jobs import Job
from pdtransfer.peers import Peer
from pdtransfer.session.api import TransferState
from pdtransfer.session.askers import Askers
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.feeding import Feeding
from pdtransfer.session.frames import MAX_METADATA, AbortAck, Done, SlotGrant
from pdtransfer.session.rooms import Leg, Room, Rooms
from pdtransfer.session.stager import Stage
from pdtransfer.session.transfers import Chunk, SendTransfer
from pdtransfer.session.wiring import Wiring


class SourceSide:
    """Serves requests. Everything runs in the core's thread."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot) -> None:
        self._core = core
        self._wiring = wiring
        self._rooms = Rooms()
        self.asked, self.expect = self._rooms.asked, self._rooms.unbury
        self.feeding = Feeding(core, wiring, depot, self._fail_leg)
        prepare, again = self.feeding.prepare, self.feeding.stager.again
        self.askers = Askers(core, wiring, self._rooms, self._attach, self._abandon, prepare, again)
        core.ticks.append(self._tick)

    @property
    def inflight(self) -> int:
        """Rooms and legs that are not over."""
        return len(self._rooms)

    @property
    def queued(self) -> int:
        """Requests of which nothing was queued yet."""
        legs = (leg for room in self._rooms.open.values() for leg in room.legs.values())
        return len(self._rooms.pending) + sum(not leg.started and not leg.over for leg in legs)

    # --- the engine -------------------------------------------------------------------------

    def command(self, what: str, sender: SendTransfer, value: object = None) -> None:
        """A call of the engine, in its order."""
        if what == "open":
            self._open(sender)
            return
        room = self._rooms.open.get(sender.room)
        if room is None or room.sender is not sender or room.error is not None:
            return
        if what == "abort":
            self._fail_room(room, Aborted(f"prefill gave up: {value}", room=sender.room))
        elif room.metadata is not None:
            self._fail_room(room, LayoutMismatch(f"{what} after finish", room=sender.room))
        elif what == "chunk" and isinstance(value, Chunk):
            room.chunks.append(value)
            room.deadline = time.monotonic() + self._core.timeouts.waiting
        elif isinstance(value, bytes) and len(value) > MAX_METADATA:
            error = LayoutMismatch(f"{len(value)} bytes of metadata, {MAX_METADATA} may be sent", room=sender.room)
            self._fail_room(room, error)
        elif isinstance(value, bytes):
            room.metadata = value
        for leg in list(room.legs.values()):
            self.feeding.advance(room, leg)

    def _open(self, sender: SendTransfer) -> None:
        if sender.room in self._rooms.open:
            error = TransferError("the room is being sent already", room=sender.room)
            sender.cell.move(TransferState.FAILED, error)
            return
        self._rooms.unbury(sender.room)
        room = Room(sender, time.monotonic() + self._core.timeouts.waiting)
        self._rooms.open[sender.room] = room
        for leg in self._rooms.pending.pop(sender.room, {}).values():
            if room.error is None:
                self._attach(room, leg)
            else:  # one before it ended the room
                self._abandon(leg, room.error)
        self._core.changed()

    # --- decode -----------------------------------------------------------------------------

    def on_peer_gone(self, peer: Peer, error: TransferError) -> None:
        """The roster names it no more, or it stays away: its requests end."""
        for room in list(self._rooms.open.values()):
            leg = room.legs.get(peer.key)
            if leg is not None and leg.peer is peer and not leg.done:
                own = error.about(room=room.sender.room)
                self._abandon(leg, own)
                self._fail_room(room, own)
        for leg in self._rooms.waiting():
            if leg.peer is peer:
                self._abandon(leg, error.about(room=leg.request.room))

    def forget(self, peer: Peer) -> None:
        """The peer was let go. What errored may land at any time, whoever remembers it."""
        self.askers.lost_agents |= {leg.card.agent_name for leg in self._rooms.errored() if leg.peer is peer}
        self._rooms.forget(peer)
        if peer.key not in self._wiring.peers:  # else another incarnation is there
            self.feeding.pairs.forget(peer.key)

    def drained(self, first_agent: str) -> bool:
        """Nothing can land at that agent, nor at those that took its place."""
        errored = {leg.card.agent_name for leg in self._rooms.errored()}
        names = self.askers.lost_agents | self._core.mover.peers | errored
        return not any(name == first_agent or name.startswith(f"{first_agent}.") for name in names)

    def uses(self, peer: Peer, generation: int) -> bool:
        """That agent of the peer is written to, or will be."""
        return self._rooms.uses(peer, generation)

    def on_agents_destroyed(self, peer: Peer, oldest: int) -> None:
        """The peer's agents before that generation are gone: what was begun to them ends, settled."""
        error = PeerReplaced(f"the decode rank's agent before generation {oldest} is gone", peer=peer.label)
        for room in list(self._rooms.open.values()):
            leg = room.legs.get(peer.key)
            if leg is not None and leg.peer is peer and leg.request.generation < oldest and not leg.done:
                own = error.about(room=room.sender.room)
                self._abandon(leg, own)
                self._fail_room(room, own)
        for leg in self._rooms.waiting():
            if leg.peer is peer and leg.request.generation < oldest:
                self._abandon(leg, error.about(room=leg.request.room))
        for leg in [leg for leg in self._rooms.draining if leg.peer is peer and leg.fenced]:
            self._job_drained(leg)
        self.askers.lost_agents -= {c.agent_name for c in peer.older if c.generation < peer.fenced}

    def on_unloaded(self, card: RankCard) -> None:
        """An agent of a peer was forgotten: lists for it mean nothing any more."""
        self.feeding.links.forget(card.agent_name)

    def on_connected(self, peer: Peer) -> None:
        """Be ready for what it asks."""
        self.feeding.warm(peer)

    def on_grant(self, peer: Peer, grant: SlotGrant) -> None:
        """A decode rank lent a slot, or says again that it did."""
        leg = self._rooms.leg(grant.room, peer.key)
        if leg is not None and leg.request.identity == grant.identity:
            if leg.error is None:
                if leg.stage is None:
                    leg.stage = Stage(leg, self._core.mover)
                self.feeding.stager.on_grant(leg.stage, grant)
        elif not self.askers.filled_again(peer, grant):
            self._core.count("stray_frames_total")

    # --- legs -------------------------------------------------------------------------------

    def _attach(self, room: Room, leg: Leg) -> None:
        room.legs[leg.peer.key] = leg
        if leg.peer.broken:
            self._fail_leg(leg, PeerUnreachable("its data connection is being made anew", peer=leg.peer.label))
            return
        if leg.request.tokens != room.sender.tokens:
            error = LayoutMismatch(
                f"decode asks for {leg.request.tokens} tokens, prefill has {room.sender.tokens}",
                room=room.sender.room,
            )
            self._fail_room(room, error)
            return
        leg.job = Job(
            f"room {room.sender.room} to {leg.peer.label}",
            leg.card.agent_name,
            float("inf"),
            on_finish=lambda job: self._job_finished(room, leg),
            on_drained=lambda job: self._job_drained(leg),
        )
        self._core.mover.start(leg.job)
        self.feeding.begin(room, leg)

    def _fail_leg(self, leg: Leg, error: TransferError) -> None:
        room = self._rooms.open.get(leg.request.room)
        if room is not None and room.legs.get(leg.peer.key) is leg:
            self._fail_room(room, error.about(room=room.sender.room))
        elif leg in self._rooms.waiting():
            self._abandon(leg, error.about(room=leg.request.room))

    def _job_finished(self, room: Room, leg: Leg) -> None:
        job = leg.job
        assert job is not None
        if job.error is None:
            leg.done = True
            metadata = base64.b64encode(room.metadata or b"").decode()
            done = Done(**leg.request.ids, nbytes=job.bytes_done, metadata=metadata, digest=leg.digest)
            self.askers.bury(leg.peer, leg.request, done, leg.filled)  # first: decode waits for it
            self._wiring.self_check.moved()
            self.feeding.count(leg)
            self._conclude(room)
            return
        self.feeding.count(leg)
        if not leg.fenced:
            if job.lost:
                self.askers.lost_agents.add(leg.card.agent_name)
            if not job.settled:
                self._core.count("deadlines_total", state="settle")
                self._rooms.draining.add(leg)
        if leg.error is None:
            self._core.count("deadlines_total", isinstance(job.error, DeadlineExceeded), state="transfer")
            leg.error = job.error.about(room=room.sender.room, peer=leg.peer.label)
            self.askers.failed(leg)
            self._fail_room(room, leg.error)
        elif job.settled or leg.fenced:
            self._job_drained(leg)
        self._conclude(room)
        current = leg.card.agent_name == leg.peer.card.agent_name and not leg.fenced
        if current and isinstance(job.error, AgentFailure):
            self._broken(leg.peer, job.error)

    def _broken(self, peer: Peer, error: AgentFailure) -> None:
        """NIXL failed a transfer to it. A connection that is lost is made anew once no job is left, so the
        others end too, and none begins: under load there is always one that waits for its chunks."""
        self._wiring.reload(peer)
        if error.kind == DISCONNECT and not peer.broken:
            peer.broken = True
            self.on_peer_gone(peer, PeerUnreachable(f"NIXL lost its connection: {error.message}", peer=peer.label))

    def _job_drained(self, leg: Leg) -> None:
        self._rooms.draining.discard(leg)
        self.askers.bury(leg.peer, leg.request, AbortAck(**leg.request.ids))

    def _abandon(self, leg: Leg, error: TransferError) -> None:
        """End a leg: decode is told at once, the acknowledgement follows when it is drained."""
        if leg.error is not None or leg.done:
            return
        leg.error = error
        self._rooms.unwait(leg)
        self.askers.failed(leg)
        if leg.job is not None:
            self._core.mover.fail(leg.job, error)

    def _fail_room(self, room: Room, error: TransferError) -> None:
        if room.error is None:
            room.error = error
            if len(room.legs) < room.required:  # whoever has not asked yet would wait for nothing
                asked = max((leg.request.attempt for leg in room.legs.values()), default=None)
                self._rooms.bury(room.sender.room, error, self._core.timeouts.waiting, asked)
        for leg in list(room.legs.values()):
            self._abandon(leg, room.error)
        self._conclude(room)

    def _conclude(self, room: Room) -> None:
        """End the engine's sender when all of its legs are over."""
        number = room.sender.room
        if self._rooms.open.get(number) is not room:
            return
        legs = room.legs.values()
        if room.error is None:
            if sum(leg.done for leg in legs) < room.required:
                return
            del self._rooms.open[number]
            room.sender.cell.move(TransferState.SUCCESS)
            self._core.ended(room.began, room.strategy, None)
        elif all(leg.over for leg in legs):
            del self._rooms.open[number]
            room.sender.cell.move(TransferState.FAILED, room.error)
            self._core.ended(room.began, room.strategy, room.error)
        else:
            return
        self._core.changed()

    # --- time -------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for room in list(self._rooms.open.values()):
            if room.error is None:
                self._judge(room, now)
        for leg in self._rooms.waiting():
            if now > leg.deadline:
                self._core.count("deadlines_total", state="waiting")
                self._abandon(leg, DeadlineExceeded("prefill did not start in time", room=leg.request.room))
        self._rooms.expire(now)

    def _judge(self, room: Room, now: float) -> None:
        number = room.sender.room
        if now > room.deadline and len(room.legs) < room.required:
            wanted = room.required if room.legs else "the"
            self._core.count("deadlines_total", state="waiting")
            late = DeadlineExceeded(f"{len(room.legs)} of {wanted} decode ranks asked in time", room=number)
            self._fail_room(room, late)
        elif (gone := next((g for g in room.legs.values() if g.error and now > g.retry_until), None)) is not None:
            assert gone.error is not None
            self._fail_room(room, gone.error)
        elif room.metadata is None and now > room.deadline + self._core.timeouts.transfer:
            self._core.count("deadlines_total", state="ready")
            self._fail_room(room, DeadlineExceeded("prefill handed over nothing more", room=number))
