"""The operator's one decision: from what was seen to what to do, and what to say about it.

Pure: equal observation and memory give an equal decision. Losing the memory (a restart of the
operator) may make it slower to blame, never make it act differently on what runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdoperator.api.conditions import ConditionStatus, Reason
from pdoperator.api.spec import PDClusterSpec, RouterType
from pdoperator.domain import history
from pdoperator.domain.actions import (
    Action,
    Decision,
    DeletePod,
    Memory,
    StartProbe,
)
from pdoperator.domain.cardfit import CardFit
from pdoperator.domain.condition import Aspect, roll_up
from pdoperator.domain.events import events
from pdoperator.domain.gates import decide_gates
from pdoperator.domain.images import plugins_seen
from pdoperator.domain.judge import all_aspects, compatible, progressing
from pdoperator.domain.lifecycle import Plan, delete_leaving, plan_pods
from pdoperator.domain.links import blame, links_of
from pdoperator.domain.observed import Observed
from pdoperator.domain.picture import Picture
from pdoperator.domain.preflight import Finding, from_report, preflight
from pdoperator.domain.realprobe import History
from pdoperator.domain.realround import real_round, recycled
from pdoperator.domain.recycling import recycling
from pdoperator.domain.revision import role_revisions, role_spec
from pdoperator.domain.routing import desired_workers, listed_everywhere, listed_urls, route, worker_url
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.status import build_status, read_backoff, same
from pdoperator.domain.upkeep import keep_children
from pdoperator.domain.verification import verify
from pdoperator.domain.view import engine_pods, look
from pdoperator.domain.wiring import wire
from pdtransfer.contract.base import Backend, Role

NAMESPACE_ENDS_SECONDS = 30.0

__all__ = ["DecideSettings", "decide"]


def decide(observed: Observed, memory: Memory, settings: DecideSettings) -> Decision:
    """One look at one PDCluster."""
    cluster = observed.cluster
    if cluster.deleting:
        # Owner references take the children along; nothing is created any more.
        return Decision((), None, memory, settings.idle_requeue)
    if observed.api_error_reason == Reason.NAMESPACE_TERMINATING:
        # Nothing can be made in it any more; asked again now and then, should it have been another one.
        return Decision((), None, memory, NAMESPACE_ENDS_SECONDS)
    extra = dict(memory.extra)
    pic, learned = _understand(observed, memory, settings)
    asked = pic
    healing = None if pic.may_launch else _healing(observed)
    if healing is not None:
        pic, learned = _understand(healing, memory, settings)
    proof = verify(pic.ready_links())
    aspects = all_aspects(pic, proof)
    if healing is not None:
        # About the spec as it is; everything else is about what runs.
        own = {a.type: a for a in (compatible(asked), progressing(asked))}
        aspects = [own.get(a.type, a) for a in aspects]
    status = build_status(pic, aspects, proof)

    actions: list[Action] = []
    if asked.may_launch:
        actions += history.keep(observed)
    actions += keep_children(pic, extra, learned, settings)
    actions += pic.plan.creates
    actions += pic.wiring.puts
    # Off the routers before the gate falls and before a pod is deleted; onto them after the gate rose.
    changes = route(observed, list(pic.workers))
    removals = [replace(c, add=()) for c in changes if c.remove]
    additions = [replace(c, remove=()) for c in changes if c.add]
    actions += removals
    actions += pic.gates.actions
    actions += additions
    actions += pic.real.starts if pic.real else ()
    actions += pic.plan.deletes
    drained, learned["leaving_since"] = delete_leaving(
        observed, pic.plan.leaving, _still_routed(observed), dict(extra.get("leaving_since", {})), settings
    )
    actions += drained
    actions += events(pic, aspects, cluster.status, drained)

    changed = not same(status, cluster.status)
    return Decision(
        actions=tuple(actions),
        status=status if changed else None,
        memory=Memory(stale_since=pic.stale, extra=extra | learned),
        requeue_after=_next_look(pic, aspects, actions, settings),
    )


def _healing(observed: Observed) -> Observed | None:
    """This look with the last spec that fitted, where its pods still run: they are kept complete while a
    newer spec can not be read or does not fit. None where there is nothing to heal."""
    spec = history.last_fitting(observed)
    if spec is None or preflight(spec).verdict == "Fail":
        return None
    revisions = role_revisions(spec)
    if not any(p.revision == revisions[Role(p.role)] for p in engine_pods(observed)):
        return None
    return replace(observed, cluster=replace(observed.cluster, spec=spec, spec_error=""))


def _understand(observed: Observed, memory: Memory, settings: DecideSettings) -> tuple[Picture, dict[str, Any]]:
    """The picture, and what to remember of it."""
    extra = memory.extra
    spec = observed.cluster.spec
    managed = spec.transfer.backend is Backend.PDCLUSTER if spec else True
    revisions = role_revisions(spec) if spec else {}
    wanted = _wanted(observed, spec)
    checked = preflight(spec, plugins=plugins_seen(observed)) if spec else None
    may_launch = checked is not None and checked.verdict != "Fail"
    by_revision = spec is not None and spec.rollout.isolation.value == "Revision"

    foreign = _foreign(observed, spec, revisions)
    view = look(observed, by_revision, foreign)
    fit = CardFit(spec)
    gated: dict[str, str] = dict(extra.get("gated", {}))
    replaced = frozenset(
        p.uid
        for p in view.peers
        if p.pod.kv_wired == "True" and gated.get(p.uid, p.cards.incarnation) != p.cards.incarnation
    )
    links = links_of(observed, view, replaced)
    blamed = blame(links, extra.get("blame", {}), observed.now)

    due = recycling(observed, view, memory.stale_since, extra.get("failed_since", {}), settings)
    # Pods of other backends show no cards: those that are ready serve, paired by their common revision.
    serving = {p.uid: p.revision for p in engine_pods(observed) if p.uid in foreign and p.ready}
    proven: History = extra.get("real", {})
    going = frozenset(extra.get("leaving_since", {}))
    unserving = recycled(observed, spec, serving, going, revisions, proven, extra.get("recycled_at", 0.0), settings)
    recycle = due.pods | unserving
    # Memory knows more than a status whose last write was refused; status outlives the process.
    told = extra.get("backoff")
    plan = Plan(backoff=read_backoff(observed.cluster.status) if told is None else told)
    if spec is not None:
        plan = plan_pods(
            observed,
            observed.cluster,
            spec,
            may_launch,
            plan.backoff,
            frozenset(extra.get("counted", ())),
            _listed_everywhere_uids(observed, spec),
            recycle,
            settings,
            extra.get("attempts"),
        )
    # Off the routers in this look, which comes before the pod's end.
    ended = frozenset(d.uid for d in plan.deletes)
    leaving = frozenset(plan.leaving) | ended

    gates = decide_gates(
        observed, view, links, blamed, extra.get("islands", {}), extra.get("fell", {}), leaving, wanted, settings
    )
    serving = {uid: revision for uid, revision in serving.items() if uid not in ended}
    gates = replace(gates, ready=gates.ready | frozenset(serving), island=gates.island | serving)
    wiring = wire(observed, view, fit.fits, extra.get("cards", {}), extra.get("counter", (0, 0)), extra.get("hashes"))

    reports = fit.reports(view, revisions)
    card_findings: dict[tuple[str, str], Finding] = {}
    for _, _, report in reports:
        for f in from_report(report.findings):
            if f.status in ("Fail", "Warn"):
                card_findings.setdefault((f.rule, f.message), f)

    real = real_round(observed, spec, gates, leaving, revisions, proven, settings)
    workers = desired_workers([p for p in engine_pods(observed) if p.uid not in leaving], gates.ready, gates.island)
    pic = Picture(
        observed=observed,
        spec=spec,
        managed=managed,
        wanted=wanted,
        revisions=revisions,
        preflight=checked,
        card_findings=tuple(card_findings.values()),
        cards_decided=bool(reports),
        view=view,
        links=links,
        gates=gates,
        wiring=wiring,
        plan=plan,
        workers=tuple(workers),
        stale=due.stale,
        real=real,
    )
    alive = {p.uid for p in engine_pods(observed)}
    keep_gated = {
        p.uid: p.cards.incarnation if p.uid in gates.ready else gated.get(p.uid, p.cards.incarnation)
        for p in view.peers
        if p.uid in gates.ready or p.pod.kv_wired == "True"
    }
    learned: dict[str, Any] = {
        "gated": {u: i for u, i in (gated | keep_gated).items() if u in alive},
        "blame": blamed,
        "counted": plan.counted,
        "backoff": plan.backoff,
        "attempts": plan.attempts or extra.get("attempts", {}),
        "fell": gates.fell,
        "failed_since": due.failed,
        "real": real.history if real else proven,
        "recycled_at": observed.now if ended & unserving.keys() else extra.get("recycled_at", 0.0),
        "islands": {u: i for u, i in (extra.get("islands", {}) | gates.island).items() if u in alive},
        "cards": wiring.cards or {},
        "hashes": wiring.memo or extra.get("hashes"),
        "counter": max(extra.get("counter", (0, 0)), (wiring.term, wiring.counter)),
    }
    return pic, learned


def _foreign(observed: Observed, spec: PDClusterSpec | None, revisions: dict[Role, str]) -> frozenset[str]:
    """Pods that the operator does not wire: those launched from a spec with another backend, and any
    that are ready without a gate (so they have none). Pods that were wired stay wired, whatever the
    spec says now."""
    others = spec is not None and spec.transfer.backend is not Backend.PDCLUSTER
    return frozenset(
        p.uid
        for p in engine_pods(observed)
        if not p.kv_wired and (p.ready or (others and p.revision == revisions[Role(p.role)]))
    )


def _wanted(observed: Observed, spec: PDClusterSpec | None) -> dict[Role, int]:
    if spec is not None:
        return {role: role_spec(spec, role).replicas for role in Role}
    told = observed.cluster.status
    out = {}
    for role in Role:
        there = len({p.replica for p in engine_pods(observed) if p.role == role.value and not p.deleting})
        old = (told.get(role.value) or {}).get("wanted")
        out[role] = old if isinstance(old, int) else there
    return out


def _still_routed(observed: Observed) -> frozenset[str]:
    """Pods that a router lists, or may list: one that is ready and does not answer could list any."""
    if any(r.workers is None and r.pod.ready for r in observed.routers):
        return frozenset(p.uid for p in observed.pods)
    urls = listed_urls(observed)
    return frozenset(p.uid for p in observed.pods if p.ip and worker_url(p.ip) in urls)


def _listed_everywhere_uids(observed: Observed, spec: PDClusterSpec) -> frozenset[str]:
    """Empty where no router is asked for: then being ready is enough to take a place."""
    if spec.router.type is not RouterType.SMG or spec.router.replicas == 0:
        return frozenset()
    urls = listed_everywhere(observed)
    return frozenset(p.uid for p in observed.pods if p.ip and worker_url(p.ip) in urls)


def _next_look(pic: Picture, aspects: list[Aspect], actions: list[Action], settings: DecideSettings) -> float:
    """Soon while something converges, later when all is quiet; never past a deadline that is due."""
    ready = roll_up(aspects).status is ConditionStatus.TRUE
    busy = any(not isinstance(a, DeletePod | StartProbe) for a in actions)
    wait = settings.idle_requeue if ready and not busy and not pic.plan.leaving else settings.converging_requeue
    if not pic.may_launch and not pic.pods:
        wait = settings.idle_requeue
    if pic.plan.waiting_until > pic.observed.now:
        wait = min(wait, max(0.1, pic.plan.waiting_until - pic.observed.now))
    return wait
