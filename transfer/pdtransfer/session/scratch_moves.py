"""Transfers between a slot of scratch and a peer, timed. A slot with a transfer in flight stays out of use."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import numpy as np

from pdtransfer.agent.port import Descriptors, Operation
from pdtransfer.contract.base import MemoryKind
from pdtransfer.errors import DeadlineExceeded
from pdtransfer.mover.jobs import Batch, Job
from pdtransfer.peers import Peer
from pdtransfer.session.calibrate import BLOCKS, PIECE, PLACES, long_pieces, short_pieces
from pdtransfer.session.core import Core
from pdtransfer.session.scratch import Scratch

ROUNDS = (3, 6)
ENOUGH = 0.03
"""Seconds. WRITEs of each shape are repeated until they took that long, within ROUNDS; the fastest counts, since
other work only makes them slower."""


REST = 60.0
"""Seconds after which a slot is used again whose transfer errored: what may still land there can only make a later
probe fail."""


@dataclass
class _Left:
    """A transfer whose probe has ended; `since` (monotonic seconds) it is known to have errored."""

    peer: Peer
    job: Job
    since: float = 0.0


@dataclass(frozen=True)
class Timed:
    """Fastest of several WRITEs: seconds of one short piece, of PIECES short ones (NaN: not tried) and of
    `size` bytes in BLOCKS pieces; `nbytes` of all of them together."""

    one: float
    short: float
    long: float
    size: int
    nbytes: int


class ScratchMoves:
    """Runs in the core's thread."""

    def __init__(self, core: Core, scratch: Scratch) -> None:
        self._core = core
        self._scratch = scratch
        self._active: dict[int, Job] = {}
        """By slot: the transfer that is in flight, or that errored and may still land."""
        self._left: dict[int, _Left] = {}
        """Those whose probe has ended."""

    def leave(self, peer: Peer, slot: int) -> bool:
        """The probe needs the slot no more; False when a transfer is in flight: then it is given back after it."""
        if slot in self._active:
            self._left[slot] = _Left(peer, self._active[slot])
            return False
        self._scratch.give(slot)
        return True

    def hangs(self, peer: Peer) -> bool:
        """Bytes of an earlier probe of this peer are still on their way. (One more would only take a slot more.)"""
        now = time.monotonic()
        for slot, left in list(self._left.items()):
            if not left.job.in_flight:  # it errored
                left.since = left.since or now
                if now - left.since > REST:
                    self._free(slot)
        return any(left.peer is peer and left.job.in_flight for left in self._left.values())

    def _free(self, slot: int) -> None:
        self._active.pop(slot, None)
        if self._left.pop(slot, None) is not None:
            self._scratch.give(slot)

    async def write(self, peer: Peer, local: int, remote: int, size: int) -> Timed:
        """Write the block, several times and in several shapes: the bytes are always the same ones."""
        shapes = {
            "one": (one_piece(local, PIECE), one_piece(remote, PIECE)),
            "long": (long_pieces(local, size), long_pieces(remote, size)),
        }
        if size >= 2 * PIECE * PLACES:
            shapes["short"] = (short_pieces(local), short_pieces(remote))
        found: dict[str, list[float]] = {}
        nbytes = 0
        for turn in range(ROUNDS[1]):
            if turn >= ROUNDS[0] and sum(sum(times) for times in found.values()) > ENOUGH:
                break
            for shape, (here, there) in shapes.items():
                found.setdefault(shape, []).append(await self.move(peer, "WRITE", here, there))
                nbytes += int(here[:, 1].sum())
        least = {shape: min(times) for shape, times in found.items()}
        return Timed(least["one"], least.get("short", math.nan), least["long"], BLOCKS * size, nbytes)

    async def move(
        self,
        peer: Peer,
        operation: Operation,
        here: Descriptors,
        there: Descriptors,
        kind: MemoryKind = MemoryKind.DRAM,
    ) -> float:
        """Seconds one transfer took, from just before it was posted. `here` begins a slot of scratch;
        `there` is in the peer's memory of that kind."""
        ended = asyncio.Event()
        local = int(here[0, 0])
        mover = self._core.mover
        finished = 0.0

        def over(job: Job) -> None:
            nonlocal finished
            finished = finished or time.monotonic()
            if job.settled:
                self._free(local)
            ended.set()

        began = time.monotonic()
        job = Job(
            f"probe of {peer.label}",
            peer.card.agent_name,
            began + self._core.timeouts.probe,
            on_finish=over,
            on_drained=over,
            operation=operation,
        )
        self._active[local] = job
        mover.start(job)
        mover.add(job, iter((Batch(here, MemoryKind.DRAM, there, kind, int(here[:, 1].sum())),)))
        mover.close(job)
        self._core.wake()
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                mover.fail(job, DeadlineExceeded("the probe was given up"))
        if job.error is not None:
            raise job.error
        return finished - (job.posted_at or began)


def one_piece(address: int, size: int, device: int = 0) -> Descriptors:
    """(1, 3)."""
    return np.array([[address, size, device]], dtype=np.uint64)
