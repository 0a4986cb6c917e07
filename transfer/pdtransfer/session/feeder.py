"""What the engine hands over for a room, routed and queued for each decode rank that asked: pages that are
written in place as lazy batches, what goes through slots as blocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pdtransfer.peers import real_kind
from pdtransfer.plan import Lane, blocks
from pdtransfer.plan.pages import as_pages
from pdtransfer.session.api import TransferState
from pdtransfer.session.calibrate import transport_of
from pdtransfer.session.core import Core
from pdtransfer.session.coverage import Area, Coverage
from pdtransfer.session.digests import Digests, Sent, undigestible
from pdtransfer.session.frames import Started
from pdtransfer.session.links import Link, Links
from pdtransfer.session.rooms import Leg, Room
from pdtransfer.session.stager import Load, Stage, Stager
from pdtransfer.session.strategy import THROUGH_SLOTS, refused, slot_bytes
from pdtransfer.session.transfers import Chunk
from pdtransfer.session.wiring import Wiring

Pages = npt.NDArray[np.int64]

BLOCK, OVERLAP = 2 << 20, 8
"""A block costs some 0.3 ms a side besides its bytes, so it fills a slot; but a request has a few (OVERLAP)
blocks of at least BLOCK bytes, so that packing, writing and scattering overlap."""


@dataclass
class _Part:
    """What one chunk brings for one leg, in both ways to go."""

    chunk: Chunk
    link: Link
    in_place: list[tuple[Lane, Area, Pages, Pages]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Feeder:
    """Feeds one leg, in the core's thread. Made when the request comes, so that the room finds it ready;
    `advance` then goes on as far as it can, and is called again when there is news."""

    def __init__(self, core: Core, wiring: Wiring, links: Links, stager: Stager, digests: Digests, leg: Leg) -> None:
        self._core = core
        self._wiring = wiring
        self._links = links
        self._stager = stager
        self._digests = digests
        self._room: Room | None = None
        self._resume: Callable[[], None] = lambda: None
        self._waiting = False
        self._closed = False
        self._broken: Exception | None = None
        """What ended a wait."""
        self._leg = leg
        self._mover = core.mover
        self._parts: deque[_Part] = deque()
        self._routed = 0
        self._base = links.get(leg.peer, leg.card, None, leg.request.memory)
        plan = self._base.pair.plan
        why = refused(leg.request.strategy, plan, wiring.card, leg.card)
        if why is not None:
            raise LayoutMismatch(f"strategy {leg.request.strategy}: {why}")
        self._wanted = {"": leg.request.pages, **{p.pool: p.pages for p in leg.request.pools}}
        self._lists: dict[str, Pages] = {n: np.array(p, dtype=np.int64) for n, p in self._wanted.items()}
        self._queued = Coverage((lane.regions, len(self._wanted.get(lane.pool, ()))) for lane in plan.lanes)
        self._sent = Sent({lane.number: len(self._wanted.get(lane.pool, ())) for lane in plan.lanes})
        self._block = max(BLOCK, plan.nbytes(len(leg.request.pages)) // OVERLAP)
        # Over sockets the bytes stay in the kernel until decode progresses, and it does so when it knows that they
        # come; else they are on their way before decode is told, which then costs no time.
        self._told_first = transport_of(leg.peer.verdict.transport, wiring.card, leg.card) == "tcp"
        lent = leg.stage.grants if leg.stage is not None else {}
        leg.stage = Stage(leg, self._mover, grants=lent)  # slots may have been lent with the request

    @property
    def fresh(self) -> bool:
        """What it prepared still means something."""
        leg = self._leg
        return self._links.get(leg.peer, leg.card, None, leg.request.memory) is self._base

    def begin(self, room: Room, resume: Callable[[], None]) -> None:
        """The engine's room is there. `resume` calls `advance` for this leg, and handles what it raises."""
        self._room, self._resume = room, resume

    def advance(self) -> None:
        """Route what is new, queue chunk by chunk, each only after its ready event, and close the job after
        the last. Raises TransferError, or what an event raised."""
        if self._broken is not None:
            raise self._broken
        room, leg = self._room, self._leg
        while room is not None and not (self._waiting or self._closed or leg.error or room.error):
            self._route_new(room)
            if not self._parts:
                if room.metadata is not None:
                    self._finish()
                return
            chunk = self._parts[0].chunk
            if self._is_ready(chunk):
                self._core.metrics.observe("ready_wait_seconds", 0.0)
                self._queue(room, self._parts.popleft())
            else:
                self._later(self._ready(chunk))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        """Go on after a wait."""
        self._waiting = True

        async def wait() -> None:
            try:
                await work
            except Exception as error:
                self._broken = error
            self._waiting = False
            self._resume()

        self._core.spawn(wait(), f"feed-{self._leg.request.room}")

    def _finish(self) -> None:
        self._check_all()
        if self._leg.request.digest and not self._leg.digest:
            self._later(self._digest())
            return
        self._closed = True
        job = self._leg.job
        assert job is not None
        job.deadline = time.monotonic() + self._core.timeouts.transfer
        self._stager.close(self._leg.stage)

    async def _digest(self) -> None:
        """Of what the pool holds while it is sent: the pages are the engine's again only after Done."""
        why = undigestible(self._base.pair.plan)
        if why is not None:
            raise LayoutMismatch(f"digest: {why}")
        leg, pair = self._leg, self._sent.pair or self._base.pair
        leg.digest = await self._digests.of(pair, self._sent.pages, source=True, lives=lambda: leg.error is None)

    def _check_all(self) -> None:
        if self._queued.left:
            asked = len(self._leg.request.pages)
            lanes = [lane.number for lane in self._base.pair.plan.lanes if not lane.pool]
            whole = min((self._queued.whole_pages(lane) for lane in lanes), default=asked)
            told = f"prefill handed over {whole} of {asked} pages decode asked for"
            raise LayoutMismatch(told if whole < asked else f"{told}, but not every page of its other pools")

    # --- routing ----------------------------------------------------------------------------

    def _route_new(self, room: Room) -> None:
        """Take on what was handed over since; slots are asked for before its event is awaited."""
        chunks = room.chunks
        while self._routed < len(chunks):
            began = time.perf_counter()
            part = self._route(chunks[self._routed])
            self._routed += 1
            self._core.metrics.observe("plan_seconds", time.perf_counter() - began)
            if part.in_place or part.loads:
                self._parts.append(part)

    def _route(self, chunk: Chunk) -> _Part:
        request, link = self._leg.request, self._base
        if chunk.memory is not None:
            link = self._links.get(self._leg.peer, self._leg.card, chunk.memory, request.memory)
            if not link.pair.same_destination(self._base.pair):
                raise LayoutMismatch(f"memory: the regions of {chunk.memory} are not those of the other kind")
        lists = {"": (chunk.first_page, chunk.pages), **{name: (0, p) for name, p in chunk.pools.items()}}
        part = _Part(chunk, link)
        wanted: dict[MemoryKind, int] = {}
        for lane in link.pair.plan.lanes:
            if lane.pool not in lists or lane.pool not in self._wanted:
                continue
            first = 0 if lane.pool else request.first_page
            at, pages = lists[lane.pool]
            if lane.pool and len(pages) != len(self._wanted[lane.pool]):
                theirs = len(self._wanted[lane.pool])
                raise LayoutMismatch(f"pool {lane.pool!r}: {len(pages)} prefill pages, {theirs} decode pages")
            low, high = max(at, first), min(at + len(pages), first + len(self._wanted[lane.pool]))
            regions = lane.regions_of(chunk.layers)
            if low >= high or not regions:
                continue
            area = Area(lane.number, regions.start, len(regions), low - first, high - low)
            source = as_pages(pages, int(lane.source.items.min()), "prefill")
            for fresh in self._queued.take_rest(area):
                self._lay(part, lane, fresh, first, source[fresh.first_page + first - at :], wanted)
        for arena, count in wanted.items():
            self._stager.want(self._leg.stage, arena, count)
        return part

    def _lay(
        self, part: _Part, lane: Lane, area: Area, first: int, source: Pages, wanted: dict[MemoryKind, int]
    ) -> None:
        """`source` begins at the area's first page; `first` is the number of the first page asked for."""
        strategy, mine, theirs = self._leg.request.strategy, self._wiring.card, self._leg.card
        source = source[: area.pages]
        if self._leg.request.digest:
            self._sent.add(part.link.pair, lane.number, area.first_page, source)
        destination = self._lists[lane.pool][area.first_page : area.first_page + area.pages]
        if strategy == "sliced" or lane.direct(strategy):
            part.in_place.append((lane, area, source, destination))
            return
        regions = range(area.first_region, area.first_region + area.regions)
        start = area.first_page + first
        before = len(part.loads)
        size = min(slot_bytes(strategy, lane, mine, theirs), max(self._block, lane.unit))
        for block in blocks(lane, start, area.pages, size, regions):
            cut = slice(block.first_page - start, block.first_page - start + block.pages)
            part.loads.append(Load(part.link, block, source[cut], destination[cut]))
        if strategy in THROUGH_SLOTS:
            arena = real_kind(theirs, lane.destination_kind)
            wanted[arena] = wanted.get(arena, 0) + len(part.loads) - before

    # --- queueing ---------------------------------------------------------------------------

    def _queue(self, room: Room, part: _Part) -> None:
        """Its bytes are in the pool: post or pack."""
        leg, job = self._leg, self._leg.job
        assert job is not None
        job.deadline = time.monotonic() + self._core.timeouts.transfer
        room.sender.cell.move(TransferState.TRANSFERRING)
        if not leg.started:
            leg.started = True
            self._core.metrics.observe("queue_seconds", time.monotonic() - leg.came)
        if self._told_first:
            self._wiring.send(leg.peer, Started(**leg.request.ids))
        else:
            leg.announce = True
        for lane, area, source, destination in part.in_place:
            self._mover.add(job, part.link.in_place(lane, area, source, destination, self._mover.handle_bytes))
        self._stager.push(leg.stage, part.loads)
        self._core.wake()

    @staticmethod
    def _is_ready(chunk: Chunk) -> bool:
        try:
            return chunk.ready.wait(0.0)
        except Exception as error:
            raise TransferError(f"the ready event failed: {error!r}") from error

    async def _ready(self, chunk: Chunk) -> None:
        began, pause = time.monotonic(), 0.0
        while not self._is_ready(chunk):
            if self._leg.error is not None or (self._room is not None and self._room.error is not None):
                return
            if time.monotonic() - began > self._core.timeouts.transfer:
                self._core.count("deadlines_total", state="ready")
                raise DeadlineExceeded("the chunk's ready event never came")
            await asyncio.sleep(pause)
            pause = min(0.002, pause + 0.0005)
        self._core.metrics.observe("ready_wait_seconds", time.monotonic() - began)
        if self._room is not None and self._leg.error is None and self._room.error is None:
            self._queue(self._room, self._parts.popleft())
