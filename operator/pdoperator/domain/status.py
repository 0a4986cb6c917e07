"""The whole status subresource from the picture of one look; None where nothing changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import RouterType
from pdoperator.api.status import (
    BackoffStatus,
    CertificateStatus,
    EffectiveStatus,
    IslandStatus,
    PDClusterStatus,
    RevisionCount,
    RoleStatus,
    RosterKeyStatus,
    RouterStatus,
    Summary,
    VerificationStatus,
    WarningStatus,
    WiredPairs,
    parse_timestamp,
    timestamp,
)
from pdoperator.domain import incarnations
from pdoperator.domain.actions import PodBackoff
from pdoperator.domain.condition import Aspect, roll_up, to_conditions
from pdoperator.domain.engine_status import current_cards, engine_status
from pdoperator.domain.lastwords import one_line
from pdoperator.domain.picture import Picture
from pdoperator.domain.routing import listed_everywhere
from pdoperator.domain.verification import Verification
from pdoperator.domain.words import rate
from pdtransfer.contract.base import Role, content_hash


def read_backoff(status: dict[str, Any]) -> dict[str, PodBackoff]:
    """Recreation history out of status; entries that can't be read are dropped."""
    found: dict[str, PodBackoff] = {}
    for entry in status.get("backoff") or ():
        try:
            due = parse_timestamp(entry["notBefore"]) if entry.get("notBefore") else 0.0
            key = f"{Role(entry['role']).value}-{int(entry['replica'])}"
            found[key] = PodBackoff(int(entry.get("failures", 0)), due, str(entry.get("lastExit", "")))
        except (KeyError, ValueError, TypeError):
            continue
    return found


def _write_backoff(backoff: dict[str, PodBackoff]) -> tuple[BackoffStatus, ...]:
    out = []
    for key, b in sorted(backoff.items()):
        role, _, replica = key.partition("-")
        out.append(
            BackoffStatus(
                role=role,
                replica=int(replica),
                failures=b.failures,
                not_before=timestamp(b.not_before) if b.not_before else None,
                last_exit=b.last_exit[:1000],
            )
        )
    return tuple(out)


def _role(pic: Picture, role: Role) -> RoleStatus:
    pods = pic.side(role)
    ready = {p.uid for p in pic.ready(role)}
    by_revision = Counter(p.revision for p in pods)
    return RoleStatus(
        wanted=pic.wanted[role],
        launched=len({p.replica for p in pods}),
        ready=len({p.replica for p in pic.ready(role)}),
        wired=len({p.replica for p in pods if p.uid in pic.gates.ready}) if pic.managed else 0,
        by_revision=tuple(
            RevisionCount(revision=r, pods=n, ready=sum(1 for p in pods if p.revision == r and p.uid in ready))
            for r, n in sorted(by_revision.items())
        ),
        engine=engine_status(pic.spec, role, current_cards(pic, role)),
    )


def _effective(pic: Picture) -> EffectiveStatus | None:
    sides = {role: next(iter(pic.view.side(role)), None) for role in Role}
    first = sides[Role.PREFILL] or sides[Role.DECODE]
    if first is None:
        return None
    card = first.cards.cards[0]

    def tensor_parallel(role: Role) -> int | None:
        peer = sides[role]
        if peer is None:
            return None
        at = peer.cards.cards[0].layout.coordinates
        return at.tp_size * at.dp_size * at.cp_size

    def memory(role: Role) -> str | None:
        peer = sides[role]
        if peer is None:
            return None
        kinds = sorted({k.value for c in peer.cards.cards for k in c.layout.memory_kinds})
        mark = " (emulated)" if any(c.layout.emulated_vram for c in peer.cards.cards) else ""
        return "+".join(kinds) + mark

    return EffectiveStatus(
        page_size=card.layout.page_tokens,
        kv_dtype=card.layout.kv_dtype,
        engine=card.engine.type.value,
        engine_version=card.engine.version,
        backend=card.engine.backend.value + (" (emulated)" if card.engine.backend_emulated else ""),
        model_name=card.model.name[:250],
        prefill_tensor_parallel=tensor_parallel(Role.PREFILL),
        decode_tensor_parallel=tensor_parallel(Role.DECODE),
        prefill_memory=memory(Role.PREFILL),
        decode_memory=memory(Role.DECODE),
    )


def _warnings(pic: Picture) -> tuple[WarningStatus, ...]:
    rows: dict[tuple[str, str], WarningStatus] = {}
    for f in pic.warnings:
        rows.setdefault((f.rule, f.message), WarningStatus(rule=f.rule, message=f.message, action=f.action))
    for r in pic.view.refusals:
        text = f"{r.pod.name}: {one_line(r.message, 1000)}"
        rows.setdefault((r.reason.value, text), WarningStatus(rule=r.reason.value, message=text))
    return tuple(rows.values())[:64]


