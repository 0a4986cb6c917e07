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


WAITING = frozenset(
    {
        Reason.LAUNCHING,
        Reason.LOADING,
        Reason.WAITING_FOR_WIRING,
        Reason.WIRING,
        Reason.PARTLY_WIRED,
        Reason.ROUTER_STARTING,
        Reason.ROUTER_HAS_NO_PAIR,
    }
)
"""Reasons that say what is waited for, not what is wrong."""


def roll_up(aspects: Iterable[Aspect]) -> Aspect:
    """Ready: the first required aspect that fails, else the first that is False because it waits (often
    for the one that fails), else the first that is Unknown, else True."""
    aspects = list(aspects)
    listed = [a for a in aspects if a.required and a.status is not ConditionStatus.TRUE]
    ranked = sorted(listed, key=lambda a: (a.status is not ConditionStatus.FALSE, a.reason in WAITING))
    if ranked:
        a = ranked[0]
        return Aspect(ConditionType.READY, a.status, a.reason, f"{a.type.value}: {a.message}")
    # Ready must not sound like more than it is: what nobody looks after is named.
    open_ones = ", ".join(f"{a.type.value} ({a.reason.value})" for a in aspects if a.status is ConditionStatus.UNKNOWN)
    tail = f" Not known, and not waited for: {open_ones}." if open_ones else ""
    return yes(ConditionType.READY, Reason.ALL_READY, f"Every condition that is required holds.{tail}")


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
