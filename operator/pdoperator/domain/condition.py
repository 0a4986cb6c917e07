"""Building blocks of status: one judged aspect, its wire form, and the rollup into Ready."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdoperator.api.conditions import ConditionStatus, ConditionType, Reason
from pdoperator.api.status import Condition, timestamp

_MESSAGE_MAX = 2000


@dataclass(frozen=True)
class Aspect:
    """One condition before it gets its time. `required` says whether Ready waits for it."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str
    required: bool = True

    @property
    def holds(self) -> bool:
        """True when Ready need not wait for it."""
        return self.status is ConditionStatus.TRUE or not self.required


def yes(kind: ConditionType, reason: Reason, message: str, *, required: bool = True) -> Aspect:
    """A condition that holds."""
    return Aspect(kind, ConditionStatus.TRUE, reason, message, required)


def no(kind: ConditionType, reason: Reason, message: str, *, required: bool = True) -> Aspect:
    """A condition that does not hold."""
    return Aspect(kind, ConditionStatus.FALSE, reason, message, required)


def unknown(kind: ConditionType, reason: Reason, message: str, *, required: bool = True) -> Aspect:
    """A condition nobody can decide now."""
    return Aspect(kind, ConditionStatus.UNKNOWN, reason, message, required)


def roll_up(aspects: Iterable[Aspect]) -> Aspect:
    """Ready: the first required aspect that is False, else the first that is Unknown, else True."""
    listed = list(aspects)
    for status in (ConditionStatus.FALSE, ConditionStatus.UNKNOWN):
        for a in listed:
            if a.required and a.status is status:
                return Aspect(ConditionType.READY, status, a.reason, f"{a.type.value}: {a.message}")
    return yes(ConditionType.READY, Reason.ALL_READY, "Prefill and decode are wired, verified and routed.")


def to_conditions(
    aspects: Iterable[Aspect], before: Iterable[Mapping[str, Any]], generation: int, now: float
) -> tuple[Condition, ...]:
    """Wire form. lastTransitionTime moves only when the status does."""
    old = {c.get("type"): c for c in before}
    out = []
    for a in aspects:
        was = old.get(a.type.value)
        same = was is not None and was.get("status") == a.status.value and was.get("lastTransitionTime")
        out.append(
            Condition(
                type=a.type.value,
                status=a.status,
                observed_generation=generation,
                last_transition_time=was["lastTransitionTime"] if same and was else timestamp(now),
                reason=a.reason.value,
                message=a.message[:_MESSAGE_MAX],
            )
        )
    return tuple(out)


def old_condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    """A condition of the status as it was; empty when it was never written."""
    return next((c for c in status.get("conditions") or () if c.get("type") == kind.value), {})
