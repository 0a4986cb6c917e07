"""The answering end of a probe: hashes of this rank's pool pages, and a piece of scratch to write to.

Host memory is hashed in place; real VRAM is first read into scratch by the agent itself (a
loopback transfer), so that no GPU library is needed here.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.base import MemoryKind
from pdtransfer.contract.card import RankCard
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
from pdtransfer.session.scratch import BLOCK, Scratch

SAMPLE_BYTES = 64 << 10


def digest(data: bytes) -> str:
    """Digest that both sides compute."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(eq=False)
class Lent:
    """Scratch at `address`, lent for one probe until `until` (monotonic seconds)."""

    samples: tuple[Sample, ...]
    address: int
    until: float


class Lender:
    """Answers peers' probes. Runs in the core's thread."""

    def __init__(self, core: Core, scratch: Scratch, card: Callable[[], RankCard]) -> None:
        self._core = core
        self.scratch = scratch
        self._card = card
        self._lent: dict[tuple[Peer, int], Lent] = {}
        self._lost: dict[Peer, int] = {}
        """A slot that a peer may still write to: lent to that same peer again, to no other."""
        core.ticks.append(self._tick)

    def on_frame(self, peer: Peer, frame: ProbeFrame) -> None:
        """A question of the peer."""
        key = (peer, frame.seq)
        if isinstance(frame, ProbeOpen):
            self._core.spawn_contained(self._lend(peer, frame), f"lend-{peer.label}")
        elif isinstance(frame, ProbeClose):
            self._take_back(key, frame.settled)
        elif isinstance(frame, ProbeHash | ProbeCheck) and key in self._lent:
            self._core.spawn_contained(self._answer(peer, frame, self._lent[key]), f"answer-{peer.label}")

    def on_disconnected(self, peer: Peer) -> None:
        """Lent scratch may still be written: it goes to no other peer."""
        for key in [k for k in self._lent if k[0] is peer]:
            self._take_back(key, False)

    async def _lend(self, peer: Peer, frame: ProbeOpen) -> None:
        key = (peer, frame.seq)
        self._take_back(key, True)
        for older in [k for k in self._lent if k[0] is peer]:
            self._take_back(older, False)  # one slot a peer
        address = self._lost.pop(peer, None) or self.scratch.take()
        grant = ProbeGrant(seq=frame.seq)
        if address is not None:
            self._lent[key] = Lent(frame.samples, address, time.monotonic() + 2 * self._core.timeouts.probe)
            self._core.hot(1)
            digests = await self._hash(frame.samples)
            if key not in self._lent:
                return  # taken back meanwhile
            grant = ProbeGrant(seq=frame.seq, address=address, nbytes=BLOCK, digests=digests)
        if peer.channel is not None:
            peer.channel.send(grant)

    async def _answer(self, peer: Peer, frame: ProbeHash | ProbeCheck, lent: Lent) -> None:
        answer: ProbeDigests | ProbeChecked
        if isinstance(frame, ProbeHash):
            answer = ProbeDigests(seq=frame.seq, digests=await self._hash(lent.samples))
        else:
            answer = ProbeChecked(seq=frame.seq, digest=digest(self.scratch.read(lent.address, BLOCK)))
        if peer.channel is not None:
            peer.channel.send(answer)

    async def _hash(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        card: RankCard = self._card()
        found = []
        for sample in samples:
            if sample.region >= len(card.layout.regions):
                return ()
            region = card.layout.regions[sample.region]
            if sample.page >= region.items or sample.nbytes > min(SAMPLE_BYTES, region.item_bytes):
                return ()
            at = region.address + sample.page * region.item_bytes
            kind = real_kind(card, region.memory or MemoryKind.DRAM)
            if kind is MemoryKind.DRAM:
                found.append(digest(ctypes.string_at(at, sample.nbytes)))
            else:
                found.append(await self._hash_device(card, at, sample.nbytes, region.device))
        return tuple(found)

    async def _hash_device(self, card: RankCard, address: int, size: int, device: int) -> str:
        """Device memory, copied to scratch by a loopback READ of our own agent."""
        slot = self.scratch.take()
        if slot is None:
            return ""
        agent = self._core.agent
        one = np.zeros(1, dtype=np.int32)
        source = np.array([[address, size, device]], dtype=np.uint64)
        try:
            local = agent.prepare(None, np.array([[slot, size, 0]], dtype=np.uint64), MemoryKind.DRAM)
            remote = agent.prepare(card.agent_name, source, MemoryKind.VRAM)
            handle = agent.post("READ", local, one, remote, one)
            until = time.monotonic() + self._core.timeouts.probe
            while agent.poll(handle).value != "Done":
                if time.monotonic() > until:
                    return ""  # the slot stays taken: the copy may still land in it
                await asyncio.sleep(0)
            agent.release(handle)
            for prepared in (local, remote):
                agent.release_prepared(prepared)
        except AgentFailure as error:
            if not error.posted:
                self.scratch.give(slot)
            return ""
        found = digest(self.scratch.read(slot, size))
        self.scratch.give(slot)
        return found

    def _take_back(self, key: tuple[Peer, int], settled: bool) -> None:
        lent = self._lent.pop(key, None)
        if lent is not None:
            self._core.hot(-1)
            if settled or key[0] in self._lost:
                self.scratch.give(lent.address)
            else:
                self._lost[key[0]] = lent.address

    def forget(self, peer: Peer) -> None:
        """The peer is gone for good: what it was lent returns, to rest at the end of the line."""
        for key in [k for k in self._lent if k[0] is peer]:
            self._take_back(key, False)
        address = self._lost.pop(peer, None)
        if address is not None:
            self.scratch.give(address)

    def _tick(self, now: float) -> None:
        for key, lent in list(self._lent.items()):
            if now > lent.until:
                self._take_back(key, False)
