"""Eight bugs of such protocols, and one of staging, each as a small change of the real code. The
exploration must find every one of them: a checker that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdtransfer.agent.port import AgentFailure
from pdtransfer.errors import DeadlineExceeded
from pdtransfer.mover.ledger import PageLedger
from pdtransfer.peers import key_of
from pdtransfer.session.askers import Askers
from pdtransfer.session.destination import DestinationSide
from pdtransfer.session.frames import AbortAck, Done, Request
from pdtransfer.session.intake import Intake
from pdtransfer.session.tombstones import Tombstones

from .bounds import Bounds

Change = tuple[Any, str, Any]


@dataclass(frozen=True)
class Seeded:
    """One bug: what is changed, the world in which it shows, and part of the violation."""

    name: str
    bounds: Bounds
    changes: Callable[[], list[Change]]
    longest: int
    """Actions that lead to it, at most; what happens once faults have stopped does not count."""
    shows: str


def _frees(side: Any, receive: Any) -> None:
    """Treat every leg as settled."""
    for leg in receive.legs.values():
        side.ledger.writer_settled(receive.key, key_of(leg.card))


def _deadline_frees() -> list[Change]:
    real = DestinationSide._fail

    def fail(self: Any, receive: Any, error: Any) -> None:
        real(self, receive, error)
        if isinstance(error, DeadlineExceeded):
            _frees(self, receive)

    return [(DestinationSide, "_fail", fail)]


def _first_error_frees() -> list[Change]:
    real = Askers.failed

    def failed(self: Any, leg: Any) -> None:
        job, held = leg.job, None
        if isinstance(leg.error, AgentFailure) and job is not None:
            held, job.in_flight, job.lost = (job.in_flight, job.lost), 0, 0
        real(self, leg)
        if held is not None:
            job.in_flight, job.lost = held

    return [(Askers, "failed", failed)]


def _keyed_by_room(kind: type) -> list[Change]:
    real = DestinationSide._find

    def find(self: Any, peer: Any, frame: Any) -> Any:
        if isinstance(frame, kind):
            for receive in (*self._live.values(), *self._settling.values()):
                leg = receive.legs.get(peer.key)
                if receive.key[0] == frame.room and leg is not None:
                    return receive, leg
        return real(self, peer, frame)

    return [(DestinationSide, "_find", find)]


def _count_popped() -> list[Change]:
    real = PageLedger.writer_settled

    def settled(self: Any, transfer: Any, writer: Any) -> None:
        held = self._holdings.get(transfer)
        if held is not None:
            held.writers.clear()  # the whole count goes with the first
        real(self, transfer, writer)

    return [(PageLedger, "writer_settled", settled)]


def _presumed_death() -> list[Change]:
    real = DestinationSide.on_peer_gone

    def gone(self: Any, peer: Any, error: Any) -> None:
        owed = [receive for receive, leg in self._legs_of(peer) if not leg.settled]
        real(self, peer, error)
        for receive in owed:
            _frees(self, receive)

    return [(DestinationSide, "on_peer_gone", gone)]


def _no_tombstone() -> list[Change]:
    real = Tombstones.add

    def add(self: Any, peer: Any, request: Any, *rest: Any) -> None:
        if request is not None:
            real(self, peer, request, *rest)

    return [(Tombstones, "add", add)]


def _any_incarnation() -> list[Change]:
    real = Askers.on_request

    def on_request(self: Any, peer: Any, request: Request) -> None:
        mine = {"source": self._wiring.card.incarnation, "destination": peer.card.incarnation}
        real(self, peer, request.model_copy(update=mine))

    return [(Askers, "on_request", on_request)]


def _slots_at_once() -> list[Change]:
    def quarantine(self: Any, leg: Any) -> None:
        self.release(leg)

    return [(Intake, "quarantine", quarantine)]


_ONE = {"attempts": 1, "sends": 1, "pages": 1}
_AGAIN = "given back"
_FREE = "are free, handle 0 may land"
_AFTER = "posted after its attempt was acknowledged"
SEEDED = (
    Seeded("a deadline frees", Bounds(**_ONE, jumps=2), _deadline_frees, 4, _FREE),
    Seeded(
        "the first error frees while a sibling handle writes",
        Bounds(attempts=1, sends=1, errors=1),
        _first_error_frees,
        4,
        "was acknowledged, handle",
    ),
    Seeded(
        "a completion is keyed by its room",
        Bounds(pages=1, doublings=1),
        lambda: _keyed_by_room(Done),
        6,
        "does not hold its bytes",
    ),
    Seeded(
        "an acknowledgement is keyed by its room",
        Bounds(pages=1, doublings=1),
        lambda: _keyed_by_room(AbortAck),
        4,
        _AGAIN,
    ),
    Seeded("a count is popped, not decremented", Bounds(**_ONE, prefill=2), _count_popped, 3, _AGAIN),
    Seeded(
        "a death is presumed",
        Bounds(**_ONE, kills=1, breaks=1, jumps=1),
        _presumed_death,
        5,
        "are free, handle 0 may land",
    ),
    Seeded("an abort overtakes its request", Bounds(**_ONE), _no_tombstone, 4, _AFTER),
    Seeded(
        "a request is served by a new incarnation",
        Bounds(**_ONE, aborts=0, kills=1, jumps=1, near=True),
        _any_incarnation,
        5,
        _AGAIN,
    ),
    Seeded(
        "the slots of a failed request are lent again at once",
        Bounds(**_ONE, decode_of=2, slots=1, strategy="staged"),
        _slots_at_once,
        6,
        "are not held for attempt 0",
    ),
)
