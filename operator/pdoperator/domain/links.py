"""State of each prefill-decode pair of pods, from what both sides found out about each other.

Only verdicts for the current incarnations of both count. A pair is Good when every rank pair that
must exchange KV is Wired on both sides that answered; positive evidence against it is a Refused, an
Unreachable that lasts, or a new incarnation on one side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pdoperator.domain.observed import Observed, PodSeen
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.view import Peer, View
from pdtransfer.contract.base import Role
from pdtransfer.contract.pairing import meet
from pdtransfer.contract.verdict import PodVerdicts, Verdict, VerdictState


class LinkState(StrEnum):
    """GOOD: wired both ways. PENDING: not proven yet, nothing against it. REPLACED, REFUSED and
    UNREACHABLE: evidence against it. UNKNOWN: the operator could not ask."""

    GOOD = "Good"
    PENDING = "Pending"
    REPLACED = "Replaced"
    REFUSED = "Refused"
    UNREACHABLE = "Unreachable"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Link:
    """One pair of pods. `verdicts` are those that count."""

    prefill: PodSeen
    decode: PodSeen
    state: LinkState
    message: str = ""
    verdicts: tuple[Verdict, ...] = ()
    seen_at: float = 0.0
    """Newest time of a finding against the link."""
    reason: str = ""
    """The verdict's own reason (TLSFailed, PeerUnreachable, ChecksumMismatch ...)."""
    ranks: tuple[int, int] | None = None
    """(prefill rank, decode rank) that `reason` and `message` are about."""

    @property
    def key(self) -> tuple[str, str]:
        """(prefill UID, decode UID)."""
        return (self.prefill.uid, self.decode.uid)


def rank_pairs(prefill: Peer, decode: Peer) -> frozenset[tuple[int, int]]:
    """(prefill rank, decode rank) of every pair that exchanges KV."""
    return frozenset(
        (p.rank, d.rank) for p in prefill.cards.cards for d in decode.cards.cards if meet(p.layout, d.layout)
    )


RankPairs = Callable[[Peer, Peer], frozenset[tuple[int, int]]]


def cached_rank_pairs() -> RankPairs:
    """`rank_pairs`, computed once per pair of distinct layouts."""
    seen: dict[tuple[tuple[str, ...], tuple[str, ...]], frozenset[tuple[int, int]]] = {}

    def of(prefill: Peer, decode: Peer) -> frozenset[tuple[int, int]]:
        key = (
            tuple(c.layout_hash for c in prefill.cards.cards),
            tuple(c.layout_hash for c in decode.cards.cards),
        )
        if key not in seen:
            seen[key] = rank_pairs(prefill, decode)
        return seen[key]

    return of


@dataclass(frozen=True)
class Told:
    """Findings of one pod, by the UID of the pod they are about."""

    incarnation: str
    about: Mapping[str, tuple[Verdict, ...]]


def told_by(verdicts: PodVerdicts | None) -> Told | None:
    """Index one answer of GET /v1/verdicts; None when there is none."""
    if verdicts is None:
        return None
    about: dict[str, list[Verdict]] = {}
    for v in verdicts.verdicts:
        about.setdefault(v.peer_pod_uid, []).append(v)
    return Told(verdicts.incarnation, {uid: tuple(vs) for uid, vs in about.items()})


def _current(told: Told | None, own: Peer, other: Peer) -> tuple[Verdict, ...] | None:
    """Findings of `own` about `other` for both current incarnations; None when `own` told none."""
    if told is None or told.incarnation != own.cards.incarnation:
        return None
    return tuple(
        v
        for v in told.about.get(other.uid, ())
        if v.peer_incarnation == other.cards.incarnation and v.incarnation == own.cards.incarnation
    )


def _about_older(told: Told | None, other: Peer) -> bool:
    """True when findings about another incarnation of `other` exist and none about the current one."""
    about = told.about.get(other.uid, ()) if told else ()
    return bool(about) and all(v.peer_incarnation != other.cards.incarnation for v in about)


_VAGUE = ("", "PeerUnreachable")
_UNTOLD = ("", "Probing", "Verified")
_RANK = {VerdictState.REFUSED: 0, VerdictState.UNREACHABLE: 1, VerdictState.PROBING: 2, VerdictState.WIRED: 3}


def _broken(verdict: Verdict) -> tuple[LinkState, str]:
    """What a Refused or Unreachable says about the link, and its words."""
    state = LinkState.REFUSED if verdict.state is VerdictState.REFUSED else LinkState.UNREACHABLE
    text = ": ".join(part for part in (verdict.reason, verdict.message) if part) or verdict.state.value
    return state, text


