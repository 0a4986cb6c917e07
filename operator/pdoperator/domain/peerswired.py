"""PeersWired: who is wired to whom, and where not, what the ranks found out and what to do about it."""

from __future__ import annotations

from pdoperator.api import names
from pdoperator.api.conditions import ConditionType, Reason
from pdoperator.domain.condition import Aspect, no, unknown, yes
from pdoperator.domain.lastwords import one_line
from pdoperator.domain.links import Link, LinkState
from pdoperator.domain.picture import Picture
from pdoperator.domain.view import Peer, Refusal
from pdoperator.domain.words import count
from pdtransfer.contract.base import Role
from pdtransfer.contract.card import RankCard

_KIND = ConditionType.PEERS_WIRED
_SHOWN = 400


def peers_wired(pic: Picture) -> Aspect:
    """Is every wanted replica wired to every partner?"""
    if not pic.managed:
        return unknown(
            _KIND,
            Reason.NOT_MANAGED,
            "the transfer backend finds its peers by itself and does not report them",
            required=False,
        )
    if pic.spec is None and not pic.pods:
        return unknown(_KIND, Reason.INVALID_SPEC, "the spec can not be read, and no pod runs")
    inside = {role: {p.replica for p in pic.side(role) if p.uid in pic.gates.ready} for role in Role}
    unreached = _unreached(pic)
    if unreached is not None:
        return unreached
    if pic.wiring.held:
        return unknown(_KIND, Reason.OPERATOR_CANNOT_REACH_PODS, f"rosters are held back: {pic.wiring.held}")
    if all(len(inside[role]) >= pic.wanted[role] for role in Role):
        return yes(
            _KIND, Reason.WIRED, f"{count(len(pic.ready_links()), 'pair')} of pods wired, confirmed by both sides"
        )
    counts = ", ".join(f"{len(inside[role])} of {pic.wanted[role]} {role.value}" for role in Role)
    # One that could not be asked was told above, or it has only just started.
    refused = [r for r in pic.view.refusals if not r.pod.deleting and r.reason is not Reason.OPERATOR_CANNOT_REACH_PODS]
    if refused:
        first = min(refused, key=lambda r: (not r.stale, r.pod.name))
        return no(_KIND, first.reason, f"wired: {counts}. {first.pod.name}: {_refusal(first)}")
    broken = first_broken(pic)
    if broken is not None:
        return no(_KIND, broken[0], f"wired: {counts}. {broken[1]}")
    lost = sorted(p.name for p in pic.pods if pic.gates.reasons.get(p.uid, (None,))[0] is Reason.RANK_LOST)
    if lost:
        return no(_KIND, Reason.RANK_LOST, f"wired: {counts}. {lost[0]} no longer shows every rank.")
    some = all(inside[role] for role in Role)
    waits = _waits(pic)
    return no(
        _KIND, Reason.PARTLY_WIRED if some else Reason.WIRING, f"wired: {counts}" + (f"; {waits}" if waits else "")
    )


def _unreached(pic: Picture) -> Aspect | None:
    """The operator can not ask some pod; that says nothing about what its peers can."""
    told = {r.pod.uid: r.reason for r in pic.view.refusals}
    # A sidecar that has just started does not listen for a second: no news while the engine loads anyway.
    pods = [
        p
        for p in pic.view.unreachable
        if not p.deleting and (p.engine_is_ready or p.kv_wired == "True" or told.get(p.uid) is Reason.WRONG_CERTIFICATE)
    ]
    if not pods:
        return None
    first = pods[0]
    refusal = next((r for r in pic.view.refusals if r.pod.uid == first.uid), None)
    if refusal is not None and refusal.reason is Reason.WRONG_CERTIFICATE:
        return unknown(_KIND, Reason.WRONG_CERTIFICATE, f"{first.name}: {_refusal(refusal)}{_certificate_hint(pic)}")
    why = refusal.message if refusal else "its sidecar is not running"
    named = ", ".join(p.name for p in pods[:5]) + (f" and {len(pods) - 5} more" if len(pods) > 5 else "")
    held = " Their gates stay as they are." if all(p.uid in pic.gates.ready for p in pods) else ""
    return unknown(
        _KIND,
        refusal.reason if refusal else Reason.OPERATOR_CANNOT_REACH_PODS,
        f"the operator can not reach {named} ({why}).{held} See kubectl logs {first.name} -c "
        f"{names.CONTAINER_SIDECAR}; check the NetworkPolicy and port {names.PORT_SIDECAR_CONTROL}.",
    )


