"""First frames of a control connection: both sides say who they are and whom they mean.

A certificate of the cluster's CA opens a connection; only a card of the roster lets it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdtransfer.contract.card import RankCard
from pdtransfer.errors import (
    LayoutMismatch,
    PeerNotRostered,
    PeerReplaced,
    PeerUnreachable,
    TransferError,
)
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.session.api import EndpointConfig
from pdtransfer.session.channel import Channel, client_context, connect
from pdtransfer.session.frames import MAX_HELLO, Hello, Refused, Welcome

_REFUSALS: dict[str, type[TransferError]] = {c.reason: c for c in (PeerReplaced, PeerNotRostered, LayoutMismatch)}


async def greet(mine: RankCard, peer: Peer, config: EndpointConfig, on_drained: Callable[[Peer], None]) -> Channel:
    """Dial a peer and shake hands; raises what it found out, or OSError and the like."""
    card = peer.card
    host, _, port = card.control.rpartition(":")
    tls = client_context(config.tls_dir)
    channel = await connect(host.strip("[]"), int(port), tls, config.server_name)
    try:
        channel.send(
            Hello(
                cluster_uid=mine.cluster_uid,
                pod_uid=mine.pod_uid,
                incarnation=mine.incarnation,
                rank=mine.rank,
                agent_name=mine.agent_name,
                generation=mine.generation,
                layout_hash=mine.layout_hash,
                to_pod_uid=card.pod_uid,
                to_incarnation=card.incarnation,
                to_rank=card.rank,
            )
        )
        answer = await channel.receive(MAX_HELLO)
        if isinstance(answer, Refused):
            if answer.reason == PeerReplaced.reason:
                peer.refused_since = True
            if answer.drained:
                on_drained(peer)
            kind = _REFUSALS.get(answer.reason, PeerUnreachable)
            raise kind(answer.message or answer.reason, peer=peer.label)
        if not isinstance(answer, Welcome):
            raise PeerUnreachable("the connection ended in the handshake", peer=peer.label)
        if (answer.pod_uid, answer.incarnation, answer.rank, answer.agent_name) != (
            card.pod_uid,
            card.incarnation,
            card.rank,
            card.agent_name,
        ):
            peer.refused_since = True
            raise PeerReplaced("another rank answers at this address", peer=peer.label)
    except BaseException:
        channel.close()
        raise
    return channel


def admit(
    mine: RankCard, peers: Mapping[PeerKey, Peer], drained: Callable[[str], bool], hello: Hello
) -> Peer | Refused:
    """Whom a dialling side is, or why it is refused. Only the roster decides. A peer that waits to be
    loaded is let in so far: ask again once it was. One whose agent is lost is let in: it may have another."""
    if hello.cluster_uid != mine.cluster_uid:
        return Refused(reason="OtherCluster", message=f"this is PDCluster {mine.cluster_uid}")
    if (hello.to_pod_uid, hello.to_incarnation, hello.to_rank) != (mine.pod_uid, mine.incarnation, mine.rank):
        return Refused(
            reason=PeerReplaced.reason,
            message=f"here is pod {mine.pod_uid} rank {mine.rank} incarnation {mine.incarnation}",
        )
    peer = peers.get((hello.pod_uid, hello.rank))
    if peer is None:
        return Refused(
            reason=PeerNotRostered.reason,
            message="the peer's roster does not name this rank",
            drained=drained(hello.first_agent),
        )
    held = peer.card
    if (hello.incarnation, hello.first_agent) != (held.incarnation, held.first_agent):
        return Refused(
            reason=PeerNotRostered.reason,
            message=f"the peer's roster names incarnation {held.incarnation}",
            drained=hello.first_agent != held.first_agent and drained(hello.first_agent),
        )
    if hello.layout_hash != held.layout_hash or not (peer.loaded or peer.loading or peer.lost):
        return Refused(reason=LayoutMismatch.reason, message=peer.verdict.message or "other layout")
    return peer
