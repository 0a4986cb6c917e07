"""The rank's endpoint as this engine uses it: with a roster, or meeting its peers without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.session.endpoint import RankEndpoint

log = logging.getLogger(__name__)
CONTACT_S = 3.0
MAX_PODS = 64
"""Peer pods that an unrostered endpoint remembers; the one heard of longest ago is dropped first."""


class RosteredEndpoint(RankEndpoint):
    """Takes its peers from the roster."""

    def introduce(self, cards: Sequence[RankCard]) -> None:
        """Cards from a bootstrap exchange. A rostered endpoint takes its peers from the roster alone."""
        log.warning("%d cards of a bootstrap exchange are ignored: the roster decides", len(cards))


class IntroducedEndpoint(RosteredEndpoint):
    """Takes peers as requests introduce them (emulation of SGLang's own backends); rosters are ignored."""

    _pods: dict[str, tuple[RankCard, ...]] | None = None

    def apply_peers(self, peers: Sequence[RankCard]) -> None:
        """Nothing: with another backend than PDCluster there is no wiring."""
        if peers:
            log.warning("a roster of %d peers is ignored: this backend finds its own", len(peers))

    def introduce(self, cards: Sequence[RankCard]) -> None:
        """Wire to these cards of one or more pods; a pod's new cards replace its old ones."""
        pods = self._pods or {}
        for uid in {c.pod_uid for c in cards}:
            pods.pop(uid, None)
            pods[uid] = peers_of(self.card, [c for c in cards if c.pod_uid == uid])
        while len(pods) > MAX_PODS:
            del pods[next(iter(pods))]
        self._pods = pods
        super().apply_peers([card for cards in pods.values() for card in cards])
        if self.card.role is Role.DECODE:
            self._await_verdicts(
                {(c.pod_uid, c.rank, c.incarnation) for uid in {c.pod_uid for c in cards} for c in pods.get(uid, ())}
            )

    def _await_verdicts(self, wanted: set[tuple[str, int, str]]) -> None:
        """Until every peer is found fit or not: the request that follows then fails by the rule's name.
        Blocks the rank at the first contact only, for at most CONTACT_S."""
        until = time.monotonic() + CONTACT_S
        while time.monotonic() < until:
            judged = {
                (v.peer_pod_uid, v.peer_rank, v.peer_incarnation)
                for v in self.verdicts
                if v.state is not VerdictState.PROBING
            }
            if wanted <= judged:
                return
            time.sleep(0.01)
        log.warning("peers are still being probed after %.0f s", CONTACT_S)
