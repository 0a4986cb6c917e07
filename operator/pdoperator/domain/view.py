"""What wiring, gates, routing and status read of an observation, in the shape they need it.

A view exists also where the spec does not parse: what runs goes on being wired by its own cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdoperator.api.conditions import Reason
from pdoperator.domain.lastwords import one_line
from pdoperator.domain.observed import Observed, PodAnswer, PodSeen
from pdtransfer.contract.base import ContractModel, Role, content_hash
from pdtransfer.contract.card import PodCards, RankCard

FAILED_PHASES = ("Failed", "Succeeded")


class Island(ContractModel):
    """What pods must share to exchange KV at all; layouts are then checked pair by pair."""

    fingerprint: str
    engine: str
    version: str
    revision: str = ""

    @property
    def id(self) -> str:
        """Short name, used as the router's pairing_protocol."""
        return content_hash(self.model_dump(mode="json"))[:12]


@dataclass(frozen=True)
class Peer:
    """One live engine pod whose complete, sealed and current cards are known."""

    pod: PodSeen
    cards: PodCards
    island: str

    @property
    def uid(self) -> str:
        return self.pod.uid

    @property
    def role(self) -> Role:
        return self.cards.role


@dataclass(frozen=True)
class Refusal:
    """Why a pod that was asked is not wired yet. `stale` ones are asked again and then recycled; one that `failed` says
    so itself, and is recycled unless its engine starts again by itself."""

    pod: PodSeen
    reason: Reason
    message: str
    stale: bool = False
    failed: bool = False


def engine_pods(observed: Observed) -> tuple[PodSeen, ...]:
    """Engine pods that are not finished, deleting ones included, in a fixed order."""
    pods = (p for p in observed.pods if p.engine_role is not None and p.phase not in FAILED_PHASES)
    return tuple(sorted(pods, key=lambda p: (p.role, p.replica, p.created, p.uid)))


def read_cards(observed: Observed, pod: PodSeen, answer: PodAnswer, by_revision: bool) -> Peer | Refusal | None:
    """A peer, why it is none, or None while the engine is loading."""
    if answer.error:
        try:
            reason = Reason(answer.error)
        except ValueError:
            reason = Reason.OPERATOR_CANNOT_REACH_PODS
        return Refusal(pod, reason, answer.message)
    cards = answer.cards
    if cards is None:
        return None
    if cards.cluster_uid != observed.cluster.uid or cards.pod_uid != pod.uid or cards.role is not pod.engine_role:
        return Refusal(
            pod,
            Reason.INVALID_CARD,
            f"it answers for pod {cards.pod_uid} ({cards.role.value}) of cluster {cards.cluster_uid}, "
            f"but it is pod {pod.uid} ({pod.role}) of cluster {observed.cluster.uid}",
        )
    if cards.failed:
        first_failed = cards.failed[0]
        why = one_line(first_failed.message, 400) or "it does not say why"
        told = f"rank {first_failed.rank} failed and says: {why}. Only a new start of its engine repairs that"
        return Refusal(pod, Reason.RANK_FAILED, f"{told}, and the pod is replaced", failed=True)
    if not cards.complete:
        if cards.refused:
            first = cards.refused[0]
            return Refusal(pod, Reason.INVALID_CARD, f"{first.reason}: {first.message}")
        return None
    problem = _card_problem(observed.cluster.uid, pod, cards)
    if problem is not None:
        return problem
    first_card = cards.cards[0]
    island = Island(
        fingerprint=first_card.fingerprint,
        engine=first_card.engine.type.value,
        version=first_card.engine.version,
        revision=pod.revision if by_revision else "",
    )
    return Peer(pod, cards, island.id)


def _card_problem(cluster_uid: str, pod: PodSeen, cards: PodCards) -> Refusal | None:
    ranks: set[int] = set()
    for card in cards.cards:
        where = f"rank {card.rank}"
        if card.cluster_uid != cluster_uid or card.pod_uid != pod.uid or card.role is not cards.role:
            return Refusal(pod, Reason.INVALID_CARD, f"{where} names another pod, role or cluster")
        if card.incarnation != cards.incarnation:
            return Refusal(
                pod, Reason.INVALID_CARD, f"{where} is of incarnation {card.incarnation}, not {cards.incarnation}"
            )
        stale = card.layout.stale_reason
        if stale:
            return Refusal(pod, Reason.STALE_REGISTRATION, f"{where}: {stale}", stale=True)
        broken = card.seal_broken
        if broken:
            return Refusal(pod, Reason.INVALID_CARD, f"{where}: {broken}")
        if card.rank in ranks:
            return Refusal(pod, Reason.INVALID_CARD, f"{where} appears twice")
        ranks.add(card.rank)
    if len({c.fingerprint for c in cards.cards}) != 1:
        return Refusal(pod, Reason.INVALID_CARD, "its ranks serve different models, KV dtypes or page sizes")
    return None


@dataclass(frozen=True)
class View:
    """Peers, refusals and what could not be asked."""

    peers: tuple[Peer, ...]
    refusals: tuple[Refusal, ...]
    unreachable: tuple[PodSeen, ...]
    """Running pods that did not answer this time, or whose answer nobody here can read although they are
    wired: nothing is known against them."""
    foreign: frozenset[str] = frozenset()
    """UIDs of pods that the operator does not wire."""

    def peer(self, uid: str) -> Peer | None:
        """Peer of that pod UID."""
        return next((p for p in self.peers if p.uid == uid), None)

    def side(self, role: Role) -> tuple[Peer, ...]:
        """Peers of one role."""
        return tuple(p for p in self.peers if p.role is role)


def _serves(pod: PodSeen) -> bool:
    """Wired, and its sidecar still says so. A card of it that can not be read is no evidence against that
    (an operator of another version reads cards differently): its peers' verdicts and its readiness are."""
    return pod.kv_wired == "True" and pod.containers_ready


_UNREACHED = (Reason.OPERATOR_CANNOT_REACH_PODS, Reason.WRONG_CERTIFICATE)


def look(observed: Observed, by_revision: bool, foreign: frozenset[str] = frozenset()) -> View:
    """Sort this reconcile's answers. Pods in `foreign` (UIDs) are left out."""
    peers: list[Peer] = []
    refusals: list[Refusal] = []
    unreachable: list[PodSeen] = []
    for pod in engine_pods(observed):
        if pod.uid in foreign:
            continue
        answer = observed.answers.get(pod.uid)
        if answer is None:
            if pod.ip and pod.phase == "Running":
                unreachable.append(pod)
            continue
        got = read_cards(observed, pod, answer, by_revision)
        if isinstance(got, Peer):
            peers.append(got)
        elif isinstance(got, Refusal):
            if got.reason in _UNREACHED or (got.reason is Reason.INVALID_CARD and _serves(pod)):
                unreachable.append(pod)
            refusals.append(got)
    return View(tuple(peers), tuple(refusals), tuple(unreachable), foreign)


def rank_cards(peer: Peer) -> tuple[RankCard, ...]:
    """Cards of a peer by rank."""
    return tuple(sorted(peer.cards.cards, key=lambda c: c.rank))
