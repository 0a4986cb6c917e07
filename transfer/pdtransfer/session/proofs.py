"""Probes as verdicts: when a peer is probed, and what is found out about it that way."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.errors import ChecksumMismatch, LayoutMismatch, TransferError
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core
from pdtransfer.session.probe import Prober, ProbeResult

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who holds the peers and their verdicts."""

    def judge(self, peer: Peer, state: VerdictState, reason: str, message: str, **proof: Any) -> None: ...
    def reload(self, peer: Peer) -> None: ...


class Proofs:
    """Runs in the core's thread."""

    def __init__(self, core: Core, prober: Prober, owner: Owner) -> None:
        self._core = core
        self._prober = prober
        self._owner = owner

    def start(self, peer: Peer) -> None:
        """Probe a connected peer, unless that is under way."""
        if peer.probing or not peer.loaded:
            return
        peer.probing, peer.probed_at = True, time.monotonic()
        if peer.verdict.state is not VerdictState.WIRED:
            self._owner.judge(peer, VerdictState.PROBING, "Probing", peer.verdict.message)
        peer.tasks = [t for t in peer.tasks if not t.done()]
        peer.tasks.append(self._core.spawn(self._probe(peer), f"probe-{peer.label}"))

    async def _probe(self, peer: Peer) -> None:
        channel, agents = peer.channel, self._agents(peer)
        result, error = None, None
        try:
            result = await self._prober.probe(peer)
        except Exception as caught:
            error = caught
        finally:
            peer.probing = False
        if peer.channel is not channel or peer.retired:
            if isinstance(error, AgentFailure) and agents == self._agents(peer):
                self._owner.reload(peer)
        elif agents != self._agents(peer):
            self.start(peer)  # one of the agents was replaced meanwhile
        elif result is not None:
            self._wired(peer, result)
        elif error is not None:
            self._failed(peer, error)

    def _agents(self, peer: Peer) -> tuple[Any, str]:
        return self._core.agent, peer.card.agent_name

    def _failed(self, peer: Peer, error: Exception) -> None:
        if isinstance(error, AgentFailure):
            self._owner.reload(peer)
        elif not isinstance(error, TransferError):
            logger.error("%s: the probe of %s broke", self._core.name, peer.label, exc_info=error)
        bad = isinstance(error, ChecksumMismatch | LayoutMismatch)
        state = VerdictState.REFUSED if bad else VerdictState.UNREACHABLE
        told = error if isinstance(error, TransferError) else TransferError(f"the probe broke: {error!r}")
        self._owner.judge(peer, state, told.reason, told.message)
        self._core.count("probes_total", outcome="failed")

    def _wired(self, peer: Peer, result: ProbeResult) -> None:
        changed = result.samples - result.stable_samples
        emulated = "; VRAM emulated on host memory" if peer.verdict.emulated_vram else ""
        self._tell(peer, result)
        self._owner.judge(
            peer,
            VerdictState.WIRED,
            "Verified",
            f"{changed} of {result.samples} sampled pages changed meanwhile" if changed else "",
            bytes_moved=result.nbytes,
            seconds=result.seconds,
            bandwidth=result.rate,
            checksum_ok=True,
            transport=result.lane.transport,
            evidence=f"checksummed READ and WRITE; {result.lane.evidence}{emulated}",
        )
        self._core.count("probes_total", outcome="succeeded")

    def _tell(self, peer: Peer, result: ProbeResult) -> None:
        """For who runs without an operator: what moves the KV stands in the log, once a peer. Nobody who pays for
        RDMA learns from a slow answer that it is TCP."""
        lane = result.lane
        if lane.transport == peer.verdict.transport:
            return
        meant = lane.transport == "RDMA" or self._core.config.net_devices is not None
        level = logging.INFO if meant else logging.WARNING
        told = f"{result.rate / 1e6:.0f} MB/s in the probe; {lane.evidence}"
        logger.log(
            level, "%s: KV between here and %s goes over %s: %s", self._core.name, peer.label, lane.transport, told
        )
