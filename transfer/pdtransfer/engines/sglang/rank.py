"""One rank's endpoint, where its peers come from, and whether all of it is well. Knows nothing of SGLang.

With a sidecar the operator's rosters name the peers. Without one they introduce each other: a pod's new cards take
the place of its old ones, and a pod that was not heard of for longest is forgotten first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.engines.sglang.settings import Settings
from pdtransfer.errors import PeerNotRostered, QuarantineOverflow
from pdtransfer.session.api import EndpointConfig, PoolRegion
from pdtransfer.session.endpoint import AgentFactory, RankEndpoint, nixl_agent
from pdtransfer.sidecar.rank_link import RankLink

log = logging.getLogger(__name__)
MAX_PODS = 64
"""Peer pods that are remembered where nobody but themselves introduces them."""
HUNG_S, HUNG_LOOKS = 60.0, 3
"""An endpoint's thread hangs when it did not turn for that long at so many looks in a row: after a stop of the whole
process (SIGSTOP, a frozen container) it turns again before the second look."""


class Rank:
    """`on_peers(bootstraps)` is called (from any thread) with prefill addresses whose cards came, changed or went."""

    def __init__(
        self,
        template: RankCard,
        regions: Sequence[PoolRegion],
        config: EndpointConfig,
        settings: Settings,
        expected_ranks: int,
        on_peers: Callable[[frozenset[str]], None],
        agent_factory: AgentFactory = nixl_agent,
    ) -> None:
        self.rostered = settings.rostered
        self._on_peers = on_peers
        self._lock = threading.RLock()
        self._pods: dict[str, tuple[RankCard, ...]] = {}
        self._peers: tuple[RankCard, ...] = ()
        self._told: dict[str, str] = {}
        self._late = 0
        self.endpoint = _Followed(self._follow, template, regions, config, agent_factory)
        self._link: RankLink | None = None
        if settings.socket is not None:
            self._link = RankLink(settings.socket, self.endpoint, expected_ranks).start()

    @property
    def card(self) -> RankCard:
        """The rank's sealed card, with the agent it has now."""
        return self.endpoint.card

    @property
    def peers(self) -> tuple[RankCard, ...]:
        """Cards of all peers, as last applied."""
        return self._peers

    @property
    def problem(self) -> str:
        """Why no transfer can succeed from now on, or no peer be learnt of; empty while all is well."""
        told = next(iter(self._told.values()), "")
        if self.endpoint.failed is not None:
            return f"the transfer endpoint failed: {self.endpoint.failed}"
        if self._link is not None and self._link.failed is not None:
            return f"the link to the sidecar failed: {self._link.failed!r}"
        return told

    @property
    def must_end(self) -> bool:
        """Only this process' end makes its memory safe again."""
        failed = self.endpoint.failed
        return failed is not None and isinstance(failed.__cause__, QuarantineOverflow)

    def broken(self, what: str) -> None:
        """Something of this rank ended that should not have. Without it the rank serves nobody, so its endpoint ends
        as well: an operator sees the card go, and peers hear of it."""
        self._told[what] = what
        self.endpoint.crash(what)

    def hung(self) -> str:
        """What is wrong when the endpoint's thread hangs, else empty. For one thread that asks again and again."""
        age = self.endpoint.age
        self._late = self._late + 1 if age > HUNG_S and self.endpoint.failed is None else 0
        return f"the endpoint's thread hangs: no turn for {age:.0f} s" if self._late >= HUNG_LOOKS else ""

    def cards_behind(self, bootstrap: str) -> tuple[RankCard, ...]:
        """Prefill cards at a bootstrap address. Raises PeerNotRostered."""
        found = tuple(c for c in self._peers if c.bootstrap == bootstrap)
        if not found:
            who = "the operator's roster" if self.rostered else "no introduction"
            raise PeerNotRostered(f"{who} names no prefill rank at this bootstrap address", peer=bootstrap)
        return found

    def verdict(self, card: RankCard) -> Verdict | None:
        """What is known of a peer's incarnation."""
        return next(
            (
                v
                for v in self.endpoint.verdicts
                if (v.peer_pod_uid, v.peer_rank, v.peer_incarnation) == (card.pod_uid, card.rank, card.incarnation)
            ),
            None,
        )

    def wired(self, card: RankCard) -> bool:
        """KV can move between the two."""
        found = self.verdict(card)
        return found is not None and found.state is VerdictState.WIRED

    def introduce(self, cards: Sequence[RankCard], *, whole: bool) -> None:
        """Cards that peers showed of themselves; `whole`: they are all of their pods. Ignored under a roster.

        Raises PeerNotRostered when a card's seal is broken or its role is this rank's own."""
        if self.rostered:
            return
        for card in cards:
            if card.seal_broken or card.role is not self.card.role.other:
                told = card.seal_broken or f"a {card.role.value} rank"
                raise PeerNotRostered(f"the card that was introduced is refused: {told}", peer=card.pod_uid)
        with self._lock:
            for uid in {c.pod_uid for c in cards}:
                new = [c for c in cards if c.pod_uid == uid]
                if not whole:  # one rank of a pod speaks for itself; another incarnation ends what was before
                    ranks = {c.rank for c in new}
                    held = self._pods.get(uid, ())
                    new += [c for c in held if c.rank not in ranks and c.incarnation == new[0].incarnation]
                self._pods.pop(uid, None)
                self._pods[uid] = tuple(new)
            while len(self._pods) > MAX_PODS:
                gone = next(iter(self._pods))
                log.warning("pod %s is forgotten: %d others were heard of since", gone, MAX_PODS)
                del self._pods[gone]
            everyone = [c for pod in self._pods.values() for c in pod]
            wanted = peers_of(self.card, everyone)
            if wanted != self._peers:
                self.endpoint.apply_peers(wanted)

    def close(self) -> None:
        """Take the card away, then end everything."""
        if self._link is not None:
            self._link.stop()
        self.endpoint.close()

    def _follow(self, peers: Sequence[RankCard]) -> None:
        def places(cards: Sequence[RankCard]) -> dict[str, frozenset[tuple[str, int, str]]]:
            return {
                b: frozenset((c.pod_uid, c.rank, c.incarnation) for c in cards if c.bootstrap == b)
                for b in {c.bootstrap for c in cards if c.bootstrap}
            }

        before, after = places(self._peers), places(peers)
        self._peers = tuple(peers)
        changed = frozenset(b for b in before.keys() | after.keys() if before.get(b) != after.get(b))
        if changed:
            self._on_peers(changed)


class _Followed(RankEndpoint):
    """An endpoint whose peers are heard of before they are applied."""

    def __init__(
        self,
        follow: Callable[[Sequence[RankCard]], None],
        template: RankCard,
        regions: Sequence[PoolRegion],
        config: EndpointConfig,
        agent_factory: AgentFactory,
    ) -> None:
        self._follow = follow
        super().__init__(template, regions, config, agent_factory)

    def apply_peers(self, peers: Sequence[RankCard]) -> None:
        """The whole set of peers, from a roster or from introductions."""
        super().apply_peers(peers)
        self._follow(peers)
