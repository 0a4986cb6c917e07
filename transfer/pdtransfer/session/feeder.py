"""What the engine hands over for a room, planned and queued for each decode rank that asked."""

from __future__ import annotations

import asyncio
import time

from pdtransfer.errors import DeadlineExceeded, LayoutMismatch, TransferError
from pdtransfer.mover.executor import batches
from pdtransfer.peers import real_kind
from pdtransfer.plan import plan
from pdtransfer.session.api import TransferState
from pdtransfer.session.core import Core
from pdtransfer.session.frames import Started
from pdtransfer.session.rooms import Leg, Room
from pdtransfer.session.transfers import Chunk
from pdtransfer.session.wiring import Wiring


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
        fresh = [page for page in range(low, high) if page not in leg.sent]  # chunks may overlap
        if not fresh:
            continue
        made = plan(
            source,
            destination,
            [chunk.pages[page - chunk.first_page] for page in fresh],
            [request.pages[page - request.first_page] for page in fresh],
        )
        job.deadline = time.monotonic() + core.timeouts.transfer
        room.sender.cell.move(TransferState.TRANSFERRING)
        wiring.send(leg.peer, Started(**request.ids))
        leg.sent.update(fresh)
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
        if len(leg.sent) != len(request.pages):
            raise LayoutMismatch(f"prefill handed over {len(leg.sent)} of {len(request.pages)} pages decode asked for")
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
