"""Which prefill pod is replaced because its real requests keep failing, where a backend of SGLang's own moves the KV.

A rank whose bootstrap thread has ended serves nobody until its engine starts again, and /health stays green. But a
request fails as well where decode or the network is at fault, and then a new prefill pod heals nothing and costs one
that may be good. So a pod is replaced only on evidence about itself: one of its ranks failed often enough, for long
enough, and every failure's end was the same while other prefill pods served the very decode pods that it failed with.
Both sides failing is evidence about nobody. Never the last prefill pod that serves, and one at a time.

Pure: from the results so far, which may be lost (then it only takes longer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdoperator.domain.actions import ProbeEnd
from pdoperator.domain.realprobe import History, Tried, Unit, UnitSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.words import count

ENOUGH_DECODES = 2
"""Decode pods that a prefill must fail with where others serve so many: one alone may be a broken path between the
two."""


def failing_prefill(
    units: Iterable[Unit],
    decodes: Mapping[str, tuple[ProbeEnd, ...]],
    history: History,
    last: float,
    now: float,
    settings: DecideSettings,
) -> dict[str, str]:
    """UID of the prefill pod to replace now -> why; empty where there is none. `last` is when one was replaced before
    (0: never), Unix seconds."""
    units = list(units)
    if now - last < settings.recycle_seconds:
        return {}
    found = []
    for unit in units:
        seen = history.get(unit.key, UnitSeen())
        long_enough = seen.ended_at - seen.failing_since >= settings.recycle_seconds
        if seen.failures < settings.recycle_failures or not long_enough:
            continue
        why = _evidence(unit, seen, units, decodes.get(unit.island, ()), history)
        if why:
            found.append((seen.failing_since, unit.prefill.name, unit, why))
    return {unit.prefill.uid: why for _, _, unit, why in sorted(found, key=lambda f: f[:2])[:1]}


def _evidence(unit: Unit, seen: UnitSeen, units: list[Unit], decodes: tuple[ProbeEnd, ...], history: History) -> str:
    """Why this rank's failures are its own, '' where they may not be."""
    pods = {u.prefill.incarnation for u in units if u.island == unit.island} - {unit.prefill.incarnation}
    sound = {pod: [history.get(u.key, UnitSeen()) for u in units if u.prefill.incarnation == pod] for pod in pods}
    # A pod that can take over: no rank of it fails.
    sound = {pod: ranks for pod, ranks in sound.items() if all(r.served_at and not r.failures for r in ranks)}
    served = [
        d
        for d in decodes
        if any(
            r.pairs.get(d.incarnation, Tried()).served_at >= seen.failing_since
            for ranks in sound.values()
            for r in ranks
        )
    ]
    witnesses = [d for d in served if seen.pairs.get(d.incarnation, Tried()).failed_at >= seen.failing_since]
    if not witnesses or len(witnesses) < min(ENOUGH_DECODES, len(served)):
        return ""
    newest = max(witnesses, key=lambda d: seen.pairs[d.incarnation].failed_at)
    rank = f"data-parallel rank {unit.dp_rank}: " if unit.dp_size > 1 else ""
    names = ", ".join(d.name for d in witnesses[:3])
    return (
        f"{rank}{count(seen.failures, 'real request')} in a row failed over "
        f"{seen.ended_at - seen.failing_since:.0f} s, while {names} got KV from another prefill (last: "
        f"{seen.pairs[newest.incarnation].message})"
    )
