"""One receive of a decode rank: its legs, one for each prefill rank that holds a part."""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer import errors
from pdtransfer.contract.card import RankCard
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.session.frames import Request
from pdtransfer.session.transfers import ReceiveTransfer

BY_REASON = {
    c.reason: c
    for c in (
        errors.PeerNotRostered,
        errors.PeerReplaced,
        errors.PeerUnreachable,
        errors.LayoutMismatch,
        errors.StaleRegistration,
        errors.DeadlineExceeded,
        errors.Aborted,
        errors.RoomTaken,
        errors.ChecksumMismatch,
        errors.Draining,
        errors.AgentError,
    )
}


@dataclass(eq=False)
class Leg:
    """One prefill rank's part."""

    card: RankCard
    request: Request
    nbytes: int
    peer: Peer | None = None
    sent: bool = False
    """The request may have reached the source."""
    done: bool = False
    settled: bool = False
    metadata: bytes = b""


@dataclass(eq=False)
class Receive:
    """One room's receive over all legs."""

    transfer: ReceiveTransfer
    key: tuple[int, int]
    legs: dict[PeerKey, Leg]
    deadline: float
    connect_by: float
    progressing: bool = False
    bytes_done: int = 0
