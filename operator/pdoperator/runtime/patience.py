"""How long a PDCluster with no news may be left alone."""

from __future__ import annotations

from pdoperator.domain.observed import PodAnswer

_ASK_EVERY = 1.5
"""Seconds between two rounds of questions at most, where pods or routers run."""
_LOOK_EVERY = 5.0
"""Seconds between two looks at most, where there is nobody to ask."""


def news(before: dict[str, PodAnswer], after: dict[str, PodAnswer]) -> bool:
    """Did any pod say something else than last time? (An unchanged card is the same object: a 304.)"""
    return before.keys() != after.keys() or any(
        (a.error, a.verdicts) != (before[uid].error, before[uid].verdicts) or a.cards is not before[uid].cards
        for uid, a in after.items()
    )


def stretched(wanted: float, quiet: int, anyone_to_ask: bool) -> float:
    """A model that loads for minutes need not be looked at twice a second: the wait doubles while there
    is no news. What pods do in the API wakes us anyway; what only a sidecar or a router can tell is
    asked for at least every 2 s."""
    limit = _ASK_EVERY if anyone_to_ask else _LOOK_EVERY
    return max(wanted, min(limit, wanted * 2.0 ** min(max(0, quiet - 2), 10)))
