"""The last fence of a decode rank: a new agent, and the old one destroyed.

Pages and slots of a failed transfer wait for an acknowledgement of the source, or its death. When that
takes too long, or too much waits, the rank takes a new agent with the same memory and tells every
prefill rank on its control connection; requests from then on are for the new one. Transfers to
the old agent go on until every connected peer has moved, at most `Timeouts.rotation` seconds. Then the old
agent is destroyed, which ends every write to it (but of peers on this host that write without it, see
`reach`), and what waited for that is free. Nothing but the destruction frees anything here.

When a rotation fails, or too much waits for peers that it can't fence, the endpoint fails: the
engine's end is the last resort.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence

from pdtransfer.agent.port import AgentPort
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard, later_agent
from pdtransfer.errors import DeadlineExceeded, PeerReplaced, QuarantineOverflow, TransferError
from pdtransfer.peers import Peer
from pdtransfer.session.apart import apart
from pdtransfer.session.core import START_DEADLINE, Core
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.frames import Rotated
from pdtransfer.session.loader import load_card
from pdtransfer.session.quarantine import Limits
from pdtransfer.session.wiring import Wiring

logger = logging.getLogger(__name__)

DESTROY_DEADLINE = 60.0
"""Seconds; up to 4.8 were measured."""
LOOK_EVERY = 0.1
RETRY = 10.0
"""Seconds between a rotation that failed and the next."""


class Rotation:
    """Runs in the core's thread. `prepare(agent)` registers the rank's memory, `show(card)` gives out
    the card with a new agent."""

    def __init__(
        self,
        core: Core,
        wiring: Wiring,
        destination: DestinationSide,
        prepare: Callable[[AgentPort], None],
        show: Callable[[RankCard], None],
    ) -> None:
        self._core = core
        self._wiring = wiring
        self._destination = destination
        self._prepare = prepare
        self._show = show
        self._moved: dict[Peer, int] = {}
        self._busy = False
        self._next_look = 0.0
        self._tried_at = float("-inf")
        self._failed: Exception | None = None
        """Why the last one did."""
        core.ticks.append(self._tick)

    @property
    def cap(self) -> int:
        """Bytes that may wait."""
        cap = self._core.config.quarantine_cap
        if cap is not None:
            return cap
        return sum(r.item_bytes * r.items for r in self._wiring.card.layout.regions) // 8

    # --- news for peers and from them -------------------------------------------------------

    def on_connected(self, peer: Peer) -> None:
        """Before anything else the peer learns which agent requests are for."""
        if self._core.generations.present.number:
            self._wiring.send(peer, self._news())

    def on_moved(self, peer: Peer, generation: int) -> None:
        """It has nothing in flight to an older agent, nor will."""
        self._moved[peer] = max(generation, self._moved.get(peer, 0))

    def forget(self, peer: Peer) -> None:
        """The peer was let go."""
        self._moved.pop(peer, None)

    def _news(self) -> Rotated:
        card, generations = self._wiring.card, self._core.generations
        return Rotated(
            generation=card.generation,
            oldest=generations.oldest,
            agent_name=card.agent_name,
            metadata=card.nixl_metadata,
            metadata_hash=card.metadata_hash,
        )

    def _tell(self) -> None:
        news = self._news()
        for peer in self._wiring.connected():
            self._wiring.send(peer, news)

    # --- when -------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if self._busy or now < self._next_look or self._wiring.card.role is not Role.DECODE:
            return
        self._next_look = now + LOOK_EVERY
        times = self._core.timeouts
        found = self._destination.quarantine()
        limits = Limits(self.cap, times.settle + times.connect, times.quarantine)
        verdict = found.judge(now, limits, failed=self._failed is not None)
        if verdict == "rotate" and (self._failed is None or now - self._tried_at > RETRY):
            self._busy = True
            self._core.spawn(self._run(), "rotation")
        elif verdict == "overflow":
            why = f"and no new agent could be taken: {self._failed}" if self._failed else "that none can fence"
            told = f"{found.nbytes} bytes in quarantine, {self.cap} may be, for writers {why}"
            self._core.crash(QuarantineOverflow(told))

    async def _run(self) -> None:
        self._failed = TransferError("it was ended")
        try:
            await self._rotate()
            self._failed = None
        except (TransferError, TimeoutError) as error:
            self._failed = error
            logger.error("%s: the agent could not be replaced: %r", self._core.name, error)
        finally:
            self._tried_at = time.monotonic()
            self._busy = False
            self._core.count("rotations_total", outcome="failed" if self._failed else "succeeded")
            self._core.changed()

    # --- how --------------------------------------------------------------------------------

    async def _rotate(self) -> None:
        core, wiring = self._core, self._wiring
        number = core.generations.present.number + 1
        name = later_agent(wiring.card.first_agent, number)
        logger.warning("%s: taking agent generation %d: too much waits for sources", core.name, number)
        known = [p.card for p in wiring.known() if p.loaded]
        agent, loaded = await asyncio.wait_for(apart(lambda: self._make(name, known), "new-agent"), START_DEADLINE)
        metadata = base64.b64encode(agent.metadata()).decode()
        core.generations.take(agent)
        core.metrics.gauge("generation", number)
        card = wiring.card.model_copy(update={"agent_name": name, "generation": number, "nixl_metadata": metadata})
        self._show(card.sealed())
        wiring.on_own_agent(loaded)
        self._tell()
        await self._drain(number)
        await self._destroy(number)

    def _make(self, name: str, cards: Sequence[RankCard]) -> tuple[AgentPort, frozenset[str]]:
        """In a thread of its own: the agent, with the memory registered and the peers loaded."""
        agent = self._core.make_agent(name)
        try:
            self._prepare(agent)
        except Exception:
            agent.close()
            raise
        loaded = set()
        for card in cards:
            why = load_card(agent, card)
            if why is None:
                loaded.add(card.agent_name)
            else:
                logger.warning("%s: %s is not loaded yet: %s", name, card.agent_name, why[1])
        return agent, frozenset(loaded)

    async def _drain(self, number: int) -> None:
        """Until nothing healthy is on its way to an older agent."""
        until = time.monotonic() + self._core.timeouts.rotation
        while time.monotonic() < until:
            behind = [p for p in self._wiring.connected() if self._moved.get(p, 0) < number]
            if not behind and not self._destination.uses(number):
                return
            await asyncio.sleep(0.01)
        logger.warning("%s: transfers to the old agent did not end in time and fail", self._core.name)

    async def _destroy(self, number: int) -> None:
        core = self._core
        began = time.monotonic()
        for generation in core.generations.retire(PeerReplaced("this rank's agent was replaced")):
            try:
                await asyncio.wait_for(apart(generation.destroy, "old-agent"), DESTROY_DEADLINE)
            except TimeoutError:
                late = f"agent generation {generation.number} was not destroyed in {DESTROY_DEADLINE:.0f} s"
                raise DeadlineExceeded(late) from None
            core.generations.destroyed(generation)
        took = time.monotonic() - began
        core.metrics.observe("rotation_teardown_seconds", took)
        waited = self._destination.quarantine().nbytes
        self._destination.on_agents_destroyed(number)
        freed = waited - self._destination.quarantine().nbytes
        logger.warning("%s: the old agent is gone after %.3f s, %d bytes are free", core.name, took, freed)
        self._tell()
