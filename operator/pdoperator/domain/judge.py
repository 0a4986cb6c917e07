"""The conditions below Ready, each from the picture of one look. Messages say what to do."""

from __future__ import annotations

from pdoperator.api.conditions import ConditionStatus, ConditionType, Reason
from pdoperator.api.quantities import parse_quantity
from pdoperator.api.status import parse_timestamp, timestamp
from pdoperator.domain.apirefusal import refusal_reason, refusal_text
from pdoperator.domain.condition import Aspect, no, old_condition, unknown, yes
from pdoperator.domain.fabric import fabric_ready
from pdoperator.domain.lastwords import bounded
from pdoperator.domain.peerswired import peers_wired
from pdoperator.domain.picture import Picture
from pdoperator.domain.poddiagnosis import worst
from pdoperator.domain.realproof import RealProof, verified_by_requests
from pdoperator.domain.routerready import router_ready
from pdoperator.domain.verification import Verification
from pdoperator.domain.view import FAILED_PHASES
from pdoperator.domain.words import count, rate
from pdtransfer.contract.base import EngineType, Role

_ROLE_KIND = {Role.PREFILL: ConditionType.PREFILL_READY, Role.DECODE: ConditionType.DECODE_READY}


def compatible(pic: Picture) -> Aspect:
    """Does prefill fit decode?"""
    kind = ConditionType.COMPATIBLE
    cluster = pic.observed.cluster
    if pic.spec is None or pic.preflight is None:
        return no(
            kind,
            Reason.INVALID_SPEC,
            f"the spec can not be read: {bounded(cluster.spec_error, 1000)}. Correct it; where the CRD is of another "
            "version than the operator, upgrade both. Nothing new is launched; what runs is left alone.",
        )
    failures = pic.preflight.of("Fail")
    if failures:
        return no(
            kind,
            Reason.DOES_NOT_FIT,
            " ".join(f.text for f in failures[:5])
            + (f" And {len(failures) - 5} more." if len(failures) > 5 else "")
            + " Nothing new is launched; what runs is left alone.",
        )
    failed = [f for f in pic.card_findings if f.status == "Fail"]
    if failed:
        return no(
            kind,
            Reason.DOES_NOT_FIT,
            "the running engines do not fit: " + " ".join(f.text for f in failed[:5]) + " They are not wired.",
        )
    unknown_facts = pic.preflight.of("Unknown")
    if unknown_facts and pic.managed and not pic.cards_decided:
        return unknown(
            kind,
            Reason.WAITING_FOR_CARDS,
            f"{count(len(unknown_facts), 'rule')} waiting for facts that the spec does not tell (first: "
            f"{unknown_facts[0].rule}: {unknown_facts[0].message}); nothing is wired before the ranks' cards decide",
        )
    warned = len(pic.warnings)
    if warned or (unknown_facts and not pic.managed):
        open_facts = (
            f", {count(len(unknown_facts), 'rule')} could not be decided" if unknown_facts and not pic.managed else ""
        )
        return yes(
            kind,
            Reason.FITS_WITH_WARNINGS,
            f"prefill and decode fit, with {count(warned, 'warning')} (see status.warnings){open_facts}",
        )
    return yes(kind, Reason.FITS, "prefill and decode fit")


def role_ready(pic: Picture, role: Role) -> Aspect:
    """Are all replicas of a role serving?"""
    kind = _ROLE_KIND[role]
    wanted = pic.wanted[role]
    pods = pic.side(role)
    ready = len({p.replica for p in pic.ready(role)})
    if wanted == 0 and pic.spec is None:
        return unknown(kind, Reason.INVALID_SPEC, "the spec can not be read, and no pod runs")
    if wanted == 0:
        return yes(kind, Reason.NOT_REQUIRED, f"no {role.value} replica is asked for")
    if ready >= wanted:
        old = sum(1 for p in pic.ready(role) if p.revision != pic.revisions.get(role, p.revision))
        tail = f", {old} of them still at an older revision" if old else ""
        return yes(kind, Reason.PODS_READY, f"{ready} of {wanted} {role.value} replicas ready{tail}")
    head = f"{ready} of {wanted} {role.value} replicas ready"
    failed = [p for p in pic.observed.pods if p.role == role.value and not p.deleting and p.phase in FAILED_PHASES]
    found = worst([*pods, *failed], pic.gates.ready, pic.gates.reasons, pic.managed, pic.observed.now)
    if found is not None:
        return no(kind, found[0], f"{head}: {found[1]}")
    waiting = [
        b for key, b in pic.plan.backoff.items() if key.startswith(role.value) and b.not_before > pic.observed.now
    ]
    if waiting:
        return no(
            kind,
            Reason.CRASHING,
            f"{head}: the next attempt is due at {timestamp(waiting[0].not_before)} after "
            f"{count(waiting[0].failures, 'failure')}; last: {waiting[0].last_exit or 'unknown'}",
        )
    if not pic.may_launch:
        return no(kind, Reason.NOT_LAUNCHED, f"{head}: nothing is launched, see Compatible")
    if pic.observed.api_error:
        return no(
            kind,
            refusal_reason(pic.observed.api_error_reason),
            f"{head}: {_refused(pic)}",
        )
    return no(kind, Reason.LAUNCHING, f"{head}: being launched")


