"""Proof by a real request where SGLang's own backend (NIXL, Mooncake) moves the KV, or Reference emulates it.

Nothing of such a backend reports to the operator, and /health stays green when a prefill rank's bootstrap thread
has ended (sglang-pd-rules 8.6): only a request that goes through it shows that it still works. So each prefill rank
gets a small one now and then, with a decode pod of its revision. One request meets every tensor- and
pipeline-parallel rank of prefill; of attention-data-parallel ranks it meets one, that of its room number.

Pure: what is due is decided from the results so far, which are kept in Memory and may be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdoperator.domain.actions import ProbeEnd, StartProbe
from pdoperator.domain.settings import DecideSettings


class ProbeOutcome(StrEnum):
    """How a probe ended. Only FAILED and TIMED_OUT speak against the pair."""

    SERVED = "served"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    BUSY = "busy"
    """An engine took no request now (429, 503)."""
    UNREACHABLE = "unreachable"
    """The operator did not get through to an engine's HTTP."""
    UNAUTHORIZED = "unauthorized"
    """An engine wants an API key."""

    @property
    def evidence(self) -> bool:
        """It says that this pair does not serve."""
        return self in (ProbeOutcome.FAILED, ProbeOutcome.TIMED_OUT)


@dataclass(frozen=True)
class ProbeResult:
    """The end of one probe. `at` is Unix seconds, `message` says what went wrong."""

    request: StartProbe
    outcome: ProbeOutcome
    message: str = ""
    seconds: float = 0.0
    at: float = 0.0


@dataclass(frozen=True)
class ProbesSeen:
    """What the prober tells at one look: probes under way, and new results."""

    running: tuple[StartProbe, ...] = ()
    results: tuple[ProbeResult, ...] = ()


@dataclass(frozen=True)
class Unit:
    """One prefill rank to prove: a pod's incarnation and an attention-data-parallel rank of it."""

    prefill: ProbeEnd
    dp_rank: int
    dp_size: int
    island: str

    @property
    def key(self) -> tuple[str, int]:
        """Identity in the history."""
        return self.prefill.incarnation, self.dp_rank

    @property
    def label(self) -> str:
        """For messages."""
        return self.prefill.name + (f" (data-parallel rank {self.dp_rank})" if self.dp_size > 1 else "")


@dataclass(frozen=True)
class Tried:
    """What happened between one unit and one decode. `failures` are in a row."""

    served_at: float = 0.0
    tried_at: float = 0.0
    failures: int = 0
    failed_at: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class UnitSeen:
    """A unit's history. `failures` are in a row, with whatever decode, the first of them at `failing_since`; `open` is
    why its last probe said nothing."""

    pairs: Mapping[str, Tried] = field(default_factory=dict)
    failures: int = 0
    failing_since: float = 0.0
    silent: int = 0
    ended_at: float = 0.0
    served_at: float = 0.0
    open: str = ""


History = Mapping[tuple[str, int], UnitSeen]


def remember(history: History, results: Iterable[ProbeResult]) -> dict[tuple[str, int], UnitSeen]:
    """The history with these results."""
    after = dict(history)
    for result in results:
        key = (result.request.prefill.incarnation, result.request.dp_rank)
        after[key] = _after(after.get(key, UnitSeen()), result)
    return after


def _after(seen: UnitSeen, result: ProbeResult) -> UnitSeen:
    decode = result.request.decode.incarnation
    tried = replace(seen.pairs.get(decode, Tried()), tried_at=result.at)
    if result.outcome is ProbeOutcome.SERVED:
        tried = Tried(served_at=result.at, tried_at=result.at)
        seen = replace(seen, failures=0, failing_since=0.0, silent=0, ended_at=result.at, served_at=result.at, open="")
    elif result.outcome.evidence:
        tried = replace(tried, failures=tried.failures + 1, failed_at=result.at, message=result.message)
        since = seen.failing_since if seen.failures else result.at
        seen = replace(seen, failures=seen.failures + 1, failing_since=since, silent=0, ended_at=result.at, open="")
    else:
        seen = replace(seen, silent=seen.silent + 1, ended_at=result.at, open=result.message)
    return replace(seen, pairs={**seen.pairs, decode: tried})


def forget(history: History, units: Iterable[Unit], decodes: Mapping[str, tuple[ProbeEnd, ...]]) -> History:
    """The history without units and decodes that are gone or started again."""
    here = {u.key for u in units}
    there = {d.incarnation for group in decodes.values() for d in group}
    return {
        key: replace(seen, pairs={d: t for d, t in seen.pairs.items() if d in there})
        for key, seen in history.items()
        if key in here
    }