def _islands(pic: Picture) -> tuple[IslandStatus, ...]:
    rows: dict[str, list[Any]] = {}
    for pod in pic.pods:
        island = pic.gates.island.get(pod.uid)
        if island:
            rows.setdefault(island, []).append(pod)
    return tuple(
        IslandStatus(
            name=name,
            revisions=tuple(sorted({p.revision for p in pods})),
            prefill=sum(1 for p in pods if p.role == Role.PREFILL.value and p.uid in pic.gates.ready),
            decode=sum(1 for p in pods if p.role == Role.DECODE.value and p.uid in pic.gates.ready),
        )
        for name, pods in sorted(rows.items())
    )


def _router(pic: Picture) -> RouterStatus | None:
    if pic.spec is None or pic.spec.router.type is not RouterType.SMG:
        return None
    cluster = pic.observed.cluster
    return RouterStatus(
        wanted=pic.spec.router.replicas,
        ready=sum(1 for r in pic.observed.routers if r.pod.ready and not r.pod.deleting),
        workers=len(listed_everywhere(pic.observed)),
        endpoint=f"http://{names.router_name(cluster.name)}.{cluster.namespace}:{names.PORT_ROUTER_HTTP}",
    )


def _verification(pic: Picture, proof: Verification) -> VerificationStatus | None:
    if not proof.proven:
        return None
    fresh = VerificationStatus(
        bytes=proof.bytes,
        seconds=proof.seconds,
        bandwidth=int(proof.bandwidth),
        transport=proof.transport[:250],
        evidence=proof.evidence,
        emulated=proof.emulated,
        when=timestamp(proof.at) if proof.at else None,
        pairs=proof.proven,
    )
    try:
        old = VerificationStatus.model_validate(pic.observed.cluster.status.get("verification"))
    except ValueError:
        return fresh
    # Probes are repeated; a proof of the same pairs over the same transport is news only now and then.
    alike = (old.pairs, old.transport, old.evidence, old.emulated) == (
        fresh.pairs,
        fresh.transport,
        fresh.evidence,
        fresh.emulated,
    )
    age = proof.at - parse_timestamp(old.when) if old.when else REFRESH_SECONDS
    return old if alike and 0 <= age < REFRESH_SECONDS else fresh


REFRESH_SECONDS = 30.0


def build_status(pic: Picture, aspects: list[Aspect], proof: Verification) -> dict[str, Any]:
    """The status to apply."""
    cluster = pic.observed.cluster
    ready = roll_up(aspects)
    roles = {role: _role(pic, role) for role in Role}
    shown = _verification(pic, proof)
    seen = [(p.cards.roster_term, p.cards.roster_counter) for p in pic.view.peers if p.cards.roster_counter]
    seen += [(put.roster.key.term, put.roster.key.counter) for put in pic.wiring.puts]
    seen += _old_key(cluster.status)
    key = max(seen, default=None)
    wired = len(pic.ready_links())
    wanted = pic.wanted[Role.PREFILL] * pic.wanted[Role.DECODE]
    verified = ""
    if shown is not None:
        mark = " (emulated)" if shown.emulated else ""
        verified = f"{rate(shown.bandwidth)} {shown.transport or 'unknown'}{mark}"
    elif pic.real is not None and pic.real.proof.complete:
        verified = "by request"
    status = PDClusterStatus(
        observed_generation=cluster.generation,
        conditions=to_conditions(
            [ready, *aspects], cluster.status.get("conditions") or (), cluster.generation, pic.observed.now
        ),
        summary=Summary(
            prefill=f"{roles[Role.PREFILL].ready}/{roles[Role.PREFILL].wanted}",
            decode=f"{roles[Role.DECODE].ready}/{roles[Role.DECODE].wanted}",
            wired=f"{wired}/{wanted}" if pic.managed else "",
            verified=verified[:250],
        ),
        revision=content_hash([pic.revisions[r] for r in Role])[:8] if pic.revisions else None,
        prefill=roles[Role.PREFILL],
        decode=roles[Role.DECODE],
        wired=WiredPairs(wired=wired, wanted=wanted) if pic.managed else None,
        roster_key=RosterKeyStatus(term=key[0], counter=key[1]) if key else None,
        verification=shown,
        warnings=_warnings(pic),
        effective=_effective(pic),
        islands=_islands(pic),
        router=_router(pic),
        incarnations=incarnations.kept(pic) or None,
        certificates=_certificates(pic),
        backoff=_write_backoff(pic.plan.backoff),
    )
    return status.to_dict()


def _certificates(pic: Picture) -> CertificateStatus | None:
    """As written when the certificate was issued (its fingerprint is known to the issuer only)."""
    try:
        return CertificateStatus.model_validate(pic.observed.cluster.status.get("certificates"))
    except ValueError:
        end = pic.observed.certificate_not_after
        return CertificateStatus(not_after=timestamp(end)) if end else None


def _old_key(status: dict[str, Any]) -> list[tuple[int, int]]:
    old = status.get("rosterKey") or {}
    try:
        return [(int(old["term"]), int(old["counter"]))]
    except (KeyError, TypeError, ValueError):
        return []


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal, whatever empty fields the API server added or dropped."""
    try:
        return PDClusterStatus.model_validate(a) == PDClusterStatus.model_validate(b)
    except ValueError:
        return a == b
