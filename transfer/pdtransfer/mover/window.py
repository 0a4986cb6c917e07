"""What is in flight and what may be added to it. Bookkeeping only; every call costs the same at any size.

Handles in flight count in the shared window until they are late; then only their peer's own bound
counts them. Even a full window lets a peer without a handle in flight have one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.agent.port import Handle, Prepared
from pdtransfer.mover.jobs import Item, Job
from pdtransfer.mover.queues import PeerQueue

PEER_HANDLES = 4
"""Handles in flight to one peer: rates are flat from 2 on, and one bad peer can't take the window."""
WINDOW_PIECES = 32768
"""Descriptors in flight: UCX keeps 4.3 kB for each outstanding one over TCP."""
STALLED_AFTER = 1.0
"""Seconds after which a handle is late."""


@dataclass(eq=False, slots=True)
class Flight:
    """A posted handle. `lists` are those made for it alone; `posted_at` is monotonic seconds."""

    job: Job
    queue: PeerQueue
    item: Item
    handle: Handle
    lists: tuple[Prepared, ...]
    posted_at: float
    late: bool = False
    told: bool = False
    """Its item's end was told before the handle's: the job was given up."""


class Window:
    """Flights, with what they sum up to."""

    def __init__(self, nbytes: int, handles: int) -> None:
        self._most_bytes = nbytes
        self._most_handles = handles
        self._fresh: dict[Flight, None] = {}
        """In the order of posting."""
        self._late: dict[Flight, None] = {}
        self._bytes = 0
        self._pieces = 0
        self.live = 0
        """Handles of unfinished jobs."""

    def __len__(self) -> int:
        return len(self._fresh) + len(self._late)

    @property
    def fresh(self) -> list[Flight]:
        """Flights that count, a copy."""
        return list(self._fresh)

    @property
    def late(self) -> list[Flight]:
        """Flights that take long, a copy."""
        return list(self._late)

    @property
    def nbytes(self) -> int:
        """Of the fresh ones."""
        return self._bytes

    def of(self, job: Job) -> list[Flight]:
        """Flights of one job; looks at all."""
        return [f for f in (*self._fresh, *self._late) if f.job is job]

    def admits(self, queue: PeerQueue, item: Item) -> bool:
        """The item may be posted to that peer now."""
        if not queue.flights or not self._fresh:
            return queue.flights < PEER_HANDLES
        return (
            queue.flights < PEER_HANDLES
            and len(self._fresh) < self._most_handles
            and self._bytes + item.nbytes <= self._most_bytes
            and self._pieces + item.pieces <= WINDOW_PIECES
        )

    def add(self, flight: Flight) -> None:
        """It was posted."""
        flight.queue.flights += 1
        flight.job.in_flight += 1
        self.live += not flight.job.finished
        self._fresh[flight] = None
        self._bytes += flight.item.nbytes
        self._pieces += flight.item.pieces

    def land(self, flight: Flight) -> None:
        """It is done, or errored."""
        if flight.late:
            del self._late[flight]
        else:
            self._uncount(flight)
        flight.queue.flights -= 1
        flight.job.in_flight -= 1
        self.live -= not flight.job.finished

    def age(self, now: float) -> None:
        """Stop counting what takes long."""
        while self._fresh and now - (flight := next(iter(self._fresh))).posted_at >= STALLED_AFTER:
            self._uncount(flight)
            flight.late = True
            self._late[flight] = None

    def _uncount(self, flight: Flight) -> None:
        del self._fresh[flight]
        self._bytes -= flight.item.nbytes
        self._pieces -= flight.item.pieces
