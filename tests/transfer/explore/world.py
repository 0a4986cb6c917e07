"""A small world: a few prefill and decode ranks, their engines, the messages between them and every
posted handle, all moved by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdtransfer.agent.fake import FakeHandle, FakeHub
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankProcess
from pdtransfer.contract.pairing import peers_of
from pdtransfer.errors import TransferError
from pdtransfer.mover.executor import Mover
from pdtransfer.mover.jobs import Job
from pdtransfer.mover.posting import post
from pdtransfer.peers import PeerKey
from pdtransfer.session.api import Identity, TransferState
from pdtransfer.session.frames import AbortAck, Done, Failed

from .bounds import ROOMS, Bounds, Violation
from .network import Message, Network, Where
from .ranks import BOOTSTRAP, CANARY, Rank, golden, make_rank
from .records import Flight, LegId, Receipt, Sending
from .standins import POISON, Arenas, changes
from .virtual import VirtualLoop, replaced

LIMBO = 0.1
"""Seconds for which bytes of a dead process may still come out of its sockets."""


class World:
    """Made anew for each path; `close` sets back what it replaced."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.loop = VirtualLoop()
        self.hub = FakeHub()
        self.arenas = Arenas()
        self.network = Network(self)
        self.network.on_post = self._posted
        self.used: dict[str, int] = {}
        self.flights: list[Flight] = []
        self.receipts: list[Receipt] = []
        self.sendings: list[Sending] = []
        self.refusals: list[tuple[Rank, int]] = []
        """Decode ranks whose engines were refused at once, by name."""
        self.settled: set[LegId] = set()
        """Sources said that nothing of these can land any more."""
        self.done: set[LegId] = set()
        self.lossy = False
        """A message was lost since the connections were last made."""
        self.after: list[str] = []
        """What happened since faults stopped."""
        self._legs: dict[FakeHandle, LegId] = {}
        self._meet: dict[tuple[Where, Where], bool] = {}
        self._seen: dict[Rank, int] = {}
        self._context = replaced(*changes(self))
        self._context.__enter__()
        assert Mover.__init__.__kwdefaults__ is not None
        Mover.__init__.__kwdefaults__["clock"] = self.loop.time
        try:
            self._wire()
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
        bounds = self.bounds
        self.prefills = [make_rank(self, Role.PREFILL, i, bounds.prefill, 1) for i in range(bounds.prefill)]
        of = bounds.decode_of or bounds.decode
        self.decodes = [make_rank(self, Role.DECODE, i, of, 1) for i in range(bounds.decode)]
        self.old: list[Rank] = []
        for rank in self.prefills:
            self.roster(rank, self.decodes)
        self.settle()  # who is dialled knows who dials
        for rank in self.decodes:
            self.roster(rank, self.prefills)
        self.settle()

    def close(self) -> None:
        """Set back what was replaced."""
        assert Mover.__init__.__kwdefaults__ is not None
        Mover.__init__.__kwdefaults__["clock"] = time.monotonic
        self._context.__exit__(None, None, None)

    # --- what the outside does ------------------------------------------------------------------

    def roster(self, rank: Rank, others: Sequence[Rank]) -> None:
        """The rank's roster names the living among these."""
        cards = [o.endpoint.card for o in others if o.alive]
        rank.endpoint.apply_peers(peers_of(rank.endpoint.card, cards))

    def meet(self, rank: Rank, other: Rank) -> bool:
        """They exchange KV."""
        pair = (rank.where, other.where)
        if pair not in self._meet:
            self._meet[pair] = bool(peers_of(rank.endpoint.card, [other.endpoint.card]))
        return self._meet[pair]

    def settle(self) -> None:
        """Run everything that can run without time passing."""
        for _ in range(50):
            self.loop.settle()
            moved = False
            for rank in self.living:
                moved |= rank.core.advance()
            self._observe()
            if not moved and not self.loop.due:
                break
        else:
            raise Violation("a turn always finds something to do")
        if self.loop.errors:
            raise Violation(f"a callback raised {self.loop.errors[0]!r}") from self.loop.errors[0]

    @property
    def living(self) -> list[Rank]:
        """Processes that run."""
        return [r for r in (*self.prefills, *self.decodes) if r.alive]

    @staticmethod
    def port_of(place: PeerKey) -> int:
        """Where the rank at a place listens."""
        return (5000 if place[0].startswith("prefill") else 6000) + place[1]

    def at(self, where: Where) -> Rank | None:
        """The living process with this place and incarnation."""
        return next((r for r in self.living if r.where == where), None)

    def is_dead(self, process: RankProcess) -> bool:
        return all(r.endpoint.card.process != process for r in self.living)

    def kill(self, rank: Rank) -> None:
        """The process ends; what its sockets hold may land for a moment."""
        rank.alive, rank.died_at = False, self.loop.now
        self.network.die(rank.where)
        for name in [n for n in self.hub.agents if f"{n}.".startswith(f"{rank.agent.name}.")]:
            self.hub.disconnect(name)
        self.old.append(rank)

    def restart(self, rank: Rank) -> Rank:
        """Another incarnation at the same place and address."""
        side = self.prefills if rank.role is Role.PREFILL else self.decodes
        of = self.bounds.prefill if rank.role is Role.PREFILL else self.bounds.decode_of or self.bounds.decode
        made = make_rank(self, rank.role, rank.where[0][1], of, int(rank.where[1][1:]) + 1)
        side[side.index(rank)] = made
        self.roster(made, self.decodes if rank.role is Role.PREFILL else self.prefills)
        return made

    def deliver(self, message: Message) -> None:
        """To the rank at the place it is for, whoever that is now: a wire knows no incarnations. A
        rank that ended the connection itself reads it no more."""
        self.network.take(message)
        place = message.receiver[0]
        rank = next((r for r in self.living if r.where[0] == place), None)
        if rank is None or (rank.where == message.receiver and message.receiver_end.closed_here):
            return
        wiring = rank.endpoint._wiring
        known = [p for p in (*wiring._peers.values(), *wiring._retired) if p.key == message.sender[0]]
        peer = next((p for p in known if p.card.incarnation == message.sender[1]), None)
        if peer is None and rank.where != message.receiver:
            peer = next(iter(known), None)
        if peer is not None:
            wiring.on_frame(peer, message.frame)

    # --- engines ----------------------------------------------------------------------------------

    def receive(self, rank: Rank, room: int) -> None:
        """The decode engine asks (again). It takes pages that it may use; it may be refused by name."""
        attempt = self.tries(rank, room)
        pages = self.pages_for(rank)
        try:
            transfer = rank.endpoint.receive(
                room=room, attempt=attempt, bootstrap=BOOTSTRAP, pages=pages, tokens=len(pages)
            )
        except TransferError:
            self.refusals.append((rank, room))
            return
        rank.memory[list(pages)] = POISON
        for held in self.receipts:
            held.freed |= held.rank is rank and bool(set(held.pages) & set(pages))
        sources = tuple([((c.pod_uid, c.rank), c.incarnation) for c in rank.endpoint._roster])
        self.receipts.append(Receipt(rank, room, attempt, pages, transfer, sources))

    def tries(self, rank: Rank, room: int) -> int:
        """How often its engine asked."""
        return sum(r.rank is rank and r.room == room for r in self.receipts) + self.refusals.count((rank, room))

    def pages_for(self, rank: Rank) -> tuple[int, ...]:
        """The lowest pages that no transfer holds, as the module tells the engine."""
        held = {p for r in self.receipts if r.rank is rank and not r.transfer.pages_releasable for p in r.pages}
        return tuple([p for p in range(2 * self.bounds.pages) if p not in held][: self.bounds.pages])

    def send(self, rank: Rank, room: int) -> None:
        """The prefill engine opens the room and hands its first page over."""
        for page in range(self.bounds.pages):
            rank.memory[self._source_page(room, page)] = golden(room, page)
        self.sendings.append(Sending(rank, rank.endpoint.send(room=room, tokens=self.bounds.pages)))
        self.chunk(self.sendings[-1])

    def chunk(self, sending: Sending) -> None:
        """The next page; the last one with the metadata."""
        pages = [self._source_page(sending.sender.room, sending.given)]
        sending.sender.chunk(pages, sending.given, _READY)
        sending.given += 1
        if sending.given == self.bounds.pages:
            sending.sender.finish(b"meta")

    def _source_page(self, room: int, page: int) -> int:
        return ROOMS.index(room) * self.bounds.pages + page

    # --- what is seen -----------------------------------------------------------------------------

    def _posted(self, message: Message) -> None:
        frame = message.frame
        if isinstance(frame, Done | AbortAck) or (isinstance(frame, Failed) and frame.settled):
            self.settled.add((frame.identity, message.sender[0], message.receiver[0]))
        if isinstance(frame, Done):
            self.done.add((frame.identity, message.sender[0], message.receiver[0]))

    def _observe(self) -> None:
        """Name the request of each new handle, and mark pages that came back to the engine."""
        for receipt in self.receipts:
            failed = receipt.transfer.state is TransferState.FAILED
            if failed and not receipt.freed and not receipt.marked and receipt.transfer.pages_releasable:
                receipt.marked = True
                receipt.rank.memory[list(receipt.pages)] = CANARY
        for rank in self.prefills:
            seen = self._seen.get(rank, 0)
            if rank.alive and len(rank.agent.handles) > seen:
                self._seen[rank] = len(rank.agent.handles)
                for handle in rank.agent.handles[seen:]:
                    self._take_up(rank, handle)

    def _take_up(self, rank: Rank, handle: FakeHandle) -> None:
        leg = self._legs[handle]
        target = next((d for d in self.decodes if f"{handle.peer}.".startswith(f"{d.agent.name}.")), None)
        pages: tuple[int, ...] = ()
        slots: tuple[int, ...] = ()
        if target is not None:
            addresses = [int(a) for a in handle.destination[:, 0]]
            memory = target.memory
            pages = _within(addresses, int(memory.ctypes.data), memory.shape[1], len(memory))
            for arena in target.endpoint.card.staging:
                slots = _within(addresses, arena.address, arena.slot_bytes, arena.slots)
        self.flights.append(Flight(len(self.flights), rank, target, handle, leg, pages, slots))
        if leg in self.settled:
            raise Violation(f"handle {len(self.flights) - 1} was posted after its attempt was acknowledged")

    def post(self, agent: Any, job: Job, item: Any) -> Any:
        """The mover's own; it also remembers whose handle it was."""
        made = post(agent, job, item)
        rank = next(r for r in self.prefills if r.agent is agent)
        rooms = rank.endpoint._source._rooms
        legs = [*rooms.draining, *(leg for room in rooms.open.values() for leg in room.legs.values())]
        leg = next(leg for leg in legs if leg.job is job)
        self._legs[made[0]] = (leg.request.identity, rank.where[0], leg.peer.key)
        return made

    def may_land(self, flight: Flight) -> bool:
        """A byte of it may still be written."""
        if flight.state not in ("active", "lost", "late") or flight.handle.peer in self.hub.destroyed:
            return False
        return flight.source.alive or self.loop.now < flight.source.died_at + LIMBO

    def held_by(self, receipt: Receipt) -> bool:
        """The module lets nobody else have the pages yet."""
        return not receipt.transfer.pages_releasable

    def receipt_of(self, flight: Flight) -> Receipt | None:
        """The attempt that a handle writes for."""
        who = flight.leg[0]
        for receipt in self.receipts:
            mine = (receipt.room, receipt.attempt, receipt.rank.where[1])
            if receipt.rank is flight.target and mine == (who.room, who.attempt, who.destination_incarnation):
                return receipt
        return None

    def legs_of(self, receipt: Receipt) -> list[LegId]:
        """One for each prefill rank that it was asked of."""
        to = receipt.rank.where
        return [
            (Identity(receipt.room, receipt.attempt, source[1], to[1]), source[0], to[0]) for source in receipt.sources
        ]


def _within(addresses: list[int], base: int, size: int, count: int) -> tuple[int, ...]:
    """Which items of an array at `base` these addresses lie in."""
    return tuple(sorted({(a - base) // size for a in addresses if 0 <= a - base < size * count}))


@dataclass
class _Set:
    def wait(self, timeout: float) -> bool:
        return True


_READY = _Set()