def judge(
    prefill: Peer,
    decode: Peer,
    of_prefill: Told | None,
    of_decode: Told | None,
    pairs: frozenset[tuple[int, int]],
    replaced: frozenset[str] = frozenset(),
) -> Link:
    """Link of two peers that both showed complete cards. `replaced` are UIDs whose incarnation changed
    since the last look."""
    here, there = prefill.pod, decode.pod
    if not pairs:
        return Link(here, there, LinkState.REFUSED, "no rank of one holds KV that a rank of the other needs")
    told_p = _current(of_prefill, prefill, decode)
    told_d = _current(of_decode, decode, prefill)
    if told_p is None and told_d is None:
        return Link(here, there, LinkState.UNKNOWN, "neither side told its findings")
    found: list[tuple[tuple[int, int], Verdict]] = []
    complete = True
    for told, flipped in ((told_p, False), (told_d, True)):
        if told is None:
            continue
        by_pair = {((v.peer_rank, v.rank) if flipped else (v.rank, v.peer_rank)): v for v in told}
        complete &= all(p in by_pair and by_pair[p].state is VerdictState.WIRED for p in pairs)
        found += [(p, v) for p, v in by_pair.items() if p in pairs]
    # Of two sides that saw the same break, the one that names a cause tells more than "unreachable".
    where, worst = min(
        found, key=lambda f: (_RANK[f[1].state], f[0], f[1].reason in _VAGUE, f[1].rank), default=(None, None)
    )
    verdicts = tuple(v for _, v in found)
    if worst is not None and worst.state in (VerdictState.REFUSED, VerdictState.UNREACHABLE):
        state, text = _broken(worst)
        newest = max(v.at for v in verdicts if v.state is worst.state)
        return Link(here, there, state, text, verdicts, newest, worst.reason, where)
    if complete:
        return Link(here, there, LinkState.GOOD, "", verdicts)
    older = _about_older(of_prefill, decode) or _about_older(of_decode, prefill)
    if not found and (older or prefill.uid in replaced or decode.uid in replaced):
        return Link(here, there, LinkState.REPLACED, "one side started again and is not wired yet")
    if prefill.uid in replaced or decode.uid in replaced:
        return Link(here, there, LinkState.REPLACED, "one side started again and is being wired", verdicts)
    says = f" ({worst.reason}: {worst.message})" if worst is not None and worst.reason not in _UNTOLD else ""
    return Link(here, there, LinkState.PENDING, f"being probed{says}", verdicts)


def links_of(observed: Observed, view: View, replaced: frozenset[str]) -> dict[tuple[str, str], Link]:
    """Every pair of peers of one island."""
    pairs = cached_rank_pairs()
    links: dict[tuple[str, str], Link] = {}
    told = {p.uid: told_by(observed.answers[p.uid].verdicts) for p in view.peers}
    for p in view.side(Role.PREFILL):
        for d in view.side(Role.DECODE):
            if p.island != d.island:
                continue
            link = judge(
                p,
                d,
                told[p.uid],
                told[d.uid],
                pairs(p, d),
                replaced,
            )
            links[link.key] = link
    for lost in view.unreachable:
        for peer in view.peers:
            found = _one_sided(peer, lost, told[peer.uid]) if peer.pod.role != lost.role else None
            if found is not None:
                links[found.key] = found
    return links


def _one_sided(peer: Peer, lost: PodSeen, told: Told | None) -> Link | None:
    """Evidence of a peer against a pod that the operator can not ask (its node may be gone); None where
    there is none: not being asked is no evidence. Whatever incarnation it is about, that peer's roster
    knows no other."""
    if told is None or told.incarnation != peer.cards.incarnation:
        return None
    against_it = [
        v for v in told.about.get(lost.uid, ()) if v.state in (VerdictState.REFUSED, VerdictState.UNREACHABLE)
    ]
    worst = min(against_it, key=lambda v: (_RANK[v.state], v.rank, v.peer_rank), default=None)
    if worst is None:
        return None
    prefill = peer.role is Role.PREFILL
    here, there = (peer.pod, lost) if prefill else (lost, peer.pod)
    state, text = _broken(worst)
    where = (worst.rank, worst.peer_rank) if prefill else (worst.peer_rank, worst.rank)
    newest = max(v.at for v in against_it)
    return Link(here, there, state, text, tuple(against_it), newest, worst.reason, where)


@dataclass(frozen=True)
class Blame:
    """How often, and since when, a link was found unreachable (kept in Memory)."""

    count: int
    last_at: float
    since: float


def blame(
    links: Mapping[tuple[str, str], Link], before: Mapping[tuple[str, str], Blame], now: float
) -> dict[tuple[str, str], Blame]:
    """Count distinct findings of Unreachable; a link that is not unreachable any more is forgotten."""
    after: dict[tuple[str, str], Blame] = {}
    for key, link in links.items():
        if link.state is not LinkState.UNREACHABLE:
            continue
        old = before.get(key)
        if old is None:
            after[key] = Blame(1, link.seen_at, now)
        elif link.seen_at != old.last_at:
            after[key] = Blame(old.count + 1, link.seen_at, old.since)
        else:
            after[key] = old
    return after


def against(link: Link, blamed: Mapping[tuple[str, str], Blame], now: float, settings: DecideSettings) -> bool:
    """True when there is positive evidence that two pods that were wired are not any more."""
    if link.state in (LinkState.REFUSED, LinkState.REPLACED):
        return True
    if link.state is LinkState.UNREACHABLE:
        told = blamed.get(link.key)
        return told is not None and (
            told.count >= settings.unreachable_tries or now - told.since >= settings.unreachable_seconds
        )
    return False