def _pause(failures: int, interval: float, settings: DecideSettings) -> float:
    """Seconds until the next probe after so many in a row that did not serve."""
    if not failures:
        return interval
    wait = settings.probe_retry_seconds * 2.0 ** min(failures - 1, 16)
    return min(interval, wait)


def due_probes(
    units: Iterable[Unit],
    decodes: Mapping[str, tuple[ProbeEnd, ...]],
    history: History,
    running: Iterable[StartProbe],
    interval: float,
    now: float,
    settings: DecideSettings,
) -> tuple[StartProbe, ...]:
    """Probes to start now: never two of one prefill pod at once, and not more than the settings allow in all.

    A unit is due after `interval` seconds (earlier after a failure), and at once for a decode that nobody served yet
    or that another unit fails with: that shows whose fault it is.
    `decodes` are those of each island."""
    running = tuple(running)
    busy = {p.prefill.incarnation for p in running}
    asked = {p.decode.incarnation for p in running}
    left = max(0, settings.probes_at_once - len(running))
    out: list[StartProbe] = []
    # One that hangs now must not be given every prefill of the fleet.
    units = list(units)
    wanted = (_unserved(decodes, history, interval, now, settings) | _doubted(units, history)) - asked
    for unit in sorted(units, key=lambda u: (history.get(u.key, UnitSeen()).ended_at, u.prefill.name, u.dp_rank)):
        partners = decodes.get(unit.island, ())
        if unit.prefill.incarnation in busy or not partners or len(out) >= left:
            continue
        seen = history.get(unit.key, UnitSeen())
        missing = [d for d in partners if d.incarnation in wanted]
        first = not seen.ended_at
        late = now >= seen.ended_at + _pause(seen.failures or seen.silent, interval, settings)
        # A rank that fails is no help to find out about a decode.
        if not (first or late or (missing and not seen.failures and not seen.silent)):
            continue
        decode = _partner(seen, partners, missing, asked, history)
        wanted.discard(decode.incarnation)
        asked.add(decode.incarnation)
        busy.add(unit.prefill.incarnation)
        out.append(StartProbe(unit.prefill, decode, unit.dp_rank, unit.dp_size, settings.probe_deadline_seconds))
    return tuple(out)


def _unserved(
    decodes: Mapping[str, tuple[ProbeEnd, ...]], history: History, interval: float, now: float, settings: DecideSettings
) -> set[str]:
    """Decodes that no unit served yet and whose pause is over."""
    found = set()
    for group in decodes.values():
        for decode in group:
            tried = _tried(history, decode.incarnation)
            if any(t.served_at for t in tried):
                continue
            failures = sum(t.failures for t in tried)
            if now >= max((t.tried_at for t in tried), default=0.0) + (
                _pause(failures or 1, interval, settings) if tried else 0.0
            ):
                found.add(decode.incarnation)
    return found


def _doubted(units: Iterable[Unit], history: History) -> set[str]:
    """Decodes that a unit fails with and that no other one has tried since."""
    found = set()
    for unit in units:
        seen = history.get(unit.key, UnitSeen())
        others = [s for key, s in history.items() if key != unit.key]
        found |= {
            decode
            for decode, tried in seen.pairs.items()
            if seen.failures
            and tried.failed_at >= seen.failing_since
            and not any(s.pairs.get(decode, Tried()).tried_at >= seen.failing_since for s in others)
        }
    return found


def _tried(history: History, decode: str) -> list[Tried]:
    return [seen.pairs[decode] for seen in history.values() if decode in seen.pairs]


def _partner(
    seen: UnitSeen, partners: Iterable[ProbeEnd], missing: list[ProbeEnd], asked: set[str], history: History
) -> ProbeEnd:
    """The decode to try: one that works for others where this unit fails, so that it shows whose fault it is; else
    one that nobody served; else one that is not `asked` now, and was tried longest ago."""
    served = {d.incarnation for d in partners if any(t.served_at for t in _tried(history, d.incarnation))}

    def order(decode: ProbeEnd) -> tuple[bool, bool, float, str]:
        busy = decode.incarnation in asked
        tried = seen.pairs.get(decode.incarnation, Tried())
        if seen.failures:
            return decode.incarnation not in served, busy, tried.tried_at, decode.name
        return decode not in missing, busy, tried.tried_at, decode.name

    return min(partners, key=order)