def verified(pic: Picture, proof: Verification) -> Aspect:
    """Did KV really move between every ready pair?"""
    kind = ConditionType.KV_TRANSFER_VERIFIED
    if not pic.managed:
        proof_by_request = pic.real.proof if pic.real else RealProof()
        backend = pic.spec.transfer.backend.value if pic.spec else ""
        emulated = pic.spec is not None and pic.spec.engine.type is EngineType.REFERENCE
        cluster = pic.observed.cluster
        was = old_condition(cluster.status, kind)
        same = was.get("status") == ConditionStatus.TRUE.value and was.get("observedGeneration") == cluster.generation
        return verified_by_requests(proof_by_request, backend, emulated, str(was.get("message", "")) if same else "")
    if proof.failed:
        return no(kind, Reason.VERIFICATION_FAILED, f"{proof.failed}. Look at both pods' logs and the fabric.")
    if proof.pairs == 0:
        return unknown(kind, Reason.NOT_OBSERVED_YET, "no pair is wired yet")
    if proof.proven < proof.pairs:
        return unknown(
            kind, Reason.VERIFYING, f"{proof.proven} of {count(proof.pairs, 'pair')} proven by moved and checked bytes"
        )
    if pic.spec is not None and pic.spec.transfer.verification.min_bandwidth:
        least = float(parse_quantity(pic.spec.transfer.verification.min_bandwidth))
        if proof.bandwidth < least:
            return no(
                kind,
                Reason.BELOW_MIN_BANDWIDTH,
                f"{proof.slowest} moved {rate(proof.bandwidth)}, less than minBandwidth {rate(least)}, "
                f"over {proof.transport or 'an unknown transport'}",
            )
    return yes(
        kind,
        Reason.VERIFIED,
        f"{count(proof.proven, 'pair')} of pods moved {proof.bytes} bytes with matching checksums, slowest {proof.text}"
        + ("; device memory is emulated on host memory" if proof.emulated else ""),
    )


def progressing(pic: Picture) -> Aspect:
    """Is anything under way, or in the way?"""
    kind = ConditionType.PROGRESSING
    observed = pic.observed
    if observed.api_error:
        reason = refusal_reason(observed.api_error_reason)
        return no(
            kind,
            reason,
            f"the API server refused a change: {_refused(pic)}",
        )
    if not pic.may_launch:
        return no(kind, Reason.BLOCKED, "nothing is launched, see Compatible", required=False)
    if pic.plan.blocked:
        return no(kind, Reason.BLOCKED, pic.plan.blocked, required=False)
    if pic.plan.waiting_until > observed.now:
        return no(
            kind,
            Reason.BACKING_OFF,
            f"a failed replica is launched again at {timestamp(pic.plan.waiting_until)}",
            required=False,
        )
    limit = pic.spec.rollout.progress_deadline_seconds if pic.spec else 0
    overdue = [role for role in Role if _unready_for(pic, role) > limit]
    if overdue:
        which = " and ".join(role.value for role in overdue)
        where = " and ".join(_ROLE_KIND[role].value for role in overdue)
        verb = "has" if len(overdue) == 1 else "have"
        return no(
            kind,
            Reason.BLOCKED,
            f"{which} {verb} not become ready within {limit} s (see {where})",
            required=False,
        )
    if pic.plan.rolling or pic.plan.leaving:
        left = [f"{count(pic.plan.rolling, 'replica')} to bring to the current revision"] * bool(pic.plan.rolling)
        left += [f"{count(len(pic.plan.leaving), 'pod')} leaving"] * bool(pic.plan.leaving)
        return yes(kind, Reason.ROLLING, ", ".join(left), required=False)
    if any(len(pic.ready(r)) < pic.wanted[r] for r in Role):
        counts = ", ".join(f"{len(pic.ready(r))} of {pic.wanted[r]} {r.value}" for r in Role)
        new = len(pic.plan.creates)
        what = f"{count(new, 'pod')} being launched" if new else "all pods are launched"
        return yes(kind, Reason.LAUNCHING, f"{what}; ready: {counts}", required=False)
    return yes(kind, Reason.STABLE, "nothing is under way", required=False)


def _unready_for(pic: Picture, role: Role) -> float:
    """Seconds since which a role lacks ready replicas, as status knows it; 0 where it lacks none."""
    was = old_condition(pic.observed.cluster.status, _ROLE_KIND[role])
    if was.get("status") != ConditionStatus.FALSE.value or len(pic.ready(role)) >= pic.wanted[role]:
        return 0.0
    try:
        return pic.observed.now - parse_timestamp(str(was.get("lastTransitionTime")))
    except ValueError:
        return 0.0


def _refused(pic: Picture) -> str:
    return refusal_text(pic.observed.api_error, pic.observed.api_error_reason)


def all_aspects(pic: Picture, proof: Verification) -> list[Aspect]:
    """Every condition but Ready, in the order of the rollup."""
    if pic.spec is not None:
        fabric = fabric_ready(pic.observed, pic.spec, pic.view, proof)
    else:
        fabric = unknown(ConditionType.FABRIC_READY, Reason.INVALID_SPEC, "the spec can not be read", required=False)
    return [
        compatible(pic),
        fabric,
        role_ready(pic, Role.PREFILL),
        role_ready(pic, Role.DECODE),
        peers_wired(pic),
        verified(pic, proof),
        router_ready(pic),
        progressing(pic),
    ]
