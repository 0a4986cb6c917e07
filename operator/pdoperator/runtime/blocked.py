"""Status of a PDCluster whose children can not even be listed: nothing may be decided then. Pure."""

from __future__ import annotations

from typing import Any

from pdoperator.api.conditions import ConditionStatus, ConditionType
from pdoperator.api.status import timestamp
from pdoperator.domain.apirefusal import refusal_text
from pdoperator.domain.observed import ClusterObject
from pdoperator.kube.observe import Problem


def blocked_status(cluster: ClusterObject, problem: Problem, now: float) -> dict[str, Any] | None:
    """The status as it is, with Progressing=False and Ready=Unknown naming the refusal; None when it
    says so already. What runs may well serve: that is why Ready is not False."""
    told = {
        ConditionType.READY: ConditionStatus.UNKNOWN,
        ConditionType.PROGRESSING: ConditionStatus.FALSE,
    }
    before = {c.get("type"): c for c in cluster.status.get("conditions") or []}
    after = dict(before)
    for kind, status in told.items():
        old = before.get(kind.value) or {}
        moved = old.get("status") != status.value
        since = timestamp(now) if moved or not old.get("lastTransitionTime") else old["lastTransitionTime"]
        after[kind.value] = {
            "type": kind.value,
            "status": status.value,
            "reason": str(problem.reason),
            "message": refusal_text(problem.message, problem.reason),
            "lastTransitionTime": since,
            "observedGeneration": cluster.generation,
        }
    if after == before:
        return None
    return {**cluster.status, "conditions": list(after.values())}
