"""The roster as a rank sees it: which cards are added, replaced or removed, and which can't be wired. Pure.

A card with another incarnation, agent, layout or address is a new peer: the old one is fenced and
its transfers fail with PeerReplaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdtransfer.contract.base import MemoryKind, Role
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.compat.cards import check_rank_pair
from pdtransfer.contract.pairing import meet
from pdtransfer.contract.verdict import Verdict, VerdictState
from pdtransfer.errors import LayoutMismatch, PeerUnreachable
from pdtransfer.plan import check_pair
from pdtransfer.plan.cost import Rates

PeerKey = tuple[str, int]
"""(pod UID, rank): the place; who is there now is its incarnation."""


def real_kind(card: RankCard, kind: MemoryKind) -> MemoryKind:
    """Where a region of a card really lies: emulated VRAM is host memory."""
    return MemoryKind.DRAM if card.layout.emulated_vram else kind


def key_of(card: RankCard) -> PeerKey:
    """The place a card stands for."""
    return (card.pod_uid, card.rank)


def same_peer(a: RankCard, b: RankCard) -> bool:
    """True when what was prepared for `a` holds for `b`, but for the agent when they are two generations
    of one incarnation."""
    if a.generation == b.generation and (a.agent_name, a.nixl_metadata) != (b.agent_name, b.nixl_metadata):
        return False
    return (a.incarnation, a.first_agent, a.control, a.layout_hash, a.staging) == (
        b.incarnation,
        b.first_agent,
        b.control,
        b.layout_hash,
        b.staging,
    ) and [r.address for r in a.layout.regions] == [r.address for r in b.layout.regions]


@dataclass(frozen=True)
class RosterChange:
    """What to do to get from the held peers to the wanted ones. A replaced card is in both
    `removed` and `added`; `rotated` are held peers' cards of a later agent."""

    added: tuple[RankCard, ...]
    removed: tuple[PeerKey, ...]
    rotated: tuple[RankCard, ...] = ()


def roster_change(held: Mapping[PeerKey, RankCard], wanted: Iterable[RankCard]) -> RosterChange:
    """Difference between held peers and a whole new set. A card of an earlier agent than the held one
    is late news: the peer itself tells of its agents first."""
    new = {key_of(c): c for c in wanted}
    removed = [k for k, c in held.items() if k not in new or not same_peer(c, new[k])]
    added = [c for k, c in new.items() if k not in held or k in removed]
    rotated = [c for k, c in new.items() if k in held and k not in removed and c.generation > held[k].generation]
    return RosterChange(tuple(added), tuple(removed), tuple(rotated))


def refusal(mine: RankCard, peer: RankCard) -> tuple[str, str] | None:
    """Why `peer` can't be wired to `mine` (reason, message), or None."""
    if peer.cluster_uid != mine.cluster_uid:
        return "OtherCluster", f"the card belongs to PDCluster {peer.cluster_uid}"
    if peer.role is not mine.role.other:
        return "WrongRole", f"a {mine.role.value} rank exchanges no KV with a {peer.role.value} rank"
    if peer.layout.stale_reason is not None:
        return "StaleRegistration", peer.layout.stale_reason
    if peer.seal_broken is not None:
        return "BrokenSeal", peer.seal_broken
    if peer.fingerprint != mine.fingerprint:
        return "FingerprintMismatch", _difference(mine, peer)
    prefill, decode = (mine, peer) if mine.role is Role.PREFILL else (peer, mine)
    if not meet(prefill.layout, decode.layout):
        return "NoCommonKV", "the two ranks hold no common head and layer"
    try:
        check_pair(prefill.layout, decode.layout)
    except LayoutMismatch as error:
        return error.reason, error.message
    broken = check_rank_pair(prefill, decode).first_failure
    if broken is not None:
        return "Incompatible", f"{broken.rule}: {broken.message} {broken.action}".strip()
    return None


def _difference(mine: RankCard, peer: RankCard) -> str:
    """Names the fields that must be equal and are not."""
    ours: dict[str, Any] = mine.model.model_dump(mode="json")
    theirs: dict[str, Any] = peer.model.model_dump(mode="json")
    for side, card in ((ours, mine), (theirs, peer)):
        side["kv_dtype"] = card.layout.kv_dtype
        side["page_tokens"] = card.layout.page_tokens
    parts = [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs[k]]
    return "; ".join(parts) or "the fingerprints differ"


