"""When a peer that owes an acknowledgement counts as dead, so that nothing of it can land any more.

A process of this PID namespace is looked up: exact. Of any other one there is evidence only, and each
piece of it alone can be made by a firewall: its side ended the control connection, its control port then
refuses (or is another incarnation's), and the data path has ended too, seen by NIXL. Only all of them
together, for longer than a living peer needs to give up its requests for want of a connection, on a
peer that the roster names no more, count. A roster entry or a Pod object that is gone, or a
connection that this side ended, proves nothing. What is not confirmed waits for a new agent (rotation.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pdtransfer.agent.port import AgentFailure
from pdtransfer.contract.card import RankCard
from pdtransfer.peers import Peer
from pdtransfer.reach import is_dead, same_namespace
from pdtransfer.session.core import Core

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.1
DEATH_PROGRESS = 0.2
"""Seconds of progress before a dead peer's last bytes count as landed, at least."""


class Deaths:
    """Runs in the core's thread. `died(peer)` is called once nothing of it can land."""

    def __init__(self, core: Core, card: Callable[[], RankCard], died: Callable[[Peer], None]) -> None:
        self._core = core
        self._card = card
        self._died = died
        self._next_look = 0.0
        self._since: dict[Peer, float] = {}
        """Since when all evidence holds; for processes of this namespace, when the death was seen."""

    @property
    def patience(self) -> float:
        """Seconds that evidence has to hold: a living peer that lost its connection notices within
        `connect` seconds and gives up what was asked of it `connect` seconds later."""
        return 2 * self._core.timeouts.connect + 1.0

    def tick(self, suspects: Iterable[Peer], now: float) -> None:
        """Look at peers that owe something and have no connection."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        held = {peer for peer in suspects if not peer.dead and peer.channel is None}
        for peer in [p for p in self._since if p not in held]:
            self._forget(peer)
        for peer in held:
            self._look(peer, now)

    def _look(self, peer: Peer, now: float) -> None:
        near = same_namespace(self._card(), peer.card)
        process = peer.card.process
        if near and process is not None:
            suspected, patience = is_dead(process), DEATH_PROGRESS
        else:
            suspected, patience = peer.retired and peer.ended_there and peer.refused_since, self.patience
        if not suspected:
            self._forget(peer)
            return
        if peer not in self._since:
            self._since[peer] = now
            self._core.hot(1)  # what it sent last has to be taken in
        if not self._data_ended(peer):
            # A stream's end comes after its last byte. Evidence that does not hold begins anew.
            self._since[peer] = now if not near else self._since[peer]
        elif now - self._since[peer] > patience:
            self._forget(peer)
            peer.dead = True
            logger.info("%s: %s is dead", self._core.name, peer.label)
            self._died(peer)

    def _data_ended(self, peer: Peer) -> bool:
        """NIXL lost the connection to it, in every agent of this rank that it may have written to."""
        for generation in self._core.generations.living:
            try:
                generation.agent.notify(peer.card.agent_name)
            except AgentFailure as error:
                if error.kind == "nixlRemoteDisconnectError":
                    continue
            return False
        return True

    def _forget(self, peer: Peer) -> None:
        if self._since.pop(peer, None) is not None:
            self._core.hot(-1)
