"""A digest of one request's bytes, the same on both sides: lane by lane, in blocks of a fixed size, as
their rows follow one another in a slot (region-major, then page, then token).

Rows are gathered into memory of this module's own and hashed on the host, one block a turn of the loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import DeadlineExceeded, LayoutMismatch
from pdtransfer.peers import real_kind
from pdtransfer.plan import Lane, PairPlan, blocks
from pdtransfer.plan.lanes import aligned
from pdtransfer.session.core import Core
from pdtransfer.session.pairs import Pair
from pdtransfer.staging.arena import Arena
from pdtransfer.staging.copier import Copier, Fence

BLOCK = 1 << 20
"""Bytes of a block at most, or one page of one region where that is more. Both sides must agree on it."""


def undigestible(plan: PairPlan) -> str | None:
    """Why a pair's bytes can't be gathered by rows on both sides, or None."""
    for lane in plan.lanes:
        if not (aligned(lane, lane.source) and aligned(lane, lane.destination)):
            return f"{lane.names[0]}: its rows are not a whole number of slices of {lane.piece} bytes"
    return None


class Digests:
    """Runs in the core's thread."""

    def __init__(self, core: Core, card: Callable[[], RankCard]) -> None:
        self._core = core
        self._card = card
        self._turn = asyncio.Lock()
        """Who uses a desk."""
        self._desks: dict[tuple[MemoryKind, int], tuple[Arena, Copier]] = {}

    async def of(
        self,
        pair: Pair,
        pages: Mapping[int, npt.NDArray[np.int64]],
        *,
        source: bool,
        lives: Callable[[], bool],
    ) -> str:
        """Hex digest of a request's bytes in this rank's pool; "" when `lives` says meanwhile that nobody
        wants it. `pages`: by lane, this rank's pool pages in prompt order. Raises TransferError."""
        found = hashlib.blake2b(digest_size=16)
        for lane in pair.plan.lanes:
            numbers = pages[lane.number]
            rows = pair.rows(lane.number, source=source)
            kind = real_kind(self._card(), lane.source_kind if source else lane.destination_kind)
            for block in blocks(lane, 0, len(numbers), max(BLOCK, lane.unit)):
                device = int((lane.source if source else lane.destination).devices[0])
                copies = rows.rows(block, numbers[block.first_page : block.first_page + block.pages])
                async with self._turn:  # a device gathers while other requests' digests go on
                    copier = self._desk(kind, lane, device)
                    await self._gathered(copier.pack(copies, 0))
                    found.update(copier.read(0, block.nbytes).data)
                await asyncio.sleep(0)
                if not lives():
                    return ""
        return found.hexdigest()

    async def _gathered(self, fence: Fence) -> None:
        until = time.monotonic() + self._core.timeouts.transfer
        while not fence.done():
            if time.monotonic() > until:
                raise DeadlineExceeded("the device did not gather a digest's rows in time")
            await asyncio.sleep(0)

    def _desk(self, kind: MemoryKind, lane: Lane, device: int) -> Copier:
        size = max(BLOCK, lane.unit)
        held = self._desks.get((kind, device))
        if held is None or held[0].slot_bytes < size:
            arena = Arena(kind, size, size, device=device)
            held = self._desks[kind, device] = (arena, Copier(arena))
        return held[1]


class Sent:
    """Which pool pages a source sent, by lane and position, for the digest of one leg."""

    def __init__(self, shapes: Mapping[int, int]) -> None:
        self.pages = {lane: np.full(count, -1, dtype=np.int64) for lane, count in shapes.items()}
        self.pair: Pair | None = None

    def add(self, pair: Pair, lane: int, first: int, numbers: npt.NDArray[np.int64]) -> None:
        """These pages were queued at positions `first ..`."""
        if self.pair is not None and self.pair is not pair:
            raise LayoutMismatch("memory: a request with a digest comes from memory of one kind")
        self.pair = pair
        part = self.pages[lane][first : first + len(numbers)]
        if ((part != -1) & (part != numbers)).any():
            raise LayoutMismatch("pages: a request with a digest has each prompt page in one page of the pool")
        part[:] = numbers
