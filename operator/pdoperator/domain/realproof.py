"""What the real requests so far prove, and whose fault it is where one fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.domain.actions import ProbeEnd
from pdoperator.domain.condition import Aspect, no, unknown, yes
from pdoperator.domain.realprobe import History, Tried, Unit, UnitSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.words import count

_KIND = ConditionType.KV_TRANSFER_VERIFIED


@dataclass(frozen=True)
class RealProof:
    """Over the pods that serve. `served` of `units` prefill ranks got a request through, `met` of `decodes` answered
    one. `failed` says what is wrong and what to do, `open` why nothing can be found out."""

    units: int = 0
    served: int = 0
    decodes: int = 0
    met: int = 0
    reason: Reason = Reason.VERIFICATION_FAILED
    failed: str = ""
    open: str = ""
    doubted: bool = False
    """The last request of some prefill rank failed."""

    @property
    def complete(self) -> bool:
        """Every prefill rank and every decode pod took part in a request that was served."""
        return 0 < self.units == self.served and self.decodes == self.met and not self.failed


def prove(
    units: Iterable[Unit],
    decodes: Mapping[str, tuple[ProbeEnd, ...]],
    history: History,
    settings: DecideSettings,
    *,
    recycles: bool = False,
) -> RealProof:
    """Add up the history of these units. `recycles`: the operator replaces a prefill pod that keeps failing."""
    units = [u for u in units if decodes.get(u.island)]
    ends = [d for island in {u.island for u in units} for d in decodes[island]]
    seen = {u.key: history.get(u.key, UnitSeen()) for u in units}
    limit = settings.probe_failures
    failing = [u for u in units if seen[u.key].failures >= limit]
    healthy = {u.key for u in units if seen[u.key].served_at and seen[u.key].failures < limit}
    pairs = {
        d.incarnation: {k: s.pairs[d.incarnation] for k, s in seen.items() if d.incarnation in s.pairs} for d in ends
    }
    met = {d.incarnation for d in ends if any(t.served_at for t in pairs[d.incarnation].values())}
    # Failures since the decode last answered anybody.
    deaf = [d for d in ends if _failures(pairs[d.incarnation].values()) >= limit]
    reason, failed = Reason.VERIFICATION_FAILED, ""
    if failing:
        first = failing[0]
        others = {u.prefill.uid for u in units if u.key in healthy and u.island == first.island}
        # The last one that serves stays.
        heals = recycles and bool(others - {first.prefill.uid})
        cure = (
            f"the operator replaces the pod after {settings.recycle_failures} over {settings.recycle_seconds:g} s"
            if heals
            else f"only a restart repairs that: look at its log, then delete pod {first.prefill.name}"
        )
        reason, failed = _prefill(first, seen[first.key], ends, healthy, pairs, cure)
    elif deaf:
        reason, failed = _decode(deaf[0], pairs[deaf[0].incarnation])
    open_ = [u for u in units if seen[u.key].open and (not seen[u.key].served_at or len(met) < len(ends))]
    return RealProof(
        units=len(units),
        served=len(healthy),
        decodes=len(ends),
        met=len(met),
        reason=reason,
        failed=failed,
        doubted=any(s.failures for s in seen.values()),
        open=f"{open_[0].label}: {seen[open_[0].key].open}" if open_ else "",
    )


def _failures(tried: Iterable[Tried]) -> int:
    tried = list(tried)
    newest = max((t.served_at for t in tried), default=0.0)
    return sum(t.failures for t in tried if t.tried_at > newest)


def _prefill(
    unit: Unit,
    seen: UnitSeen,
    ends: list[ProbeEnd],
    healthy: set[tuple[str, int]],
    pairs: Mapping[str, Mapping[tuple[str, int], Tried]],
    cure: str,
) -> tuple[Reason, str]:
    """Of a prefill rank that serves nobody any more. It is its own fault where a decode that it failed with got KV
    from another rank."""
    with_ = [d for d in ends if seen.pairs.get(d.incarnation, Tried()).failures]
    last = max(with_, key=lambda d: seen.pairs[d.incarnation].tried_at, default=None)
    told = f"{count(seen.failures, 'real request')} in a row failed"
    what = seen.pairs[last.incarnation].message if last else ""
    names = ", ".join(d.name for d in with_[:3])
    works = next((d for d in with_ if any(k in healthy and t.served_at for k, t in pairs[d.incarnation].items())), None)
    if works is not None:
        return (
            Reason.PREFILL_DOES_NOT_SEND,
            f"prefill {unit.label}: {told} (with {names}; last: {what}), while {works.name} gets KV from another "
            f"prefill. Its bootstrap thread may have ended with /health still green; {cure}",
        )
    return (
        Reason.REQUEST_FAILED,
        f"prefill {unit.label} to decode {names}: {told} (last: {what}). Users' requests to them fail or hang as well. "
        "Look at both logs, and whether the pods reach each other on all ports; where a bootstrap thread has ended, "
        f"only a restart repairs it: delete pod {unit.prefill.name}",
    )


def _decode(decode: ProbeEnd, pairs: Mapping[tuple[str, int], Tried]) -> tuple[Reason, str]:
    """Of a decode that gets KV from nobody, while the prefill ranks serve others."""
    last = max(pairs.values(), key=lambda t: (bool(t.failures), t.tried_at))
    return (
        Reason.DECODE_DOES_NOT_RECEIVE,
        f"decode {decode.name}: {count(_failures(pairs.values()), 'real request')} in a row failed (last: "
        f"{last.message}), while prefill serves other decodes. Look at its log, then delete pod {decode.name}",
    )


def verified_by_requests(proof: RealProof, backend: str, emulated: bool, held: str = "") -> Aspect:
    """KVTransferVerified where a backend of SGLang's own moves the KV. `held` is its message while it was True of this
    very spec ('' else): an operator that starts again, or one new pod, is no evidence against that."""
    if proof.failed:
        return no(_KIND, proof.reason, proof.failed)
    if proof.units == 0:
        return unknown(_KIND, Reason.NOT_OBSERVED_YET, "no prefill and decode pod of one revision is ready yet")
    counts = (
        f"{proof.served} of {count(proof.units, 'prefill rank')} and {proof.met} of "
        f"{count(proof.decodes, 'decode pod')} served a real request"
    )
    if not proof.complete and proof.open:
        return unknown(
            _KIND,
            Reason.CANNOT_PROBE,
            f"{counts}; {proof.open}. A request through the router is the test here",
            required=False,
        )
    if not proof.complete and held and not proof.doubted:
        return yes(_KIND, Reason.VERIFIED, held)
    if not proof.complete:
        return unknown(_KIND, Reason.VERIFYING, f"{counts} so far")
    mark = f" (the Reference engine emulates backend {backend})" if emulated else ""
    # Nothing in it changes from one request to the next: each change of a message is a write to the API server.
    return yes(
        _KIND,
        Reason.VERIFIED,
        f"{count(proof.units, 'prefill rank')} and {count(proof.decodes, 'decode pod')} served a real request, and do "
        f"so again once an interval. Backend {backend} does not tell bytes and rates{mark}",
    )