def _certificate_hint(pic: Picture) -> str:
    name = names.tls_secret_name(pic.observed.cluster.name)
    return (
        f". The operator writes Secret {name} again, which reaches a running pod within about a minute. If this stays, "
        "something else writes that Secret, or the pod runs another image's sidecar: delete the pod."
    )


def _refusal(refusal: Refusal) -> str:
    text = one_line(refusal.message, _SHOWN)
    if refusal.reason is Reason.INVALID_CARD:
        return (
            f"{text}. Such a pod is never wired. Engine and sidecar may be of different versions: check "
            "spec.engine.image and spec.transfer.image, and the engine's log."
        )
    return text


def first_broken(pic: Picture) -> tuple[Reason, str] | None:
    """The first pair of ranks that told something against its link, with the verdict's own reason."""
    for state, reason in (
        (LinkState.REFUSED, Reason.PEERS_REFUSED),
        (LinkState.UNREACHABLE, Reason.PEERS_UNREACHABLE),
    ):
        bad = [link for _, link in sorted(pic.links.items(), key=_order) if link.state is state]
        if bad:
            first = bad[0]
            more = f" ({count(len(bad) - 1, 'other pair')} of pods likewise)" if len(bad) > 1 else ""
            return reason, f"{pair_text(first)}: {one_line(first.message, _SHOWN)}{more}.{_action(first)}"
    return _strangers(pic)


def _order(item: tuple[tuple[str, str], Link]) -> tuple[int, int]:
    return item[1].prefill.replica, item[1].decode.replica


def pair_text(link: Link) -> str:
    """`prefill-0 rank 0 and decode-0 rank 1`; without ranks where no single pair of ranks is meant."""
    if link.ranks is None:
        return f"{link.prefill.name} and {link.decode.name}"
    return f"{link.prefill.name} rank {link.ranks[0]} and {link.decode.name} rank {link.ranks[1]}"


_ACTIONS = {
    "TLSFailed": "One of them holds a certificate that the other does not accept: see that nothing but the operator "
    "writes the pods' TLS Secret, or delete the pod that was started last.",
    "PeerUnreachable": "Check that pods reach each other on every port (NetworkPolicy, firewall, hostNetwork), and "
    "both engines' logs.",
    "PeerNotRostered": "The two hold different rosters; this heals with the next roster.",
    "LayoutMismatch": "Both roles must serve the same model, revision, KV dtype and page size.",
    "ChecksumMismatch": "Bytes changed on their way: suspect the NIC, its driver or UCX settings in env.",
    "AgentError": "See that engine's log; often UCX_TLS or UCX_NET_DEVICES in env name what the pod does not have.",
    "DeadlineExceeded": "The connection stands but bytes do not arrive: check MTU, firewall and UCX_NET_DEVICES.",
}


def _action(link: Link) -> str:
    hint = _ACTIONS.get(link.reason, "")
    return f" {hint}" if hint else ""


def _strangers(pic: Picture) -> tuple[Reason, str] | None:
    """Prefill and decode both there, and no pair that could be wired: they serve different things."""
    sides = {role: [p for p in pic.view.side(role) if not p.pod.deleting] for role in Role}
    if pic.links or not all(sides.values()):
        return None
    p, d = sides[Role.PREFILL][0], sides[Role.DECODE][0]
    return (
        Reason.PEERS_REFUSED,
        f"{p.pod.name} and {d.pod.name}: FingerprintMismatch: they differ in {_differences(p, d)}. Both roles must "
        "serve the same model, KV dtype and page size with the same engine.",
    )


def _differences(p: Peer, d: Peer) -> str:
    a, b = _facts(p.cards.cards[0]), _facts(d.cards.cards[0])
    told = [f"{key} ({a[key]} and {b[key]})" for key in a if a[key] != b[key]]
    return one_line(", ".join(told[:4])) if told else "revision"


def _facts(card: RankCard) -> dict[str, str]:
    facts = {f"model {key}": str(value) for key, value in card.model.model_dump(mode="json").items()}
    return facts | {
        "KV dtype": card.layout.kv_dtype,
        "page size": str(card.layout.page_tokens),
        "engine": card.engine.type.value,
        "engine version": card.engine.version,
    }


def _waits(pic: Picture) -> str:
    """What is waited for, where nothing is wrong yet."""
    for role in Role:
        starting = sorted(p.name for p in pic.side(role) if not p.engine_is_ready)
        if starting:
            return f"{starting[0]} is not up yet"
        if not pic.side(role) and pic.wanted[role]:
            return f"no {role.value} pod is there"
    pending = [link for _, link in sorted(pic.links.items(), key=_order) if link.state is not LinkState.GOOD]
    return f"{pair_text(pending[0])}: {one_line(pending[0].message)}" if pending else ""
