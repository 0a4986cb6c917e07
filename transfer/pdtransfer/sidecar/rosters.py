"""Reads a roster body into the compact form the sidecar holds. Pure.

A large fleet's roster is megabytes of cards (512 cards of an 80-layer model: 9 MiB, but 160 MiB as
models), and the sidecar needs of it only whom each rank is to meet, so cards are validated one by one
and kept as the bytes that go to the rank. The hash is `Roster.hash`, computed over the same bytes
piece by piece (tests/sidecar/test_rosters.py holds the two equal).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Field, ValidationError

from pdtransfer.contract.base import ContractModel, canonical_json, stable
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.roster import RosterKey
from pdtransfer.sidecar.model import HeldRoster, PeerRef
from pdtransfer.sidecar.peer_lines import MARK


class BadRoster(ValueError):
    """The body is no roster that can be taken; the message says where and why."""


@dataclass(frozen=True)
class _Kept:
    """What is left of a card once it was validated."""

    cluster_uid: str
    ref: PeerRef
    order: tuple[str, str, str]
    text: bytes


def _keep(card: RankCard) -> _Kept:
    if (broken := card.seal_broken) is not None:
        raise ValueError(f"card of pod {card.pod_name or card.pod_uid} rank {card.rank}: {broken}")
    return _Kept(
        card.cluster_uid,
        PeerRef(card.pod_uid, card.pod_name, card.incarnation, card.rank, card.role),
        (card.pod_uid, card.incarnation, card.agent_name),
        canonical_json(stable(card)),
    )


class _Envelope(ContractModel):
    """A contract.roster.Roster. Each card is turned into what is kept of it as soon as it is validated,
    so that never more than one exists as a model."""

    version: Literal[1] = 1
    cluster_uid: str
    pod_uid: str
    incarnation: str
    key: RosterKey
    peers: dict[int, list[Annotated[RankCard, AfterValidator(_keep)]]] = Field(default_factory=dict)


def error_text(e: ValidationError, prefix: str = "", limit: int = 5) -> str:
    """Where and what is wrong, without the input itself (a card can be large)."""
    errors = e.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{prefix}{'.'.join(str(p) for p in err['loc']) or '(whole)'}: {err['msg']}" for err in errors[:limit]]
    more = f"; and {len(errors) - limit} more" if len(errors) > limit else ""
    return "; ".join(parts) + more


def parse(body: bytes | bytearray) -> HeldRoster:
    """The roster in `body` (JSON of contract.roster.Roster). BadRoster when it can not be taken."""
    try:
        envelope = _Envelope.model_validate_json(body)
    except ValidationError as e:
        raise BadRoster(f"the roster does not parse: {error_text(e)}") from e
    pairs: list[tuple[int, PeerRef]] = []
    cards: dict[int, list[bytes]] = {}
    for rank, items in sorted(envelope.peers.items()):
        kept = sorted(cast(list[_Kept], items), key=lambda k: k.order)
        for k in kept:
            if k.cluster_uid != envelope.cluster_uid:
                who = f"peers.{rank} names pod {k.ref.pod_name or k.ref.pod_uid}"
                raise BadRoster(f"{who}, which is of another PDCluster, {k.cluster_uid}")
        pairs += [(rank, k.ref) for k in kept]
        cards[rank] = [k.text for k in kept]
    digest = _hash(envelope, cards)
    lines = {rank: peers_line(envelope.key, digest, cards.pop(rank)) for rank in list(cards)}
    return HeldRoster(
        cluster_uid=envelope.cluster_uid,
        pod_uid=envelope.pod_uid,
        incarnation=envelope.incarnation,
        key=envelope.key,
        hash=digest,
        pairs=tuple(pairs),
        lines=lines,
    )


def peers_line(key: RosterKey, digest: str, cards: list[bytes]) -> bytes:
    """A contract.link.Peers message of these cards, as one line; each card between two TABs, which JSON
    takes for white space and by which the rank finds the cards (sidecar/peer_lines.py)."""
    head = canonical_json({"type": "peers", "term": key.term, "counter": key.counter, "roster_hash": digest})
    inner = MARK + (MARK + b"," + MARK).join(cards) + MARK if cards else b""
    return head[:-1] + b',"peers":[' + inner + b"]}\n"


def _hash(envelope: _Envelope, cards: dict[int, list[bytes]]) -> str:
    """`content_hash` of Roster.hash's dict, without building it: keys in sorted order."""
    h = hashlib.sha256()
    h.update(b'{"cluster":' + canonical_json(envelope.cluster_uid))
    h.update(b',"incarnation":' + canonical_json(envelope.incarnation) + b',"peers":{')
    for n, rank in enumerate(sorted(cards, key=str)):
        h.update((b"," if n else b"") + canonical_json(str(rank)) + b":[")
        for i, text in enumerate(cards[rank]):
            h.update((b"," if i else b"") + text)
        h.update(b"]")
    h.update(b'},"pod":' + canonical_json(envelope.pod_uid) + b"}")
    return h.hexdigest()[:32]
