"""Pods that are replaced for what they say of themselves: a registration that stays stale, a rank that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdoperator.api.conditions import Reason
from pdoperator.domain.observed import Observed
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.view import Refusal, View

Since = Mapping[str, tuple[str, float]]
"""Pod UID -> the incarnation that says it failed, and since when (Unix seconds) it does."""


@dataclass(frozen=True)
class Recycling:
    """`pods`: UID -> event reason and message. The others are to be remembered."""

    pods: dict[str, tuple[Reason, str]]
    stale: dict[str, float]
    failed: dict[str, tuple[str, float]]


def recycling(
    observed: Observed, view: View, stale_before: Mapping[str, float], failed_before: Since, settings: DecideSettings
) -> Recycling:
    """Which pods are due now."""
    now = observed.now
    stale = {r.pod.uid: stale_before.get(r.pod.uid, now) for r in view.refusals if r.stale}
    failed = {r.pod.uid: _since(observed, r, failed_before) for r in view.refusals if r.failed}
    pods: dict[str, tuple[Reason, str]] = {}
    for refusal in view.refusals:
        uid = refusal.pod.uid
        if uid in stale and now - stale[uid] > settings.stale_limit_seconds:
            pods[uid] = Reason.RECYCLED, f"its registration stayed stale: {refusal.message}"
        elif uid in failed and now - failed[uid][1] >= settings.failed_limit_seconds:
            pods[uid] = Reason.RECYCLED, refusal.message
    return Recycling(pods, stale, failed)


def _since(observed: Observed, refusal: Refusal, before: Since) -> tuple[str, float]:
    cards = observed.answers[refusal.pod.uid].cards
    incarnation = cards.incarnation if cards is not None else ""
    old = before.get(refusal.pod.uid)
    return old if old is not None and old[0] == incarnation else (incarnation, observed.now)
