"""Decode side of what comes through slots: lends them, scatters what was filled, and only while the
request lives.

A slot's bytes become pages here, by this rank's own hand: a late write of a source that was given up can
hit a slot that nobody else was lent, and no page. One block is scattered a turn of the loop, so that
frames and progress go on in between.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import LayoutMismatch, TransferError
from pdtransfer.peers import key_of, real_kind
from pdtransfer.plan import Block, Lane
from pdtransfer.session.core import Core
from pdtransfer.session.coverage import Area
from pdtransfer.session.depot import Depot
from pdtransfer.session.frames import SlotFilled, SlotGrant, SlotsWanted
from pdtransfer.session.pairs import Pair, Pairs
from pdtransfer.session.receives import Leg, Receive
from pdtransfer.session.slots import SlotBook, Ticket
from pdtransfer.session.strategy import THROUGH_SLOTS
from pdtransfer.session.wiring import Wiring
from pdtransfer.staging.copier import Fence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Filled:
    receive: Receive
    leg: Leg
    ticket: Ticket
    pair: Pair
    block: Block


class Intake:
    """Runs in the core's thread. `fail(receive, error)` ends a receive; `arrived(receive, leg)` says that
    something of a leg is in its pages; `lives(receive)` is asked before a byte is scattered."""

    def __init__(
        self,
        core: Core,
        wiring: Wiring,
        depot: Depot,
        pairs: Pairs,
        *,
        fail: Callable[[Receive, TransferError], None],
        arrived: Callable[[Receive, Leg], None],
        lives: Callable[[Receive], bool],
        writing: Callable[[Receive, Leg, bool], None],
    ) -> None:
        self._core = core
        self._wiring = wiring
        self._depot = depot
        self._pairs = pairs
        self._fail = fail
        self._arrived = arrived
        self._lives = lives
        self._writing = writing
        self._filled: deque[_Filled] = deque()
        self.book = SlotBook({})
        core.works.append(self._work)

    def open(self) -> None:
        """The arenas are there: lend their slots."""
        self.book = SlotBook({a.memory: (a.slots, a.slot_bytes) for a in self._depot.told})

    # --- frames -----------------------------------------------------------------------------

    def early(self, leg: Leg) -> None:
        """Lend a first slot with the request where there is plenty: a small request is spared a round trip.
        (At most half of an arena is lent to who does not need it yet.)"""
        if leg.request.strategy in THROUGH_SLOTS:
            lanes = (lane for lane in leg.pair.plan.lanes if not lane.direct(leg.request.strategy))
            for arena in sorted({real_kind(self._wiring.card, lane.destination_kind) for lane in lanes}):
                if self.book.roomy(arena):
                    leg.lent_early = True
                    self.book.want(key_of(leg.card), leg, arena, 1)
            self._lend()

    def on_wanted(self, receive: Receive, leg: Leg, frame: SlotsWanted) -> None:
        """The source has something to place."""
        if not self._lives(receive) or leg.told:
            return
        most = leg.missing.size
        if leg.request.strategy not in THROUGH_SLOTS or self.book.slot_bytes(frame.arena) is None:
            self._fail(receive, LayoutMismatch(f"arena: no slots of {frame.arena} were promised", peer=_label(leg)))
        elif frame.total > most:
            told = f"total: {frame.total} slots were asked for, {most} blocks can not be more"
            self._fail(receive, LayoutMismatch(told, peer=_label(leg)))
        else:
            if leg.lent_early:
                leg.lent_early = False
                self.again(leg)  # who asks may not have what was lent with the request
            self.book.want(key_of(leg.card), leg, frame.arena, frame.total)
            self._lend()

    def on_filled(self, receive: Receive, leg: Leg, frame: SlotFilled) -> None:
        """A slot's bytes are in place: scatter them soon. A ticket that was spent is a repeat."""
        ticket = self.book.find(leg, frame.ticket)
        if ticket is None or frame.ticket in leg.queued or not self._lives(receive):
            return
        try:
            pair, block = self._checked(leg, ticket, frame)
        except TransferError as error:
            self._fail(receive, error.about(peer=_label(leg)))
            return
        leg.queued.add(frame.ticket)
        self._filled.append(_Filled(receive, leg, ticket, pair, block))
        self._core.wake()

    def _checked(self, leg: Leg, ticket: Ticket, frame: SlotFilled) -> tuple[Pair, Block]:
        pair = leg.pair
        if frame.memory is not None:
            pair = self._pairs.get(leg.card, frame.memory, leg.request.memory)
            if not pair.same_destination(leg.pair):
                raise LayoutMismatch("memory: its regions do not lie where those of the request do")
        if frame.lane >= len(pair.plan.lanes) or pair.plan.lanes[frame.lane].direct(leg.request.strategy):
            raise LayoutMismatch(f"lane: {frame.lane} is none that comes through slots")
        lane = pair.plan.lanes[frame.lane]
        if real_kind(self._wiring.card, lane.destination_kind) is not ticket.arena:
            raise LayoutMismatch(f"ticket: a slot of {ticket.arena} holds nothing of lane {frame.lane}")
        area = _area(leg, lane, frame)
        if area.first_page < 0 or not leg.missing.inside(area):
            raise LayoutMismatch(
                f"regions {frame.first_region}+{frame.regions}, pages {frame.first_page}+{frame.pages}: "
                "outside what was asked for"
            )
        nbytes = frame.regions * frame.pages * lane.unit
        if nbytes > (self.book.slot_bytes(ticket.arena) or 0):
            raise LayoutMismatch(f"pages: {nbytes} bytes do not fit in a slot")
        if not leg.missing.take(area):
            raise LayoutMismatch("pages: some of them came before")
        return pair, Block(frame.lane, frame.first_region, frame.regions, frame.first_page, frame.pages, nbytes)

    def again(self, leg: Leg) -> None:
        """What was said before may be lost: say which slots it holds. The source says again what it
        filled, and takes what it did not know of."""
        for ticket in self.book.out(leg):
            self._grant(leg, ticket)

    # --- slots ------------------------------------------------------------------------------

    def quarantine(self, leg: Leg) -> None:
        """The receive failed: nothing of the leg is scattered any more, its slots go to nobody."""
        self.book.quarantine(leg)
        self._lend()

    def release(self, leg: Leg) -> None:
        """Nothing of the leg can land any more, and nothing of it is wanted."""
        if leg.scattering:
            return  # its slots are still read; the last scatter comes back here
        self.book.release(leg)
        self._lend()

    def _lend(self) -> None:
        for ticket in self.book.lend():
            leg = ticket.leg
            assert isinstance(leg, Leg)
            self._grant(leg, ticket)

    def _grant(self, leg: Leg, ticket: Ticket) -> None:
        if leg.peer is not None:
            grant = SlotGrant(**leg.request.ids, arena=ticket.arena, slot=ticket.slot, ticket=ticket.number)
            self._wiring.send(leg.peer, grant)

    # --- scatter ----------------------------------------------------------------------------

    def _work(self) -> bool:
        """Scatter one block."""
        while self._filled:
            item = self._filled.popleft()
            if not self._lives(item.receive):
                continue  # its slot waits for the leg to settle
            self._scatter(item)
            return True
        return False

    def _scatter(self, item: _Filled) -> None:
        leg, block = item.leg, item.block
        lane = item.pair.plan.lanes[block.lane]
        pages = leg.page_numbers(lane, block.first_page, block.pages)
        try:
            rows = item.pair.rows(block.lane, source=False).rows(block, pages)
            fence = self._depot.scatter(item.ticket.arena, item.ticket.slot, rows)
        except Exception as error:  # of this request's memory: the others go on
            logger.exception("%s: a block of room %d could not be scattered", self._core.name, leg.request.room)
            self._fail(item.receive, TransferError(f"a block could not be scattered: {error!r}", peer=_label(leg)))
            return
        self._core.count("copied_bytes_total", block.nbytes, operation="scatter")
        if fence.done():
            self._scattered(item)
        else:
            leg.scattering += 1
            self._writing(item.receive, leg, True)
            self._core.spawn(self._fenced(item, fence), f"scatter-{leg.request.room}")

    async def _fenced(self, item: _Filled, fence: Fence) -> None:
        """A GPU's scatter: the pages are neither told nor given back before it is done."""
        self._core.hot(1)
        try:
            while not fence.done():
                await self._core.turn()
        finally:
            self._core.hot(-1)
        item.leg.scattering -= 1
        self._writing(item.receive, item.leg, False)
        self._scattered(item)

    def _scattered(self, item: _Filled) -> None:
        leg = item.leg
        leg.queued.discard(item.ticket.number)
        self.book.spend(item.ticket)
        self._lend()
        if self._lives(item.receive):
            item.receive.deadline = time.monotonic() + self._core.timeouts.transfer
            self._arrived(item.receive, leg)
        elif leg.settled:
            self.release(leg)


def _area(leg: Leg, lane: Lane, frame: SlotFilled) -> Area:
    at = frame.first_page - leg.first_page(lane)
    return Area(frame.lane, frame.first_region, frame.regions, at, frame.pages)


def _label(leg: Leg) -> str:
    return leg.peer.label if leg.peer is not None else leg.card.pod_name


__all__ = ["Intake", "MemoryKind"]
