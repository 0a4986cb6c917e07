"""One receive of a decode rank: its legs, one for each prefill rank that holds a part."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdtransfer import errors
from pdtransfer.contract.card import RankCard
from pdtransfer.peers import Peer, PeerKey
from pdtransfer.plan import Lane
from pdtransfer.session.coverage import Coverage
from pdtransfer.session.frames import Request
from pdtransfer.session.pairs import Pair
from pdtransfer.session.strategy import THROUGH_SLOTS
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
    """One prefill rank's part. `nbytes` is everything that was asked of it."""

    card: RankCard
    request: Request
    pair: Pair
    nbytes: int
    peer: Peer | None = None
    sent: bool = False
    """The request may have reached the source."""
    told: bool = False
    """Done came: the source has written everything."""
    done: bool = False
    """And everything is in the pages."""
    settled: bool = False
    metadata: bytes = b""
    digest: str = ""
    scattering: int = 0
    """Scatters that were begun and are not finished (a GPU's)."""
    lent_early: bool = False
    """A slot was lent with the request, before it was asked for."""
    queued: set[int] = field(default_factory=set)
    """Tickets that were filled and are not scattered."""
    missing: Coverage = field(init=False)
    """What has to come through slots and is not scattered yet."""
    in_place: bool = field(init=False)
    """The source writes into pages: a late write of it could hit them."""

    def __post_init__(self) -> None:
        strategy = self.request.strategy
        through = strategy in THROUGH_SLOTS
        lanes = self.pair.plan.lanes
        self.missing = Coverage(
            (lane.regions, self.pages(lane)) if through and not lane.direct(strategy) else (0, 0) for lane in lanes
        )
        self.in_place = self.pair.plan.in_place(strategy)

    def first_page(self, lane: Lane) -> int:
        """Number of the first page asked for, in the lane's page space."""
        return 0 if lane.pool else self.request.first_page

    def page_list(self, lane: Lane) -> tuple[int, ...]:
        """This rank's pool pages of a lane."""
        if not lane.pool:
            return self.request.pages
        return next((p.pages for p in self.request.pools if p.pool == lane.pool), ())

    def pages(self, lane: Lane) -> int:
        """How many they are."""
        return len(self.page_list(lane))

    def page_numbers(self, lane: Lane, first_page: int, count: int) -> npt.NDArray[np.int64]:
        """Pool pages of the lane's pages `first_page ..`."""
        at = first_page - self.first_page(lane)
        return np.array(self.page_list(lane)[at : at + count], dtype=np.int64)

    @property
    def complete(self) -> bool:
        """Every byte is in its page."""
        return self.told and not self.missing.left and not self.queued


@dataclass(eq=False)
class Receive:
    """One room's receive over all legs."""

    transfer: ReceiveTransfer
    key: tuple[int, int]
    legs: dict[PeerKey, Leg]
    deadline: float
    connect_by: float
    began: float = field(default_factory=time.monotonic)
    progressing: bool = False
    bytes_done: int = 0
    failed_at: float = 0.0
    """Monotonic seconds."""

    @property
    def strategy(self) -> str:
        """How its unequal slices travel (the first leg's, where they differ)."""
        return next((leg.request.strategy for leg in self.legs.values()), "direct")
