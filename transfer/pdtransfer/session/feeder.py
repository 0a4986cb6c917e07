"""What the engine hands over for a room, planned and queued for each decode rank that asked."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from pdtransfer.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pdtransfer.mover.executor import Job, batches
from pdtransfer.peers import Peer, PeerKey, real_kind
from pdtransfer.plan import plan
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.frames import Request, Started
from pdtransfer.session.transfers import Chunk, SendTransfer
from pdtransfer.session.wiring import Wiring


@dataclass(eq=False)
class Leg:
    """One decode rank's request."""

    peer: Peer
    request: Request
    deadline: float
    job: Job | None = None
    task: asyncio.Task[None] | None = None
    error: TransferError | None = None
    done: bool = False
    sent_pages: int = 0

    @property
    def over(self) -> bool:
        """Nothing of it is posted or will be, as far as is known."""
        return self.done or (self.error is not None and (self.job is None or self.job.finished))


@dataclass(eq=False)
class Room:
    """What the engine handed over for one room, and who takes it."""

    sender: SendTransfer
    deadline: float
    chunks: list[Chunk] = field(default_factory=list)
    metadata: bytes | None = None
    legs: dict[PeerKey, Leg] = field(default_factory=dict)
    error: TransferError | None = None
    given_up: tuple[float, TransferError] | None = None
    """A decode rank aborted: when the room fails, and with what, unless it asks again."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake every leg."""
        self.news.set()
        self.news = asyncio.Event()

    @property
    def required(self) -> int:
        """Decode ranks that have to be served."""
        return max((leg.request.required for leg in self.legs.values()), default=1)


async def feed_chunks(core: Core, wiring: Wiring, room: Room, leg: Leg) -> None:
    """Plan and queue chunk by chunk, each only after its ready event; then close the job."""
    job, request = leg.job, leg.request
    assert job is not None
    source, destination = wiring.card.layout, leg.peer.card.layout
    index = 0
    while leg.error is None and room.error is None:
        if index == len(room.chunks):
            if room.metadata is None:
                await room.news.wait()
                continue
            break
        chunk = room.chunks[index]
        index += 1
        await _ready(core, room, leg, chunk)
        if leg.error is not None or room.error is not None:
            return
        low = max(chunk.first_page, request.first_page)
        high = min(chunk.first_page + len(chunk.pages), request.first_page + len(request.pages))
        if low >= high:
            continue
        made = plan(
            source,
            destination,
            chunk.pages[low - chunk.first_page : high - chunk.first_page],
            request.pages[low - request.first_page : high - request.first_page],
        )
        job.deadline = time.monotonic() + core.timeouts.transfer
        room.sender.cell.move(TransferState.TRANSFERRING)
        wiring.send(leg.peer, Started(**request.ids))
        leg.sent_pages += high - low
        core.mover.add(
            job,
            batches(
                made,
                lambda kind: real_kind(wiring.card, kind),
                lambda kind: real_kind(leg.peer.card, kind),
            ),
        )
        core.wake()
    if leg.error is None and room.error is None:
        if leg.sent_pages != len(request.pages):
            raise LayoutMismatch(f"prefill handed over {leg.sent_pages} of {len(request.pages)} pages decode asked for")
        job.deadline = time.monotonic() + core.timeouts.transfer
        core.mover.close(job)


async def _ready(core: Core, room: Room, leg: Leg, chunk: Chunk) -> None:
    until = time.monotonic() + core.timeouts.transfer
    pause = 0.0
    while True:
        try:
            if chunk.ready.wait(0.0):
                return
        except Exception as error:
            raise TransferError(f"the ready event failed: {error!r}") from error
        if leg.error is not None or room.error is not None:
            return
        if time.monotonic() > until:
            raise DeadlineExceeded("the chunk's ready event never came")
        await asyncio.sleep(pause)
        pause = min(0.002, pause + 0.0005)
