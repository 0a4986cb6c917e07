"""Readiness gates: which pods are in the ready set of their island, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from pdoperator.api.conditions import Reason
from pdoperator.api.names import CONTAINER_ENGINE
from pdoperator.domain.actions import SetGate
from pdoperator.domain.gate import best_set, weight
from pdoperator.domain.links import Blame, Link, LinkState, against
from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.view import View, engine_pods
from pdtransfer.contract.base import Role


@dataclass(frozen=True)
class Gates:
    """`ready`: UIDs whose gate shall be True; `island` of each pod that has one; `fell`: UIDs that lost
    their gate through links of their own, with the time (for the stability window)."""

    ready: frozenset[str]
    actions: tuple[SetGate, ...]
    island: dict[str, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    fell: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    """UID -> why it is not in the set."""


def _links_of(links: Mapping[tuple[str, str], Link], uid: str) -> list[Link]:
    return [link for key, link in links.items() if uid in key]


def decide_gates(
    observed: Observed,
    view: View,
    links: Mapping[tuple[str, str], Link],
    blamed: Mapping[tuple[str, str], Blame],
    islands_before: Mapping[str, str],
    fell_before: Mapping[str, float],
    leaving: frozenset[str],
    wanted: Mapping[Role, int],
    settings: DecideSettings,
) -> Gates:
    """The heaviest fully wired set of each island."""
    pods = {p.uid: p for p in engine_pods(observed) if p.uid not in view.foreign}
    unreached = {p.uid for p in view.unreachable}
    island: dict[str, str] = {p.uid: p.island for p in view.peers}
    for uid in unreached:
        if pods[uid].kv_wired == "True":
            island.setdefault(uid, islands_before.get(uid, ""))
    reasons: dict[str, tuple[Reason, str]] = {}
    candidates: dict[str, PodSeen] = {}
    for uid, pod in pods.items():
        if pod.deleting or uid in leaving:
            reasons[uid] = (Reason.NOT_REQUIRED, "the pod is leaving")
        elif not pod.containers_ready or uid not in island:
            reasons[uid] = _why_no_candidate(pod, uid in island, view, links, pods)
        else:
            candidates[uid] = pod

    fell = {u: t for u, t in fell_before.items() if observed.now - t < settings.rejoin_stability_seconds}
    ready: set[str] = set()
    held: set[str] = set()
    # A pod that can't be reached and whose island nobody remembers belongs to whichever island is there.
    groups = {i for uid, i in island.items() if uid in candidates and i} or {""}
    for group in sorted(groups):
        members = {u: p for u, p in candidates.items() if island[u] in (group, "")}
        sides: dict[Role, dict[str, Fraction]] = {Role.PREFILL: {}, Role.DECODE: {}}
        for uid, pod in members.items():
            role = Role(pod.role)
            if uid in fell and pod.kv_wired != "True":
                reasons[uid] = (Reason.WIRING, "wired again; it rejoins when its links stay good")
                continue
            sides[role][uid] = weight(wanted[role], pod.kv_wired == "True")
        good: set[tuple[str, str]] = set()
        for p in sides[Role.PREFILL]:
            for d in sides[Role.DECODE]:
                both = members[p].kv_wired == "True" and members[d].kv_wired == "True"
                link = links.get((p, d))
                if link is None:
                    # At least one of the two was not reached: what was ready stays as it is.
                    if both and (p in unreached or d in unreached):
                        good.add((p, d))
                elif link.state is LinkState.GOOD or (both and not against(link, blamed, observed.now, settings)):
                    good.add((p, d))
        chosen = best_set(sides[Role.PREFILL], sides[Role.DECODE], good)
        ready |= chosen
        for role, side in sides.items():
            for uid in side:
                if uid in chosen:
                    if uid in unreached:
                        held.add(uid)
                    continue
                reasons[uid] = _why_out(pods[uid], role, _links_of(links, uid), sides[role.other], pods)
                evidence = any(against(link, blamed, observed.now, settings) for link in _links_of(links, uid))
                if pods[uid].kv_wired == "True" and evidence:
                    fell[uid] = observed.now
    for uid in ready:
        reasons.pop(uid, None)

    # Where the operator reaches no pod at all it knows nothing: every gate stays.
    for uid in unreached:
        if (
            pods[uid].kv_wired == "True"
            and uid not in ready
            and not _evidence(pods[uid], leaving, links, blamed, observed.now, settings)
        ):
            ready.add(uid)
            held.add(uid)
            reasons.pop(uid, None)
    actions = tuple(_gate_actions(pods, ready, reasons))
    return Gates(frozenset(ready), actions, {u: i for u, i in island.items() if i}, frozenset(held), fell, reasons)


def _evidence(
    pod: PodSeen,
    leaving: frozenset[str],
    links: Mapping[tuple[str, str], Link],
    blamed: Mapping[tuple[str, str], Blame],
    now: float,
    settings: DecideSettings,
) -> bool:
    if pod.deleting or pod.uid in leaving or not pod.containers_ready:
        return True
    return any(against(link, blamed, now, settings) for link in _links_of(links, pod.uid))


RANK_LOST = (
    "it no longer shows every rank: a process of its engine ended, or a transfer thread failed or hangs. It is wired "
    "again once its engine was started anew"
)


def _lost_a_rank(pod: PodSeen) -> bool:
    """It was wired since its engine was started: it is not still loading. Told from the pod alone, so that an operator
    that starts meanwhile says the same. Times are whole seconds."""
    engine = next((c for c in pod.containers if c.name == CONTAINER_ENGINE), None)
    if engine is None or not engine.running or not 0 < engine.started < pod.kv_wired_since:
        return False
    return pod.kv_wired == "True" or pod.gate_reason in (Reason.RANK_LOST, Reason.RANK_FAILED)


def _why_no_candidate(
    pod: PodSeen,
    shows_cards: bool,
    view: View,
    links: Mapping[tuple[str, str], Link],
    pods: Mapping[str, PodSeen],
) -> tuple[Reason, str]:
    """Why a pod is not even considered. Its sidecar is ready only when its ranks are wired, so containers
    that are not ready often mean peers that are not."""
    refusal = next((r for r in view.refusals if r.pod.uid == pod.uid), None)
    if refusal is not None:
        lost = "the operator can not reach its sidecar: " if refusal.reason is Reason.OPERATOR_CANNOT_REACH_PODS else ""
        return refusal.reason, lost + refusal.message
    if any(p.uid == pod.uid for p in view.unreachable):
        return Reason.OPERATOR_CANNOT_REACH_PODS, "its sidecar is not running"
    if not shows_cards and _lost_a_rank(pod):
        return Reason.RANK_LOST, RANK_LOST
    if not pod.engine_is_ready:
        return Reason.LAUNCHING, "its engine is not ready"
    if not shows_cards:
        return Reason.WIRING, "its cards are not complete yet"
    role = Role(pod.role)
    others = {u for u, p in pods.items() if p.role == role.other.value and not p.deleting}
    return _why_out(pod, role, _links_of(links, pod.uid), {u: Fraction(1) for u in others}, pods)


def _why_out(
    pod: PodSeen,
    role: Role,
    links: list[Link],
    others: Mapping[str, Fraction],
    pods: Mapping[str, PodSeen],
) -> tuple[Reason, str]:
    # A partner that starts again is waited for, whatever the verdicts of the old one were.
    starting = sorted(
        p.name for p in pods.values() if p.role == role.other.value and not p.deleting and not p.engine_is_ready
    )
    if not others or (starting and not links):
        awaited = f": {starting[0]} is not up yet" if starting else ""
        return Reason.WAITING_FOR_WIRING, f"waits for a {role.other.value} pod to be wired to{awaited}"
    order = (LinkState.REFUSED, LinkState.UNREACHABLE, LinkState.REPLACED, LinkState.PENDING)
    for state in order:
        for link in links:
            if link.state is state:
                peer = link.decode if role is Role.PREFILL else link.prefill
                reason = {
                    LinkState.REFUSED: Reason.PEERS_REFUSED,
                    LinkState.UNREACHABLE: Reason.PEERS_UNREACHABLE,
                }.get(state, Reason.WIRING)
                return reason, f"{_HOW[state]} {peer.name}: {link.message}"
    if links and all(link.state is LinkState.GOOD for link in links) and not pod.containers_ready:
        return Reason.WIRING, "wired; its sidecar's readiness probe has yet to see it"
    return Reason.WIRING, "not wired yet"


_HOW = {
    LinkState.REFUSED: "can not be wired to",
    LinkState.UNREACHABLE: "does not reach, or is not reached by,",
    LinkState.REPLACED: "is wired anew to",
    LinkState.PENDING: "is being wired to",
}


def _gate_actions(
    pods: Mapping[str, PodSeen], ready: set[str], reasons: Mapping[str, tuple[Reason, str]]
) -> list[SetGate]:
    actions: list[SetGate] = []
    for uid, pod in pods.items():
        if uid in ready:
            if pod.kv_wired != "True":
                actions.append(SetGate(pod.name, uid, True, Reason.WIRED.value, "wired to every partner of its island"))
        elif pod.kv_wired == "True":
            # A gate that was never written holds a pod back as well as False does.
            reason, message = reasons.get(uid, (Reason.WIRING, "not wired yet"))
            actions.append(SetGate(pod.name, uid, False, reason.value, message))
    return actions
