"""Prefill side: makes each leg's feeder, drives it, and tells decode that bytes are coming."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from pdtransfer.errors import TransferError
from pdtransfer.peers import Peer
from pdtransfer.session.core import Core
from pdtransfer.session.depot import Depot
from pdtransfer.session.digests import Digests
from pdtransfer.session.feeder import Feeder
from pdtransfer.session.frames import Started
from pdtransfer.session.links import Links
from pdtransfer.session.pairs import Pairs
from pdtransfer.session.rooms import Leg, Room
from pdtransfer.session.stager import Stager
from pdtransfer.session.wiring import Wiring

logger = logging.getLogger(__name__)


class Feeding:
    """Runs in the core's thread. `fail(leg, error)` ends the leg's room."""

    def __init__(self, core: Core, wiring: Wiring, depot: Depot, fail: Callable[[Leg, TransferError], None]) -> None:
        self._core = core
        self._wiring = wiring
        self._fail = fail
        self._announced: list[Leg] = []
        self._digests = Digests(core, lambda: wiring.card)
        self.pairs = Pairs(lambda: wiring.card)
        self.links = Links(lambda: core.agent, lambda: wiring.card, self.pairs)
        self.stager = Stager(core, wiring, depot, fail)
        core.works.append(self._announce)

    def warm(self, peer: Peer) -> None:
        """Prepare what requests of this peer will need, so that the first one does not pay for it."""
        try:
            self.links.warm(peer, peer.card)
        except TransferError as error:
            logger.warning("%s: lists for %s could not be prepared: %s", self._core.name, peer.label, error)
        except Exception:  # of that peer's card: requests of it will fail, the others go on
            logger.exception("%s: lists for %s could not be prepared", self._core.name, peer.label)

    def prepare(self, leg: Leg) -> None:
        """Make ready for the room that is to come; what can't be made is told when it has come."""
        with contextlib.suppress(TransferError):
            leg.feeder = self._feeder(leg)

    def _feeder(self, leg: Leg) -> Feeder:
        return Feeder(self._core, self._wiring, self.links, self.stager, self._digests, leg)

    def begin(self, room: Room, leg: Leg) -> None:
        """The engine's room is there, and the leg's job."""
        if leg.feeder is not None and not leg.feeder.fresh:
            leg.feeder = None  # the peer was loaded anew while the request waited
        self.advance(room, leg)

    def advance(self, room: Room, leg: Leg) -> None:
        """Route and queue chunk by chunk, each only after its ready event."""
        if leg.error is not None or leg.done or leg.job is None:
            return
        try:
            if leg.feeder is None:
                leg.feeder = self._feeder(leg)
            leg.feeder.begin(room, lambda: self.advance(room, leg))
            leg.feeder.advance()
        except TransferError as error:
            self._fail(leg, error.about(peer=leg.peer.label))
        except Exception as error:  # of this room's own pages or event: the others go on
            logger.exception("%s: room %d could not be fed", self._core.name, room.sender.room)
            self._fail(leg, TransferError(f"prefill could not send it: {error!r}", peer=leg.peer.label))
        if leg.announce:
            self._announced.append(leg)

    def count(self, leg: Leg) -> None:
        """Count what its job moved."""
        job, strategy = leg.job, leg.request.strategy
        if job is None:
            return
        lane = leg.peer.verdict.transport or "Unknown"
        self._core.count("bytes_total", job.bytes_done, direction="sent", strategy=strategy, transport=lane)
        self._core.count("handles_total", job.handles, strategy=strategy)
        self._core.count("descriptors_total", job.pieces, strategy=strategy)

    def _announce(self) -> bool:
        """Say that bytes are coming, once they are on their way: the first of them does not wait for it."""
        announced, self._announced = self._announced, []
        for leg in announced:
            if leg.announce and not leg.done and leg.error is None:
                self._wiring.send(leg.peer, Started(**leg.request.ids))
            leg.announce = False
        return bool(announced)
