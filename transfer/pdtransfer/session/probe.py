"""Proof that bytes move between two ranks: READ pool pages, WRITE a random block, compare digests.

The peer hashes the same bytes on its side. Pool pages may change meanwhile, so it hashes before
and after; a page that changed proves nothing and is tried again. Host memory is hashed in place;
real VRAM is first read into scratch by the agent itself (a loopback transfer).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdtransfer.agent.hca import Hca, Lane, counted_bytes, lane
from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import ChecksumMismatch, DeadlineExceeded, PeerUnreachable, TransferError
from pdtransfer.peers import Peer, real_kind
from pdtransfer.plan.cost import CopyRates, Rates
from pdtransfer.session.calibrate import rates_between, transport_of, wire_rates
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
from pdtransfer.session.scratch import BLOCK, SLOTS, Scratch
from pdtransfer.session.scratch_moves import ScratchMoves, Timed, one_piece
from pdtransfer.session.turns import Turns

SAMPLE_REGIONS = 8
SAMPLES = 2 * SAMPLE_REGIONS
CONCURRENT = 2
TURN = 1.0
"""Seconds: a probe takes some 50 ms, and one whose bytes do not move up to `Timeouts.probe`: peers that are well must
not wait for those."""
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
    """What was moved and proven: samples that were READ, and one block that was written (its repeats are
    not counted here)."""

    nbytes: int
    seconds: float
    rate: float
    """Bytes per second of the fastest large WRITE; the small READs before it measure latency."""
    stable_samples: int
    samples: int
    lane: Lane
    rates: Rates
    """For the cost rule."""


class Prober:
    """Both ends of a probe. Runs in the core's thread."""

    def __init__(self, core: Core, card: Any, hcas: tuple[Hca, ...]) -> None:
        self._core = core
        self._card = card
        self._hcas = hcas
        self.scratch = Scratch()
        self.copies: Mapping[MemoryKind, CopyRates] = {}
        """This rank's copy rates, by the memory kind they are really in."""
        self._lender = Lender(core, self.scratch, card)
        self._answers: dict[tuple[Peer, int], asyncio.Future[Any]] = {}
        self._turns = Turns(CONCURRENT, TURN, SLOTS // 2 - 2)
        self._seq = 0
        self._moves = ScratchMoves(core, self.scratch)

    # --- this side asks ---------------------------------------------------------------------

    async def probe(self, peer: Peer) -> ProbeResult:
        """Raises TransferError when bytes do not move or do not match. Leaves the rates with the peer."""
        if self._moves.hangs(peer):
            raise DeadlineExceeded("bytes of an earlier probe are still on their way", peer=peer.label)
        async with self._turns.taken():
            self._core.hot(1)
            try:
                result = await asyncio.wait_for(self._probe(peer), self._core.timeouts.probe)
            except TimeoutError:
                self._core.count("deadlines_total", state="probe")
                raise DeadlineExceeded("the probe did not finish in time", peer=peer.label) from None
            finally:
                self._core.hot(-1)
            peer.rates = result.rates
            return result

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
                    here, there = one_piece(mine, samples[i].nbytes), one_piece(at, samples[i].nbytes, region.device)
                    seconds += await self._moves.move(peer, "READ", here, there, kind)
                    moved += samples[i].nbytes
                    got[i] = digest(self.scratch.read(mine, samples[i].nbytes))
                after = (await self._ask(peer, ProbeHash(seq=seq), seq, ProbeDigests)).digests
                if len(before) != len(samples) or len(after) != len(samples):
                    raise TransferError("the peer hashed other samples", peer=peer.label)
                unread = [i for i in got if not before[i] and not after[i]]
                if unread:
                    told = f"the peer can not read its own device memory: {samples[unread[0]]}"
                    raise TransferError(told, peer=peer.label)
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
            timed = await self._moves.write(peer, mine, grant.address, size)
            checked = await self._ask(peer, ProbeCheck(seq=seq), seq, ProbeChecked)
            if checked.digest != digest(block):
                raise ChecksumMismatch("a WRITE to scratch arrived changed", peer=peer.label)
            settled = True
            same_host = _host(peer.card.control) == _host(self._card().control)
            sent = moved + timed.nbytes
            taken = lane(self._hcas, counted, counted_bytes(self._hcas), sent, same_host=same_host)
            return ProbeResult(
                moved + size,
                seconds + timed.long * size / timed.size,
                timed.size / max(timed.long, 1e-9),
                len(stable),
                len(samples),
                taken,
                self._rates(peer.card, taken, timed),
            )
        finally:
            if mine is not None:
                settled |= self._moves.leave(peer, mine)
            if peer.channel is not None:
                peer.channel.send(ProbeClose(seq=seq, settled=settled))

    def _rates(self, theirs: RankCard, taken: Lane, timed: Timed) -> Rates:
        mine: RankCard = self._card()
        prefill, decode = (mine, theirs) if mine.role is Role.PREFILL else (theirs, mine)
        rates = rates_between(self.copies, prefill, decode)
        transport = transport_of(taken.transport, mine, theirs)
        return wire_rates(rates, transport, timed.one, timed.short, timed.long, timed.size)

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
