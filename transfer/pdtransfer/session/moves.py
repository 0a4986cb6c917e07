"""Following a peer that takes a new agent (rotation.py is its side): load the new one, let what was begun to
the old one end, say so, and forget the old one once it is gone.

The news comes from the peer itself on its control connection, or from the operator as a card of a later
generation. Requests name the generation they are for, so that nothing new goes to an old agent.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.card import RankCard, later_agent
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core
from pdtransfer.session.frames import FrameError, Moved, Rotated
from pdtransfer.session.loader import load_card

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Who holds the peers."""

    def send(self, peer: Peer, frame: Moved) -> bool: ...
    def judge(self, peer: Peer, state: VerdictState, reason: str, message: str) -> None: ...
    def on_loaded(self, peer: Peer) -> None:
        """Another agent of it was loaded."""

    def fences(self, peer: Peer) -> bool:
        """The end of its agent stops every write of this rank to it."""


class Requests(Protocol):
    """The request layer."""

    def on_unloaded(self, peer: Peer, card: RankCard) -> None:
        """An older agent of it was forgotten."""

    def on_agents_destroyed(self, peer: Peer, oldest: int) -> None: ...
    def uses(self, peer: Peer, generation: int) -> bool:
        """Something was begun to that agent and may still succeed."""


class Moves:
    """Runs in the core's thread."""

    def __init__(self, core: Core, owner: Owner, requests: Callable[[], Requests]) -> None:
        self._core = core
        self._owner = owner
        self._requests = requests
        self._asked: dict[Peer, int] = {}
        """Generation that a peer wants an answer for."""
        self._gone_at: dict[str, float] = {}
        """When a destroyed agent was told of, by name."""

    def on_news(self, peer: Peer, news: Rotated) -> None:
        """The peer's own word. Raises FrameError when it can't be true."""
        held = peer.card
        card = held.model_copy(
            update={
                "agent_name": news.agent_name,
                "generation": news.generation,
                "nixl_metadata": news.metadata,
                "metadata_hash": news.metadata_hash,
            }
        )
        if news.agent_name != later_agent(held.first_agent, news.generation):
            told = f"{news.agent_name!r} is not generation {news.generation} of {held.first_agent}"
            raise FrameError(f"agent_name: {told}")
        if news.oldest > news.generation:
            raise FrameError(f"oldest: {news.oldest} is after generation {news.generation}")
        if card.seal_broken is not None:
            raise FrameError(f"metadata: {card.seal_broken}")
        if news.generation == held.generation and news.metadata != held.nixl_metadata:
            raise FrameError(f"metadata: generation {news.generation} was told before with another one")
        self._asked[peer] = news.generation
        self.adopt(peer, card)
        if news.oldest > peer.oldest:
            peer.oldest = news.oldest
            if self._owner.fences(peer):
                peer.fenced = news.oldest
            now = time.monotonic()
            self._gone_at.update((c.agent_name, now) for c in peer.older if c.generation < news.oldest)
            self._requests().on_agents_destroyed(peer, news.oldest)
        self.look(peer, time.monotonic())

    def adopt(self, peer: Peer, card: RankCard) -> None:
        """Load the agent of a later generation beside the one that is held."""
        if card.generation <= peer.card.generation:
            return
        if not peer.loaded and not peer.lost:
            peer.card = card  # its turn to be loaded is still to come
            return
        why = load_card(self._core.agent, card)
        if why is not None:
            logger.error("%s: agent %s of %s: %s", self._core.name, card.agent_name, peer.label, why[1])
            self._owner.judge(peer, VerdictState.UNREACHABLE, *why)
            return
        self._core.count("peer_moves_total")
        if peer.loaded:
            peer.older.append(peer.card)
        peer.card, peer.loaded, peer.lost, peer.reload, peer.broken = card, True, False, False, False
        peer.loads += 1
        self._owner.on_loaded(peer)

    def look(self, peer: Peer, now: float) -> None:
        """Answer once nothing that may succeed uses an older agent; forget those that are gone."""
        asked = self._asked.get(peer)
        if asked == peer.card.generation and not any(self._requests().uses(peer, c.generation) for c in peer.older):
            del self._asked[peer]
            self._owner.send(peer, Moved(generation=asked))
        for card in [c for c in peer.older if c.generation < peer.oldest]:
            # A handle to an agent that is gone errors soon; over a link that drops everything it never does.
            waited = now - self._gone_at.get(card.agent_name, now)
            settled = card.generation < peer.fenced and waited > self._core.timeouts.settle
            if settled or not self._core.mover.flies_to(card.agent_name):
                peer.older.remove(card)
                self._unload(peer, card)

    def tick(self, peers: Iterable[Peer], now: float) -> None:
        """Look at those that are on the move."""
        for peer in peers:
            if peer.older or peer in self._asked:
                self.look(peer, now)

    def forget(self, peer: Peer) -> None:
        """The peer is let go: unload what is left of it."""
        self._asked.pop(peer, None)
        for card in peer.older:
            self._unload(peer, card)
        peer.older.clear()

    def _unload(self, peer: Peer, card: RankCard) -> None:
        self._gone_at.pop(card.agent_name, None)
        self._requests().on_unloaded(peer, card)
        with contextlib.suppress(AgentFailure):
            self._core.agent.remove_peer(card.agent_name)
