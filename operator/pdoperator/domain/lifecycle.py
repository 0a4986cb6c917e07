"""Which engine pods to create and which to delete: scale, rollout, failures with backoff.

Terminating pods don't count. A failed or evicted pod is replaced under a new name after a backoff
that is kept in status. During a rollout old pods serve until a successor is ready (surge) or the
budget of unavailable pods allows their end. Draining is final: a leaving pod is off the routers
first and deleted then.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace

from pdoperator.api.conditions import Reason
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.actions import CreatePod, DeletePod, PodBackoff
from pdoperator.domain.lastwords import last_words
from pdoperator.domain.observed import ClusterObject, Observed, PodSeen
from pdoperator.domain.pods import Slot, engine_pod
from pdoperator.domain.revision import role_revisions, role_spec
from pdoperator.domain.rollout import max_surge, max_unavailable
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.view import FAILED_PHASES
from pdoperator.domain.words import count
from pdtransfer.contract.base import Role


@dataclass(frozen=True)
class Plan:
    """What one look wants done with pods."""

    creates: tuple[CreatePod, ...] = ()
    deletes: tuple[DeletePod, ...] = ()
    leaving: dict[str, str] = field(default_factory=dict)
    """UID -> why: off the routers, then deleted."""
    backoff: dict[str, PodBackoff] = field(default_factory=dict)
    """Slot key -> recreation history."""
    counted: frozenset[str] = frozenset()
    """UIDs of failed pods that are in the history already."""
    waiting_until: float = 0.0
    """Earliest time a backed-off slot may start again; 0 when none waits."""
    blocked: str = ""
    """Why a rollout can not go on, or ''."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Slot key -> highest attempt number used in a name, so that a name is not used twice."""
    rolling: int = 0
    """Slots that still have a pod of an older revision."""


def exit_evidence(pod: PodSeen) -> str:
    """How a pod's containers ended, in words; '' when none did."""
    told = []
    for c in pod.containers:
        if c.last_exit_code is not None and (c.last_exit_code != 0 or c.restarts):
            # Error only repeats that the code is not 0; OOMKilled and the like say more.
            why = f" {c.last_exit_reason}" if c.last_exit_reason not in ("", "Error") else _signal(c.last_exit_code)
            # Who is killed has no time to say why: an ordinary line would only look like the cause.
            said = last_words(c.last_exit_message, errors_only=c.last_exit_code == 128 + signal.SIGKILL)
            tail = f": {said}" if said else ""
            told.append(f"{c.name} exited with {c.last_exit_code}{why}{tail}")
    return "; ".join(told)


def _signal(exit_code: int) -> str:
    """` (SIGKILL)` and so on: a process that a signal ended has 128 and its number for an exit code."""
    try:
        return f" ({signal.Signals(exit_code - 128).name})"
    except ValueError:
        return ""


def next_backoff(old: PodBackoff, now: float, evidence: str, settings: DecideSettings) -> PodBackoff:
    """One failure more: 10 s, 20 s, 40 s ... up to the limit."""
    wait = min(settings.backoff_max_seconds, settings.backoff_base_seconds * 2.0**old.failures)
    return PodBackoff(old.failures + 1, now + wait, evidence or old.last_exit)


@dataclass
class _Role:
    """Work state for one role (private to this module, never shared)."""

    slots: dict[int, list[PodSeen]]
    surplus: list[PodSeen]


def _sort_pods(observed: Observed, role: Role, wanted: int) -> tuple[_Role, list[PodSeen], list[PodSeen]]:
    slots: dict[int, list[PodSeen]] = {i: [] for i in range(wanted)}
    surplus: list[PodSeen] = []
    failed: list[PodSeen] = []
    dying: list[PodSeen] = []
    for pod in sorted(observed.pods, key=lambda p: (p.replica, p.created, p.uid)):
        if pod.role != role.value:
            continue
        if pod.deleting:
            dying.append(pod)
        elif pod.phase in FAILED_PHASES:
            failed.append(pod)
        elif pod.replica in slots:
            slots[pod.replica].append(pod)
        else:
            surplus.append(pod)
    return _Role(slots, surplus), failed, dying


def plan_pods(
    observed: Observed,
    cluster: ClusterObject,
    spec: PDClusterSpec,
    may_launch: bool,
    backoff: dict[str, PodBackoff],
    counted: frozenset[str],
    listed: frozenset[str],
    recycle: dict[str, tuple[Reason, str]],
    settings: DecideSettings,
    attempts: dict[str, int] | None = None,
) -> Plan:
    """Plan for both roles. `may_launch` is False while the spec does not fit: then nothing is created
    and nothing that runs is touched. `listed` are UIDs of pods that every router lists, `recycle` pods
    that must be replaced (stale cards)."""
    if not may_launch:
        return Plan(backoff=backoff, counted=counted, attempts=dict(attempts or {}))
    revisions = role_revisions(spec)
    plan = Plan(backoff=dict(backoff), counted=counted, attempts=dict(attempts or {}))
    for role in Role:
        plan = _plan_role(observed, cluster, spec, role, revisions[role], listed, recycle, settings, plan)
    alive = {p.uid for p in observed.pods}
    return replace(plan, counted=plan.counted & alive)