def required_askers(prefill: RankCard, decode: RankCard) -> int:
    """How many ranks of the decode engine ask this prefill rank for one room.

    Over decode's TP ranks by head slices (heads are dealt as tp * total // tp_size); over its
    pipeline stages: one when stages are equal in number or decode has one, else all of them."""
    layout, other = decode.layout, prefill.layout
    at = layout.coordinates
    count = 0
    for tp in range(at.tp_size):
        heads = layout.heads
        if heads is not None:
            heads = heads.model_copy(update={"first": tp * heads.total // at.tp_size})
        sibling = layout.model_copy(update={"heads": heads, "coordinates": at.model_copy(update={"tp": tp})})
        count += meet(other, sibling)
    stages = at.pp_size if other.coordinates.pp_size == 1 else 1
    return max(1, count * stages)


def coverage_gap(sources: Iterable[RankCard], decode: RankCard) -> str | None:
    """What the decode rank holds and these prefill ranks do not send together, or None."""
    sources = tuple(sources)
    mine = decode.layout
    wanted = mine.heads.count if mine.heads else 1
    for region in mine.regions:
        heads = 0
        for layout in (c.layout for c in sources):
            if not any(r.key == region.key for r in layout.regions):
                continue
            if mine.heads is None or layout.heads is None:
                heads += 1
                continue
            low = max(mine.heads.first, layout.heads.first)
            high = min(mine.heads.first + mine.heads.count, layout.heads.first + layout.heads.count)
            heads += max(0, high - low)
        if heads < wanted:
            return f"the rostered prefill ranks hold {heads} of {wanted} KV heads of layer {region.layer}"
    return None


@dataclass(eq=False)
class Peer:
    """A wired (or to be wired) peer rank, held by the endpoint's thread."""

    card: RankCard
    """With the newest agent that is loaded here (or is to be)."""
    verdict: Verdict
    older: list[RankCard] = field(default_factory=list)
    """The same with agents before it that are still loaded: what was begun to them goes on."""
    oldest: int = 0
    """The peer's first generation that still exists, as far as it told."""
    fenced: int = 0
    """Nothing that was posted to its agents before that generation can land."""
    loaded: bool = False
    """The agent knows it."""
    loads: int = 0
    """Times that the agent was told of it: what was prepared for it before the last time is void."""
    loading: bool = False
    """It waits for its turn to be loaded."""
    channel: Any = None
    tasks: list[Any] = field(default_factory=list)
    retired: bool = False
    """The roster names it no more."""
    ended_there: bool = False
    """Its side ended the control connection (not ours)."""
    refused_since: bool = False
    """After that, its control port refused us or another incarnation answered there."""
    dead: bool = False
    lost: bool = False
    """The agent on its card could not be loaded: it may be gone, and the peer have another one."""
    reload: bool = False
    """The agent lost its connection to it: remove, add and connect again once nothing flies."""
    broken: bool = False
    """And surely so: until it is loaded anew, nothing that is posted to it arrives."""
    probing: bool = False
    probed_at: float = 0.0
    rates: Rates | None = None
    """Of the wire to it and of copies at both ends, from its last good probe."""
    known_at: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> PeerKey:
        """Its place."""
        return key_of(self.card)

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of its agents that are loaded here, or are to be."""
        return tuple(c.agent_name for c in (*self.older, self.card))

    @property
    def gone(self) -> str:
        """For messages about a request that lost it, with what it answered when it was dialled again."""
        verdict = self.verdict
        answered = verdict.reason not in ("", PeerUnreachable.reason)
        return "the control connection is gone" + (f" ({verdict.reason}: {verdict.message})" if answered else "")

    def generation(self, number: int) -> RankCard | None:
        """Its card with that agent, while that is loaded."""
        return next((c for c in (self.card, *self.older) if c.generation == number), None)

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.card.pod_name or self.card.pod_uid}/{self.card.rank}"


def first_verdict(mine: RankCard, peer: RankCard) -> Verdict:
    """Probing, before anything is known."""
    return Verdict(
        rank=mine.rank,
        incarnation=mine.incarnation,
        peer_pod_uid=peer.pod_uid,
        peer_incarnation=peer.incarnation,
        peer_rank=peer.rank,
        state=VerdictState.PROBING,
        emulated_vram=mine.layout.emulated_vram or peer.layout.emulated_vram,
        at=time.time(),
    )


def judged(held: Verdict, state: VerdictState, reason: str, message: str, **proof: Any) -> Verdict:
    """The next verdict about the same peer. `proof` is of this finding alone: none stays from before."""
    none = {"bytes_moved": 0, "seconds": 0.0, "bandwidth": 0.0, "checksum_ok": False, "transport": "", "evidence": ""}
    found = {**none, **proof, "state": state, "reason": reason, "message": message, "at": time.time()}
    return held.model_copy(update=found)


def unwired(peer: Peer) -> PeerUnreachable:
    """Why nothing can be asked of a peer that the roster names."""
    found = peer.verdict
    return PeerUnreachable(f"{found.reason}: {found.message}", peer=peer.label, rank=peer.card.rank)
