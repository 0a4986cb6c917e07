"""Peers' cards in the agent: loaded one at a time between the turns of the loop, and connected.

Loading one takes from a millisecond to some tens of them (endpoints of every transport, a key of every
region), and nothing else runs meanwhile: NIXL guards an agent by one lock at best, so that another
thread would only make the loop wait for that lock. So many peers are loaded in slices: while something
moves, loading gets `SHARE` of the time and the transfers get the rest.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from pdtransfer.agent.port import AgentFailure, AgentPort
from pdtransfer.contract.card import RankCard
from pdtransfer.errors import PeerUnreachable
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core

logger = logging.getLogger(__name__)

SHARE = 0.3
"""Part of the time that loading may take while something moves."""
TURNS = 8
"""Turns of the loop between two loads, at least, while something moves."""

Refusal = tuple[str, str]
"""Reason and message."""


def load_card(agent: AgentPort, card: RankCard) -> Refusal | None:
    """Hand a card to an agent and connect eagerly; None when it took it."""
    try:
        name = agent.add_peer(base64.b64decode(card.nixl_metadata, validate=True))
    except AgentFailure as error:
        # The backend's own failure is about the way to the peer: over TCP, loading connects.
        gone = error.kind in ("nixlBackendError", "nixlRemoteDisconnectError")
        return PeerUnreachable.reason if gone else error.reason, error.message
    except ValueError as error:
        return "AgentError", f"the metadata is not base64: {error}"
    if name != card.agent_name:
        with contextlib.suppress(AgentFailure):
            agent.remove_peer(name)
        return "AgentError", f"the metadata is agent {name}'s, the card says {card.agent_name}"
    with contextlib.suppress(AgentFailure):  # the probe will say what is wrong
        agent.connect(name)
    return None


def load(core: Core, peer: Peer) -> Refusal | None:
    """The same for a peer."""
    why = load_card(core.agent, peer.card)
    if why is None:
        peer.loaded, peer.broken = True, False
        peer.loads += 1
    return why


def unload(core: Core, peer: Peer) -> None:
    """Forget it (cheap: 10-30 us measured). No fence: what was posted may still land."""
    peer.loaded = False
    with contextlib.suppress(AgentFailure):
        core.agent.remove_peer(peer.card.agent_name)


class Loader:
    """Runs in the core's thread. `refusal(peer)` checks a card before it is loaded (that takes time
    too), `done(peer, why)` hears how it went."""

    def __init__(
        self,
        core: Core,
        refusal: Callable[[Peer], Refusal | None],
        done: Callable[[Peer, Refusal | None], None],
    ) -> None:
        self._core = core
        self._refusal = refusal
        self._done = done
        self._queue: deque[Peer] = deque()
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def want(self, peer: Peer) -> None:
        """Load a peer, or one with `reload` again, soon. Asking twice is asking once."""
        if not peer.loading:
            peer.loading = True
            self._queue.append(peer)
        if self._task is None or self._task.done():
            self._task = self._core.spawn(self._run(), "load-peers")

    async def loaded(self, peer: Peer) -> None:
        """Wait until it was tried: who waits goes before who does not."""
        if peer.loading:
            # With what comes before it under the same name: the agent holds a name once.
            name = peer.card.agent_name
            first = [p for p in self._queue if p.card.agent_name == name]
            self._queue = deque((*first, *(p for p in self._queue if p.card.agent_name != name)))
        while peer.loading:
            await self._tried.wait()

    async def _run(self) -> None:
        while self._queue:
            peer = self._queue.popleft()
            began = time.monotonic()
            tried = self._try(peer)
            took = time.monotonic() - began
            self._tried.set()
            self._tried = asyncio.Event()
            if tried:
                self._core.metrics.observe("peer_load_seconds", took)
            await self._rest(took)

    def _try(self, peer: Peer) -> bool:
        peer.loading = False
        if peer.retired or (peer.loaded and not peer.reload):
            return False
        again = peer.reload
        if again and self._core.mover.flies_to(peer.card.agent_name):
            return False  # `reload` stays: it is asked for again once nothing flies
        try:
            why = None if again else self._refusal(peer)
            if again:
                peer.reload = False
                self._core.count("peer_reloads_total")
                unload(self._core, peer)
            if why is None:
                why = load(self._core, peer)
                peer.lost = why is not None and why[0] == PeerUnreachable.reason
        except Exception as error:  # of this peer's card: the others go on
            logger.exception("%s: %s could not be loaded", self._core.name, peer.label)
            why = "AgentError", f"it could not be loaded: {error!r}"
        if again and why is not None:
            peer.reload = True  # the card was good before: try again
        self._done(peer, why)
        return True

    async def _rest(self, took: float) -> None:
        """Let the loop turn; longer while something moves."""
        core = self._core
        until, turns = time.monotonic() + took * (1 / SHARE - 1), core.turns + TURNS
        await core.turn()
        while core.active and (time.monotonic() < until or core.turns < turns):
            await core.turn()
