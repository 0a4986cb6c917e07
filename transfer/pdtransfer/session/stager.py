"""Prefill side of what goes through slots: pack when there is room, post when decode lent a slot, say what
was filled. One block a turn of the loop, legs of all peers in turn.

`staged` needs a slot of this rank's arena to pack in and one of decode's to write to, `merge` the latter
only (whole pages go straight from the pool), `split` the former only (whole pages are written in place).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import LayoutMismatch, TransferError
from pdtransfer.mover.executor import Mover
from pdtransfer.peers import real_kind
from pdtransfer.plan import Block, Lane
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.frames import SlotFilled, SlotGrant, SlotsWanted
from pdtransfer.session.links import Link
from pdtransfer.session.rooms import Leg
from pdtransfer.session.strategy import PACKS, THROUGH_SLOTS
from pdtransfer.session.wiring import Wiring
from pdtransfer.staging.copier import Fence

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """A block that may go (its chunk is ready), with the pool pages of its pages on both sides."""

    link: Link
    block: Block
    source: Pages
    destination: Pages

    @property
    def lane(self) -> Lane:
        """Its lane."""
        return self.link.pair.plan.lanes[self.block.lane]


@dataclass(eq=False)
class Stage:
    """What one leg has to put through slots. `wanted`: slots asked for so far; `grants`: lent and not
    used; `filled`: what was said of a ticket, to be said again when it is lent again."""

    leg: Leg
    mover: Mover
    loads: deque[Load] = field(default_factory=deque)
    wanted: dict[MemoryKind, int] = field(default_factory=dict)
    grants: dict[MemoryKind, deque[SlotGrant]] = field(default_factory=dict)
    using: set[int] = field(default_factory=set)
    """Tickets whose slot is being filled."""
    busy: int = 0
    """Blocks that are packed or in flight."""
    last: bool = False
    """No more blocks will come."""
    queued: bool = False
    """It stands in line."""
    asked_at: float = 0.0

    @property
    def over(self) -> bool:
        """Every block is in place."""
        return self.last and not self.loads and not self.busy


class Stager:
    """Runs in the core's thread. `fail(leg, error)` ends a leg's room, `closed(leg)` says that the last
    block of a leg is in place."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot, fail: Callable[[Leg, TransferError], None]) -> None:
        self._core = core
        self._wiring = wiring
        self._depot = depot
        self._fail = fail
        self._turns: dict[str, deque[Stage]] = {}
        """By peer, in turn: legs with blocks that may go, in turn."""
        self._packing: deque[tuple[Fence, Callable[[], None]]] = deque()
        core.works.append(self._work)

    # --- the leg ----------------------------------------------------------------------------

    def want(self, stage: Stage, arena: MemoryKind, more: int) -> None:
        """Ask for slots as soon as it is known how many it takes: the answer comes while the chunk's
        event is awaited."""
        before = stage.wanted.get(arena, 0)
        stage.wanted[arena] = before + more
        if before == 0 and len(stage.grants.get(arena, ())) >= more:
            return  # lent with the request
        stage.asked_at = stage.asked_at or time.monotonic()
        self._ask(stage, arena)

    def _ask(self, stage: Stage, arena: MemoryKind) -> None:
        frame = SlotsWanted(**stage.leg.request.ids, arena=arena, total=stage.wanted[arena])
        self._wiring.send(stage.leg.peer, frame)

    def again(self, stage: Stage) -> None:
        """After a reconnect: what was asked for may be lost."""
        for arena in stage.wanted:
            self._ask(stage, arena)

    def push(self, stage: Stage, loads: list[Load]) -> None:
        """These blocks may go: their bytes are in the pool."""
        stage.loads.extend(loads)
        self._queue(stage)

    def close(self, stage: Stage) -> None:
        """No more blocks."""
        stage.last = True
        self._maybe_over(stage)

    def on_grant(self, stage: Stage, grant: SlotGrant) -> None:
        """Decode lent a slot, or says again that it did."""
        leg = stage.leg
        if grant.ticket in leg.filled:
            self._wiring.send(leg.peer, leg.filled[grant.ticket])
            return
        held = stage.grants.setdefault(grant.arena, deque())
        if grant.ticket in stage.using or any(g.ticket == grant.ticket for g in held):
            return
        arena = next((a for a in leg.card.staging if a.memory is grant.arena), None)
        if arena is None or grant.slot >= arena.slots:
            told = f"slot: {grant.slot} is none of the {grant.arena} arena on decode's card"
            self._fail(leg, LayoutMismatch(told, peer=leg.peer.label))
            return
        lent = len(leg.filled) + len(stage.using) + sum(map(len, stage.grants.values()))
        # Decode may lend a first slot of each arena with the request, before it is asked for one.
        if lent >= len(leg.card.staging) + sum(stage.wanted.values()):
            told = f"slot: {grant.slot} was lent, and {lent} were all that were asked for"
            self._fail(leg, LayoutMismatch(told, peer=leg.peer.label))
            return
        if stage.asked_at:
            self._core.metrics.observe("staging_wait_seconds", time.monotonic() - stage.asked_at)
            stage.asked_at = 0.0
        held.append(grant)
        self._queue(stage)
        self._core.wake()

    # --- turns ------------------------------------------------------------------------------

    def _queue(self, stage: Stage) -> None:
        if stage.loads and not stage.queued:
            stage.queued = True
            self._turns.setdefault(stage.leg.card.agent_name, deque()).append(stage)
            self._core.wake()

    def _work(self) -> bool:
        """Look at the packs that go on, then move one block."""
        moved = self._packed()
        for peer in list(self._turns):
            queue = self._turns.pop(peer)
            went = self._first(queue)
            if queue:
                self._turns[peer] = queue  # to the end of the line
            if went:
                return True
        return moved

    def _first(self, queue: deque[Stage]) -> bool:
        """Move one block of the first leg of a peer that can. Legs without a grant leave the line: the
        grant brings them back."""
        while queue:
            stage = queue.popleft()
            stage.queued = False
            if stage.leg.error is not None or not stage.loads:
                continue
            at = self._next(stage)
            if at is None:
                continue
            load, packs = stage.loads[at], stage.leg.request.strategy in PACKS
            grants = stage.grants.get(real_kind(stage.leg.card, load.lane.destination_kind))
            kind = real_kind(self._wiring.card, load.lane.source_kind)
            mine = self._depot.take(kind, stage.leg.card.agent_name) if packs else None
            stage.queued = True
            if packs and mine is None:
                queue.appendleft(stage)
                return False
            queue.append(stage)
            del stage.loads[at]
            self._go(stage, load, grants.popleft() if grants else None, kind, mine)
            return True
        return False

    @staticmethod
    def _next(stage: Stage) -> int | None:
        """Which block can go: where slots are lent, the first one that has a slot of its memory kind. (If a leg
        let the slots of one kind wait for a block of the other kind, two legs could wait for each other.)"""
        if stage.leg.request.strategy not in THROUGH_SLOTS:
            return 0
        lent = {kind for kind, held in stage.grants.items() if held}
        for at, load in enumerate(stage.loads):
            if real_kind(stage.leg.card, load.lane.destination_kind) in lent:
                return at
        return None

    def _go(self, stage: Stage, load: Load, grant: SlotGrant | None, kind: MemoryKind, mine: int | None) -> None:
        leg, lane, link = stage.leg, load.lane, load.link
        stage.busy += 1
        if grant is not None:
            stage.using.add(grant.ticket)

        def done(moved: bool) -> None:
            if mine is not None:
                self._depot.give(kind, mine)
            stage.busy -= 1
            if moved:
                self._placed(stage, load, grant)

        try:
            fence = None
            if mine is not None:
                rows = link.pair.rows(lane.number, source=True).rows(load.block, load.source)
                fence = self._depot.pack(rows, kind, mine)
                self._core.count("copied_bytes_total", load.block.nbytes, operation="pack")
            theirs = grant.slot if grant is not None else None
            item = link.through_slots(lane, load.block, load.source, load.destination, mine, theirs, done)
        except Exception as error:  # of this leg's own memory or lists: the others go on
            if not isinstance(error, TransferError):
                logger.exception("%s: a block of room %d could not be packed", self._core.name, leg.request.room)
                error = TransferError(f"a block could not be packed: {error!r}")
            done(False)
            self._fail(leg, error.about(peer=leg.peer.label))
            return
        assert leg.job is not None
        job = leg.job
        if fence is None or fence.done():
            stage.mover.add(job, [item])
        else:
            self._core.hot(1)
            self._packing.append((fence, lambda: stage.mover.add(job, [item])))

    def _packed(self) -> bool:
        """Post what a GPU has packed."""
        moved = False
        for _ in range(len(self._packing)):
            fence, post = self._packing.popleft()
            if fence.done():
                self._core.hot(-1)
                post()
                moved = True
            else:
                self._packing.append((fence, post))
        return moved

    def _placed(self, stage: Stage, load: Load, grant: SlotGrant | None) -> None:
        """A block's handle is done: every byte of it is where it was written to."""
        leg, block = stage.leg, load.block
        if leg.job is not None:
            leg.job.deadline = time.monotonic() + self._core.timeouts.transfer
        if grant is not None:
            stage.using.discard(grant.ticket)
            frame = SlotFilled(
                **leg.request.ids,
                ticket=grant.ticket,
                lane=block.lane,
                first_region=block.first_region,
                regions=block.regions,
                first_page=block.first_page,
                pages=block.pages,
                memory=load.link.pair.memories[0],
            )
            leg.filled[grant.ticket] = frame
            if leg.error is None:
                self._wiring.send(leg.peer, frame)
        self._maybe_over(stage)

    def _maybe_over(self, stage: Stage) -> None:
        job = stage.leg.job
        if stage.over and job is not None and not job.closed and stage.leg.error is None:
            stage.mover.close(job)