def _plan_role(
    observed: Observed,
    cluster: ClusterObject,
    spec: PDClusterSpec,
    role: Role,
    revision: str,
    listed: frozenset[str],
    recycle: dict[str, tuple[Reason, str]],
    settings: DecideSettings,
    plan: Plan,
) -> Plan:
    now = observed.now
    wanted = role_spec(spec, role).replicas
    work, failed, dying = _sort_pods(observed, role, wanted)
    creates = list(plan.creates)
    deletes = list(plan.deletes)
    leaving = dict(plan.leaving)
    backoff = dict(plan.backoff)
    counted = set(plan.counted)
    waiting = plan.waiting_until
    blocked = plan.blocked
    rolling = plan.rolling
    used = dict(plan.attempts)

    def fail(pod: PodSeen, reason: Reason, message: str) -> None:
        deletes.append(DeletePod(pod.name, pod.uid, reason.value, message))
        if pod.uid not in counted:
            counted.add(pod.uid)
            slot = Slot(role, pod.replica)
            backoff[slot.key] = next_backoff(backoff.get(slot.key, PodBackoff()), now, message, settings)

    for pod in failed:
        fail(pod, Reason.RECYCLED, exit_evidence(pod) or f"the pod is {pod.phase}")
    for pods in work.slots.values():
        for pod in [p for p in pods if p.uid in recycle]:
            fail(pod, *recycle[pod.uid])
            pods.remove(pod)
    for pod in work.surplus:
        leaving[pod.uid] = f"scaled to {count(wanted, 'replica')}"

    served = [p for pods in work.slots.values() for p in pods if p.ready]
    available = len({p.replica for p in served})
    live = sum(len(pods) for pods in work.slots.values())
    budget = max_unavailable(spec, wanted) - (wanted - available)
    surge = max_surge(spec, wanted) - (live - sum(1 for pods in work.slots.values() if pods))
    for replica, pods in sorted(work.slots.items()):
        slot = Slot(role, replica)
        current = [p for p in pods if p.revision == revision]
        old = [p for p in pods if p.revision != revision]
        history = backoff.get(slot.key)
        if history and any(
            p.ready and now - max(p.created, p.kv_wired_since) >= settings.backoff_reset_seconds for p in current
        ):
            del backoff[slot.key]
        rolling += bool(old)
        there = [p.attempt for p in [*pods, *failed, *dying] if p.replica == replica]
        used[slot.key] = max([used.get(slot.key, -1), (history.failures - 1) if history else -1, *there])
        attempt = used[slot.key] + 1
        create = CreatePod(engine_pod(cluster, spec, slot, revision, attempt, settings))
        if len(current) > 1:
            # Two looks of a stale view created two: the older one stays.
            for pod in current[1:]:
                leaving[pod.uid] = "another pod has its place"
        if current and old:
            arrived = any(p.ready and (not listed or p.uid in listed) for p in current)
            for pod in old:
                if arrived or not pod.ready:
                    leaving[pod.uid] = f"replaced by revision {revision}"
        elif not current and not old:
            if history and now < history.not_before:
                waiting = min(waiting or history.not_before, history.not_before)
            else:
                creates.append(create)
        elif not current:
            # An edit in the middle of a rollout leaves pods of two old revisions: one goes on serving.
            serving = sorted((p for p in old if p.ready), key=lambda p: (p.uid in listed, p.created))[-1:]
            others = [p for p in old if p not in serving]
            if others:
                for pod in others:
                    leaving[pod.uid] = f"replaced by revision {revision}"
            elif surge > 0:
                surge -= 1
                creates.append(create)
            elif budget > 0:
                budget -= 1
                for pod in old:
                    leaving[pod.uid] = f"replaced by revision {revision}"
            elif max_unavailable(spec, wanted) <= 0 and max_surge(spec, wanted) <= 0:
                blocked = "rollout.maxSurge and maxUnavailable are both 0: no pod may be replaced; raise one of them"
    return Plan(tuple(creates), tuple(deletes), leaving, backoff, frozenset(counted), waiting, blocked, used, rolling)


def delete_leaving(
    observed: Observed,
    leaving: dict[str, str],
    listed_uids: frozenset[str],
    since: dict[str, float],
    settings: DecideSettings,
) -> tuple[list[DeletePod], dict[str, float]]:
    """Deletes for leaving pods that no router lists any more (or that waited too long), and since when
    each is leaving."""
    deletes: list[DeletePod] = []
    after: dict[str, float] = {}
    for pod in observed.pods:
        why = leaving.get(pod.uid)
        if why is None or pod.deleting:
            continue
        after[pod.uid] = since.get(pod.uid, observed.now)
        if pod.uid not in listed_uids or observed.now - after[pod.uid] >= settings.drain_limit_seconds:
            deletes.append(DeletePod(pod.name, pod.uid, Reason.DELETED.value, why))
    return deletes, after
