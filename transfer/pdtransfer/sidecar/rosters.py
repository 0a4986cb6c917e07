"""Reads a roster body into the compact form the sidecar holds. Pure.

A large fleet's roster is megabytes of cards (512 cards of an 80-layer model: 9 MiB, but 160 MiB as
models), and the sidecar needs of it only whom each rank is to meet, so cards are validated one by one
and kept as the bytes that go to the rank. The hash is `Roster.hash`, computed over the same bytes
piece by piece (tests/sidecar/test_rosters.py holds the two equal).
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import Field, ValidationError

from pdtransfer.contract.base import ContractModel, canonical_json
from pdtransfer.contract.card import RankCard
from pdtransfer.contract.roster import RosterKey
from pdtransfer.sidecar.model import HeldRoster, PeerRef


class BadRoster(ValueError):
    """The body is no roster that can be taken; the message says where and why."""


class _Envelope(ContractModel):
    """A contract.roster.Roster whose cards are not looked at yet."""

    version: int = 1
    cluster_uid: str
    pod_uid: str
    incarnation: str
    key: RosterKey
    peers: dict[int, list[dict[str, Any]]] = Field(default_factory=dict)


def error_text(e: ValidationError, prefix: str = "", limit: int = 5) -> str:
    """Where and what is wrong, without the input itself (a card can be large)."""
    errors = e.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{prefix}{'.'.join(str(p) for p in err['loc']) or '(whole)'}: {err['msg']}" for err in errors[:limit]]
    more = f"; and {len(errors) - limit} more" if len(errors) > limit else ""
    return "; ".join(parts) + more


def _card(data: dict[str, Any], where: str, cluster_uid: str) -> RankCard:
    try:
        card = RankCard.model_validate(data)
    except ValidationError as e:
        raise BadRoster(f"the roster does not parse: {error_text(e, where + '.')}") from e
    who = f"{where} (pod {card.pod_name or card.pod_uid} rank {card.rank})"
    if card.cluster_uid != cluster_uid:
        raise BadRoster(f"{who} is of another PDCluster, {card.cluster_uid}")
    if (broken := card.seal_broken) is not None:
        raise BadRoster(f"{who}: {broken}")
    return card


def parse(body: bytes) -> HeldRoster:
    """The roster in `body` (JSON of contract.roster.Roster). BadRoster when it can not be taken."""
    try:
        envelope = _Envelope.model_validate_json(body)
    except ValidationError as e:
        raise BadRoster(f"the roster does not parse: {error_text(e)}") from e
    if envelope.version != 1:
        raise BadRoster(f"the roster has version {envelope.version}, this sidecar reads 1")
    pairs: list[tuple[int, PeerRef]] = []
    cards: dict[int, list[bytes]] = {}
    for rank, items in sorted(envelope.peers.items()):
        keyed: list[tuple[tuple[str, str, str], bytes]] = []
        for i in range(len(items)):
            data, items[i] = items[i], {}  # let go of each as soon as it is read
            card = _card(data, f"peers.{rank}.{i}", envelope.cluster_uid)
            pairs.append((rank, PeerRef(card.pod_uid, card.pod_name, card.incarnation, card.rank, card.role)))
            order = (card.pod_uid, card.incarnation, card.agent_name)
            keyed.append((order, canonical_json(card.model_dump(mode="json"))))
        keyed.sort(key=lambda k: k[0])
        cards[rank] = [text for _, text in keyed]
    digest = _hash(envelope, cards)
    lines = {rank: peers_line(envelope.key, digest, texts) for rank, texts in cards.items()}
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
    """A contract.link.Peers message of these cards, as one line."""
    head = canonical_json({"type": "peers", "term": key.term, "counter": key.counter, "roster_hash": digest})
    return head[:-1] + b',"peers":[' + b",".join(cards) + b"]}\n"


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
