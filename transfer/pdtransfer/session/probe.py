"""Proof that bytes move between two ranks: READ pool pages, WRITE a random block, compare digests.

The peer hashes the same bytes on its side. Pool pages may change meanwhile, so it hashes before
and after; a page that changed proves nothing and is tried again. Host memory is hashed in place;
real VRAM is first read into scratch by the agent itself (a loopback transfer).
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdtransfer.agent.hca import Hca, Lane, counted_bytes, lane
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import ChecksumMismatch, DeadlineExceeded, PeerUnreachable, TransferError
from pdtransfer.mover.executor import Batch, Job
from pdtransfer.peers import Peer, real_kind
from pdtransfer.session.core import Core
from pdtransfer.session.frames import (
    ProbeCheck,
    ProbeChecked,
    ProbeClose,
    ProbeDigests,
    ProbeFrame,
    ProbeGrant,
    ProbeHash,
    ProbeOpen,
    Sample,
)
from pdtransfer.session.lender import SAMPLE_BYTES, Lender, digest
from pdtransfer.session.scratch import BLOCK, Scratch

SAMPLE_REGIONS = 8
SAMPLES = 2 * SAMPLE_REGIONS
CONCURRENT = 2
TRIES = 3


def choose_samples(card: RankCard) -> tuple[Sample, ...]:
    """First and last page of up to SAMPLE_REGIONS regions: the first and the last ones registered
    of each memory kind, since one pool may hold several allocations."""
    regions = card.layout.regions
    chosen: list[int] = []
    for kind in MemoryKind:
        of_kind = [i for i, r in enumerate(regions) if r.memory is kind]
        half = SAMPLE_REGIONS // 4
        chosen += sorted({*of_kind[:half], *of_kind[-half:]})
    return tuple(
        Sample(region=i, page=page, nbytes=min(SAMPLE_BYTES, regions[i].item_bytes))
        for i in chosen
        for page in sorted({0, regions[i].items - 1})
    )


@dataclass(frozen=True)
class ProbeResult:
    """What was moved and proven."""

    nbytes: int
    seconds: float
    rate: float
    """Bytes per second of the one large WRITE; the small READs before it measure latency."""
    stable_samples: int
    samples: int
    lane: Lane


class Prober:
    """Both ends of a probe. Runs in the core's thread."""

    def __init__(self, core: Core, card: Any, hcas: tuple[Hca, ...]) -> None:
        self._core = core
        self._card = card
        self._hcas = hcas
        self.scratch = Scratch()
        self._lender = Lender(core, self.scratch, card)
        self._answers: dict[tuple[Peer, int], asyncio.Future[Any]] = {}
        self._turn = asyncio.Semaphore(CONCURRENT)
        self._seq = 0
        self._active: set[int] = set()
        """Own slots with a transfer in flight."""
        self._abandoned: set[int] = set()
        """Those whose probe has ended."""

    # --- this side asks ---------------------------------------------------------------------

    async def probe(self, peer: Peer) -> ProbeResult:
        """Raises TransferError when bytes do not move or do not match."""
        async with self._turn:
            self._core.hot(1)
            try:
                return await asyncio.wait_for(self._probe(peer), self._core.timeouts.probe)
            except TimeoutError:
                raise DeadlineExceeded("the probe did not finish in time", peer=peer.label) from None
            finally:
                self._core.hot(-1)

    async def _probe(self, peer: Peer) -> ProbeResult:
        samples = choose_samples(peer.card)
        self._seq += 1
        seq = self._seq
        grant = ProbeGrant(seq=seq)
        for _ in range(100):
            grant = await self._ask(peer, ProbeOpen(seq=seq, samples=samples), seq, ProbeGrant)
            if grant.nbytes:
                break
            await asyncio.sleep(0.05)
        if not grant.nbytes:
            raise DeadlineExceeded("the peer lends no scratch", peer=peer.label)
        settled = False
        mine = self.scratch.take()
        try:
            if mine is None:
                raise DeadlineExceeded("no scratch is free", peer=peer.label)
            before, moved, seconds = list(grant.digests), 0, 0.0
            counted = counted_bytes(self._hcas)
            stable: set[int] = set()
            for _ in range(TRIES):
                got: dict[int, str] = {}
                for i in sorted(set(range(len(samples))) - stable):
                    region = peer.card.layout.regions[samples[i].region]
                    at = region.address + samples[i].page * region.item_bytes
                    kind = real_kind(peer.card, region.memory or MemoryKind.DRAM)
                    seconds += await self._move(peer, "READ", mine, at, samples[i].nbytes, kind, region.device)
                    moved += samples[i].nbytes
                    got[i] = digest(self.scratch.read(mine, samples[i].nbytes))
                after = (await self._ask(peer, ProbeHash(seq=seq), seq, ProbeDigests)).digests
                if len(before) != len(samples) or len(after) != len(samples):
                    raise TransferError("the peer hashed other samples", peer=peer.label)
                for i, value in got.items():
                    if before[i] == after[i]:
                        if value != after[i]:
                            raise ChecksumMismatch(f"READ of {samples[i]} gave other bytes", peer=peer.label)
                        stable.add(i)
                before = list(after)
                if len(stable) == len(samples):
                    break
            size = min(BLOCK, grant.nbytes)
            block = os.urandom(size)
            self.scratch.write(mine, block)
            wrote = await self._move(peer, "WRITE", mine, grant.address, size, MemoryKind.DRAM, 0)
            seconds += wrote
            checked = await self._ask(peer, ProbeCheck(seq=seq), seq, ProbeChecked)
            if checked.digest != digest(block):
                raise ChecksumMismatch("a WRITE to scratch arrived changed", peer=peer.label)
            settled = True
            moved += size
            same_host = _host(peer.card.control) == _host(self._card().control)
            taken = lane(self._hcas, counted, counted_bytes(self._hcas), moved, same_host=same_host)
            return ProbeResult(moved, seconds, size / max(wrote, 1e-9), len(stable), len(samples), taken)
        finally:
            if mine is not None:
                if mine in self._active:
                    self._abandoned.add(mine)
                else:
                    self.scratch.give(mine)
                    settled = True
            if peer.channel is not None:
                peer.channel.send(ProbeClose(seq=seq, settled=settled))

    async def _move(
        self, peer: Peer, operation: str, local: int, remote: int, size: int, kind: MemoryKind, device: int
    ) -> float:
        """Seconds one transfer took."""
        ended = asyncio.Event()
        self._active.add(local)

        def over(job: Job) -> None:
            if job.settled:
                self._active.discard(local)
                if local in self._abandoned:
                    self._abandoned.discard(local)
                    self.scratch.give(local)
            ended.set()

        job = Job(
            f"probe of {peer.label}",
            peer.card.agent_name,
            time.monotonic() + self._core.timeouts.probe,
            on_finish=over,
            on_drained=over,
            operation="READ" if operation == "READ" else "WRITE",
        )
        batch = Batch(
            np.array([[local, size, 0]], dtype=np.uint64),
            MemoryKind.DRAM,
            np.array([[remote, size, device]], dtype=np.uint64),
            kind,
            size,
        )
        began = time.monotonic()
        self._core.mover.start(job)
        self._core.mover.add(job, iter((batch,)))
        self._core.mover.close(job)
        self._core.wake()
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                self._core.mover.fail(job, DeadlineExceeded("the probe was given up"))
        if job.error is not None:
            raise job.error
        return time.monotonic() - began

    async def _ask(self, peer: Peer, frame: Any, seq: int, kind: type[Any]) -> Any:
        if peer.channel is None:
            raise PeerUnreachable("the control connection is gone", peer=peer.label)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[(peer, seq)] = answer
        peer.channel.send(frame)
        try:
            got = await answer
        finally:
            self._answers.pop((peer, seq), None)
        if not isinstance(got, kind):
            raise TransferError("the peer answered something else", peer=peer.label)
        return got

    # --- frames ----------------------------------------------------------------------

    def on_frame(self, peer: Peer, frame: ProbeFrame) -> None:
        """Answer, or hand an answer to who waits for it."""
        key = (peer, frame.seq)
        if isinstance(frame, ProbeGrant | ProbeDigests | ProbeChecked):
            waiting = self._answers.get(key)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)
        else:
            self._lender.on_frame(peer, frame)

    def forget(self, peer: Peer) -> None:
        """The peer is gone for good."""
        self._lender.forget(peer)

    def on_disconnected(self, peer: Peer) -> None:
        """Who waits for the peer's answer waits no more; lent scratch is not lent again."""
        for (who, _), answer in list(self._answers.items()):
            if who is peer and not answer.done():
                answer.set_exception(PeerUnreachable("the control connection ended", peer=peer.label))
        self._lender.on_disconnected(peer)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
