"""From cards to rosters: which pods are told of which peers, under which key.

A roster is written only where its content differs from what the pod holds, so an operator that
restarts writes nothing. The key is (term, counter): an operator whose term is lower than one a pod
has seen is a cut-off one and writes nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdoperator.domain.actions import PutRoster
from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.view import Peer, View, engine_pods, rank_cards
from pdtransfer.contract.base import Role, content_hash
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.pairing import peers_of
from pdtransfer.contract.roster import Roster, RosterKey

Fits = Callable[[Peer, Peer], bool]


@dataclass(frozen=True)
class Memo:
    """Hashes of earlier looks, so that a quiet cluster of many pods costs no serialisation.

    `digests`: pod UID -> (its cards, their hash). `rosters`: pod UID -> (hashes of all cards that its
    roster is made of, the roster's hash)."""

    digests: dict[str, tuple[tuple[RankCard, ...], str]] = field(default_factory=dict)
    rosters: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def digest(self, before: Memo, peer: Peer) -> str:
        """Hash of a pod's cards, taken over from `before` where they are equal."""
        if peer.uid not in self.digests:
            old = before.digests.get(peer.uid)
            if old is not None and old[0] == peer.cards.cards:
                self.digests[peer.uid] = old
            else:
                text = content_hash([c.model_dump(mode="json") for c in rank_cards(peer)])
                self.digests[peer.uid] = (peer.cards.cards, text)
        return self.digests[peer.uid][1]


@dataclass(frozen=True)
class Wiring:
    """Rosters to write, the newest key in use, and why rosters are held back (where they are)."""

    puts: tuple[PutRoster, ...]
    term: int
    counter: int
    held: str = ""
    cards: dict[str, Peer] | None = None
    """Peers by UID as they were known last, also those that did not answer this time."""
    memo: Memo | None = None


def _known(observed: Observed, view: View, before: dict[str, Peer]) -> tuple[dict[str, Peer], list[PodSeen]]:
    """Peers to put into rosters, and live pods whose cards nobody knows although they may be wired.

    A pod stays in its peers' rosters by the cards it showed last while the operator can't reach it (that
    is no evidence that its peers can't), and while it shows fewer cards than it has ranks (its sidecar
    or a rank restarts: peers find out by themselves, and the next complete cards replace these)."""
    known: dict[str, Peer] = {}
    lost: list[PodSeen] = []
    unreached = {p.uid for p in view.unreachable}
    refused = {r.pod.uid for r in view.refusals} - unreached
    for pod in engine_pods(observed):
        peer = view.peer(pod.uid)
        if peer is not None:
            known[pod.uid] = peer
        elif pod.uid in before and pod.uid not in refused and pod.uid not in view.foreign:
            known[pod.uid] = Peer(pod, before[pod.uid].cards, before[pod.uid].island)
        elif pod.uid in unreached and pod.kv_wired == "True" and not pod.deleting:
            lost.append(pod)
    return known, lost


def roster_of(peer: Peer, others: list[Peer], key: RosterKey, cluster_uid: str) -> Roster:
    """What one pod shall hold: for each local rank the cards of the ranks it exchanges KV with."""
    cards: list[RankCard] = [c for o in others for c in rank_cards(o)]
    return Roster(
        cluster_uid=cluster_uid,
        pod_uid=peer.uid,
        incarnation=peer.cards.incarnation,
        key=key,
        peers={card.rank: peers_of(card, cards) for card in rank_cards(peer)},
    )


def wire(
    observed: Observed,
    view: View,
    fits: Fits,
    before: dict[str, Peer],
    last_counter: tuple[int, int],
    memo: Memo | None = None,
) -> Wiring:
    """Rosters for every peer that answered. `before` are the cards known from earlier looks,
    `last_counter` the (term, counter) this process used last."""
    known, lost = _known(observed, view, before)
    seen = [(p.cards.roster_term, p.cards.roster_counter) for p in view.peers]
    higher = max((t for t, _ in seen), default=0)
    if higher > observed.term:
        return Wiring(
            (),
            observed.term,
            0,
            f"a pod was wired by an operator of term {higher}; this one has term {observed.term} and holds back",
            known,
        )
    counters = [c for t, c in [*seen, last_counter] if t == observed.term]
    counter = max(counters, default=0)
    key = RosterKey(term=observed.term, counter=counter + 1)
    puts: list[PutRoster] = []
    earlier, memo = memo or Memo(), Memo()
    lost_roles = {p.role for p in lost}
    for peer in view.peers:
        if peer.role.other.value in lost_roles and peer.cards.roster_hash:
            # Its roster may name a pod whose cards nobody knows now: shrinking it would unwire them.
            continue
        others = [o for o in known.values() if o.role is peer.role.other and o.island == peer.island]
        others = [o for o in others if (fits(peer, o) if peer.role is Role.PREFILL else fits(o, peer))]
        made_of = (memo.digest(earlier, peer), *sorted(memo.digest(earlier, o) for o in others))
        kept = earlier.rosters.get(peer.uid)
        if kept is not None and kept == (made_of, peer.cards.roster_hash):
            memo.rosters[peer.uid] = kept
            continue
        roster = roster_of(peer, others, key, observed.cluster.uid)
        memo.rosters[peer.uid] = (made_of, roster.hash)
        if memo.rosters[peer.uid][1] != peer.cards.roster_hash and (others or peer.cards.roster_hash):
            puts.append(PutRoster(peer.pod.name, peer.pod.ip, roster))
    held = ""
    if lost:
        held = "the cards of " + ", ".join(sorted(p.name for p in lost)) + " are not known to this operator"
    return Wiring(tuple(puts), observed.term, counter + (1 if puts else 0), held, known, memo)
