"""Whose turn it is to post: a queue per peer, and deficit round robin over the peers. Pure.

Every full handle costs the same, whether it is full by bytes or by descriptors, and each peer may
post one full handle's cost a round; so over any stretch in which two peers both have something to
post, neither gets more than twice the other's share. Within a peer, the first `PEER_JOBS` jobs take
turns and the others wait: with thousands of queued requests the first ones end soon, and only those
in turn have an item pulled from their iterator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdtransfer.mover.jobs import HANDLE_BYTES, HANDLE_PIECES, Item, Job

PEER_JOBS = 4
"""Jobs of one peer that take turns."""


def cost(item: Item) -> int:
    """Share of a round, in bytes: small pieces cost by their number."""
    return max(item.nbytes, item.pieces * (HANDLE_BYTES // HANDLE_PIECES))


@dataclass(eq=False)
class PeerQueue:
    """Jobs of one peer that have something to post, and what it has in flight."""

    peer: str
    jobs: int = 0
    """Unfinished jobs, idle ones included."""
    flights: int = 0
    """Handles that are not done, those of given up jobs included."""
    credit: int = 0
    in_turn: deque[Job] = field(default_factory=deque)
    behind: deque[Job] = field(default_factory=deque)

    def front(self) -> Job | None:
        """The job whose turn it is; jobs that failed meanwhile are dropped here."""
        while True:
            while len(self.in_turn) < PEER_JOBS and self.behind:
                self.in_turn.append(self.behind.popleft())
            if not self.in_turn:
                return None
            if self.in_turn[0].active:
                return self.in_turn[0]
            self.in_turn.popleft().queued = False

    def leave(self, job: Job) -> None:
        """The job whose turn it is has nothing more to post now."""
        self.in_turn.remove(job)
        job.queued = False

    def next_job(self) -> None:
        """The turn of this peer's next job."""
        self.in_turn.rotate(-1)


class Ring:
    """Peers with something to post, in turn."""

    def __init__(self) -> None:
        self._order: deque[PeerQueue] = deque()
        self._members: set[PeerQueue] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[PeerQueue]:
        return iter(self._order)

    def add(self, queue: PeerQueue, job: Job) -> None:
        """A job has something to post."""
        if not job.queued:
            job.queued = True
            queue.behind.append(job)
        if queue not in self._members:
            self._members.add(queue)
            self._order.append(queue)
            queue.credit = HANDLE_BYTES

    @property
    def lone(self) -> bool:
        """At most one job has something to post."""
        return not self._order or (
            len(self._order) == 1 and len(self._order[0].in_turn) + len(self._order[0].behind) < 2
        )

    @property
    def first(self) -> PeerQueue:
        """The peer whose turn it is."""
        return self._order[0]

    def pass_on(self) -> None:
        """The next peer's turn."""
        self._order.rotate(-1)

    def pay(self, queue: PeerQueue, item: Item) -> bool:
        """Take the item's cost from the first peer's credit; when there is not enough, the peer gets
        its share for the next round and the turn passes on."""
        price = min(cost(item), HANDLE_BYTES)
        if queue.credit < price:
            queue.credit += HANDLE_BYTES
            self.pass_on()
            return False
        queue.credit -= price
        return True

    def remove(self, queue: PeerQueue) -> None:
        """The first peer has nothing to post."""
        self._order.remove(queue)
        self._members.discard(queue)
